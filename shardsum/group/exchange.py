"""The registered communicating operators and their autograd.

    shardsum::exchange         host-known intervals: sources (I_r) -> sinks (O_q), by sum, mean or copy
    shardsum::exchange_padded  padded shards with lengths only the device knows (:mod:`shardsum.group.padded`)

The adjoint of an exchange is the exchange with sources and sinks swapped; a mean divides by the forward's count of
contributions, in the accumulator's dtype, before the one rounding. Only tensors, ints and strings cross the boundary:
intervals as flat ``SymInt[]`` (begin, end, begin, end, ...), ``size`` as the end of all positions, and :class:`Terms`.

Shards may have more rows than their interval (the rest is not read), and ``rows`` asks for results with zeros behind
theirs: so compiled code neither slices nor makes tensors whose size is a length, which would compile anew for 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.numerics import accumulator_dtype
from ..core.reference import contributions
from ..local import ops as operators
from ..local.ops import finish_gradient
from ..local.registry import define
from .arguments import check_intervals, check_lengths
from .executor import Reduce

if TYPE_CHECKING:
    from .calls import Runner

#: Groups by name: an operator's schema carries no objects. Entries go with their groups.
groups: WeakValueDictionary[str, Runner] = WeakValueDictionary()


def flatten(intervals: Sequence[Interval]) -> list[int]:
    return [bound for interval in intervals for bound in interval]


def intervals(flat: Sequence[int]) -> tuple[Interval, ...]:
    return tuple(zip(flat[::2], flat[1::2]))


@dataclass(frozen=True)
class Terms:
    """The last arguments of both operators, in their order.

    Attributes:
        name: the collective, for errors.
        kinds: what sources and sinks are, one letter each: "v" virtual ranks, "p" processes (a result that every
            process gets).
        op, scale, dtype: see :class:`shardsum.group.executor.Reduce`.
        grad: what the gradient of a replicated result means: "sum" adds the processes' cotangents, "identity" takes
            this process's own as the whole one. "adjoint" marks an exchange of cotangents: what the forward agreed on
            covers it.
        group: the group's name.
    """

    name: str
    kinds: str
    op: str
    scale: float | None
    dtype: torch.dtype
    grad: str
    group: str

    #: Their part of an operator's schema.
    SCHEMA = "str name, str kinds, str op, float? scale, ScalarType dtype, str grad, str group) -> Tensor[]"

    @property
    def owner(self) -> Runner:
        return groups[self.group]

    @property
    def reduce(self) -> Reduce:
        return Reduce(self.op, self.scale, self.dtype)

    def adjoint(self, op: str, scale: float | None, dtype: torch.dtype) -> tuple[Any, ...]:
        """The terms, as arguments, of the exchange of cotangents."""
        return f"backward of {self.name}", self.kinds[::-1], op, scale, dtype, "adjoint", self.group


# exchange


def _exchange(
    shards: list[Tensor], sources: list[int], sinks: list[int], rows: list[int] | None, size: int, *tail: Any
) -> list[Tensor]:
    terms = Terms(*tail)
    owner, held, wanted = terms.owner, intervals(sources), intervals(sinks)
    if terms.grad != "adjoint":

        def check() -> None:
            if terms.name == "exchange":
                check_intervals("in_intervals", held, len(held), size)
                check_intervals("out_intervals", wanted, len(wanted), size)
            check_lengths([e - b for b, e in held], shards, owner.virtual_ranks, size)

        owner.agree_compiled(terms, shards[0], [size, sources, sinks], check)
    elif owner.agreement.wary:
        owner.begin(terms.name)
        owner.agreement.agree(terms.name, {})
    hosted = owner.hosted(held, terms.kinds[0])
    narrowed = [s if s.shape[0] == e - b else s[: e - b] for s, (b, e) in zip(shards, hosted)]
    try:
        outs = owner.run(terms.name, narrowed, held, wanted, terms.kinds, terms.reduce).result()
    except RuntimeError as error:
        raise owner.failure(terms.name, error) from error
    return _with_rows(outs, rows or [o.shape[0] for o in outs])


def _with_rows(tensors: list[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The tensors with zeros behind their rows, up to ``rows`` each."""
    return [
        t if t.shape[0] == n else torch.cat([t, t.new_zeros((n - t.shape[0], *t.shape[1:]))])
        for t, n in zip(tensors, rows)
    ]


def _exchange_fake(
    shards: list[Tensor], sources: list[int], sinks: list[int], rows: list[int] | None, size: int, *tail: Any
) -> list[Tensor]:
    terms, trailing = Terms(*tail), shards[0].shape[1:]
    sizes = rows or [e - b for b, e in terms.owner.hosted(intervals(sinks), terms.kinds[1])]
    return [shards[0].new_empty((n, *trailing), dtype=terms.dtype) for n in sizes]


exchange = define(
    f"exchange(Tensor[] shards, SymInt[] sources, SymInt[] sinks, SymInt[]? rows, SymInt size, {Terms.SCHEMA}",
    _exchange,
    _exchange_fake,
)


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    shards, ctx.sources, ctx.sinks, _, ctx.size, *tail = inputs
    ctx.rows, ctx.dtype, ctx.terms = [s.shape[0] for s in shards], shards[0].dtype, Terms(*tail)
    ctx.owner = ctx.terms.owner  # the group lives until its last backward


def _backward(ctx: Any, grads: list[Tensor]) -> tuple:
    grads = [g.contiguous() for g in grads]
    shards = _local_adjoint(ctx, grads[0]) if ctx.terms.grad == "identity" else _exchange_adjoint(ctx, grads)
    return shards, *[None] * 11


def _local_adjoint(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The replicated result's cotangent is the same everywhere: each hosted shard takes its part, nothing travels."""
    begin = ctx.sinks[0]
    bounds = [x - begin for x in ctx.sources]
    if ctx.terms.op == "mean":
        grad = grad.to(accumulator_dtype(ctx.dtype))
        grad = finish_gradient(grad, coverage(grad, bounds, grad.shape[0]), None, grad.dtype)
    hosted = flatten(ctx.owner.hosted(intervals(bounds), ctx.terms.kinds[0]))
    return local_adjoint(grad, hosted, ctx.rows, ctx.terms.scale, ctx.dtype)


def _exchange_adjoint(ctx: Any, grads: list[Tensor]) -> list[Tensor]:
    acc, scale = accumulator_dtype(ctx.dtype), ctx.terms.scale
    if acc == torch.float64:  # a float32 result of float64 shards: their gradient is added in float64
        grads = [g.to(acc) for g in grads]
    mean = ctx.terms.op == "mean"
    tail = ctx.terms.adjoint("sum", *((None, acc) if mean else (scale, ctx.dtype)))
    shards = exchange(grads, ctx.sinks, ctx.sources, ctx.rows, ctx.size, *tail)
    if not mean:
        return shards
    hosted = ctx.owner.hosted(intervals(ctx.sources), ctx.terms.kinds[0])
    counts = [coverage(s, [x - b for x in ctx.sources], s.shape[0]) for s, (b, _) in zip(shards, hosted)]
    return [finish_gradient(s, count, scale, ctx.dtype) for s, count in zip(shards, counts)]


exchange.differentiate(_setup, _backward)


# Parts of its adjoint, as operators: symbolic bounds need not be traced through slices


def _coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    return contributions([(max(b, 0), min(e, size)) for b, e in intervals(flat)], size, like.device)


#: ``(size,)`` int64 on the device of ``like``: how many of the flat intervals cover each position.
coverage = define(
    "coverage(Tensor like, SymInt[] intervals, SymInt size) -> Tensor",
    _coverage,
    lambda like, flat, size: like.new_empty((size,), dtype=torch.int64),
)


def _take(grad: Tensor, hosted: list[int], rows: list[int], scale: float | None, dtype: torch.dtype) -> list[Tensor]:
    pairs = intervals(hosted)
    starts, lengths = [b for b, _ in pairs], [e - b for b, e in pairs]
    return _with_rows(operators.ragged_sum_adjoint(grad, starts, lengths, "sum", scale, dtype), rows)


#: The parts ``hosted`` (flat intervals) of a cotangent, scaled, with zeros behind them up to ``rows``.
local_adjoint = define(
    "local_adjoint(Tensor grad, SymInt[] hosted, SymInt[] rows, float? scale, ScalarType dtype) -> Tensor[]",
    _take,
    lambda grad, hosted, rows, scale, dtype: [grad.new_empty((n, *grad.shape[1:]), dtype=dtype) for n in rows],
)


def _take_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    grad, ctx.hosted, _, ctx.scale, _ = inputs
    ctx.size, ctx.dtype = grad.shape[0], grad.dtype


def _take_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    pairs = intervals(ctx.hosted)
    parts = [g[: e - b].contiguous() for g, (b, e) in zip(grads, pairs)]
    total = operators.ragged_sum(parts, [b for b, _ in pairs], ctx.size, None, "sum", ctx.scale, ctx.dtype)
    return total, None, None, None, None


local_adjoint.differentiate(_take_setup, _take_backward)
