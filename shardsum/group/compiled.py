"""The operator that torch.compile, fake tensors and dispatch modes see, ``shardsum::exchange``, with its gradient.

It finds the plan that an eager call has when it runs: only tensors, ints and strings cross its boundary (intervals as
flat ``SymInt[]``: begin, end, begin, end, ...), the group goes by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.numerics import accumulator_dtype
from ..local.gradients import finish_gradient
from ..local.registry import define, differentiate
from . import autograd
from .autograd import divided, select_padded, whole_adjoint
from .padded import gathered_rows
from .terms import Reduce, Terms, flatten, pairs

if TYPE_CHECKING:
    from .planner import Planner

#: What the operators find by a group's name. Entries go with their groups.
groups: WeakValueDictionary[str, Planner] = WeakValueDictionary()


def keep(result: Tensor) -> Tensor:
    """``result`` itself. In compiled code it is then saved for backward, which else might run the collective again to
    save memory (``activation_memory_budget``), perhaps on one process alone.

    Compilers have no such mark for operators of others, but they always save what functional collectives have waited
    for (but for a budget of 0: :func:`refuse_recomputation`).
    """
    return torch.ops._c10d_functional.wait_tensor(result)


def refuse_recomputation(tensors: Sequence[Tensor]) -> None:
    """ValueError, while a compiler traces a collective that a gradient will follow, where it would save nothing at all
    between forward and backward: then it runs every collective again, whatever its mark."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and any(x.requires_grad for x in tensors):
        import torch._functorch.config as compilers
        from torch.fx import traceback

        name = "torch._functorch.config.activation_memory_budget"
        budget = getattr(compilers, "activation_memory_budget", 1.0)
        of_region = (traceback.current_meta.get("custom") or {}).get("_region_activation_memory_budget")
        if of_region is not None:  # it overrides the other
            name, budget = "torch.autograd.graph.region_activation_memory_budget", of_region
        if budget == 0:
            raise ValueError(
                f"{name}: at 0 the compiler runs collectives again in backward, perhaps on one process alone; take a "
                "small number above 0 (0.01): their results are saved then, and the rest is computed again"
            )


class Kept(torch.autograd.Function):
    """:func:`keep` with its gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:  # type: ignore[override]
        return keep(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


# The operator

_SCHEMA = (
    "exchange(Tensor[] shards, Tensor? lengths, SymInt[] sources, SymInt[] sinks, SymInt[]? rows, SymInt size, "
    "str name, str kinds, str op, float? scale, ScalarType dtype, str grad, str? label, str group) -> Tensor[]"
)


def exchange(
    shards: list[Tensor], lengths: Tensor | None, terms: Terms, rows: list[int] | None, group: str
) -> list[Tensor]:
    """The registered operator: one result a hosted sink; with lengths on the device, then all lengths ``(R',)``.

    Shards may have more rows than their interval (the rest is not read), and ``rows`` asks for results with zeros
    behind theirs: so compiled code neither slices nor makes tensors whose size is a length, which would compile anew
    for 0 and 1.
    """
    reduce, intervals = terms.reduce, (flatten(terms.sources), flatten(terms.sinks))
    tail = (terms.size, terms.name, terms.kinds, reduce.op, reduce.scale, reduce.dtype, terms.grad, terms.label, group)
    return torch.ops.shardsum.exchange(shards, lengths, *intervals, rows, *tail)


def _terms(shard: Tensor, lengths: Tensor | None, sources: Any, sinks: Any, tail: Sequence[Any]) -> Terms:
    size, name, kinds, op, scale, dtype, grad, label, _ = tail
    reduce, row_shape, device_lengths = Reduce(op, scale, dtype), tuple(shard.shape[1:]), lengths is not None
    return Terms(
        name, pairs(sources), pairs(sinks), kinds, reduce, grad, size, row_shape, shard.dtype, device_lengths, label
    )


def _exchange(
    shards: list[Tensor], lengths: Tensor | None, sources: Any, sinks: Any, rows: Any, *tail: Any
) -> list[Tensor]:
    outs = groups[tail[-1]].run_registered(_terms(shards[0], lengths, sources, sinks, tail), shards, lengths)
    return outs if rows is None else _with_rows(outs, rows)


def _with_rows(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The tensors with zeros behind their rows, up to ``rows`` each."""
    return [
        t if t.shape[0] == n else torch.cat([t, t.new_zeros((n - t.shape[0], *t.shape[1:]))])
        for t, n in zip(tensors, rows)
    ]


def _exchange_fake(
    shards: list[Tensor], lengths: Tensor | None, sources: Any, sinks: Any, rows: Any, *tail: Any
) -> list[Tensor]:
    refuse_recomputation(shards)
    planner, first = groups[tail[-1]], shards[0]
    terms = _terms(first, lengths, sources, sinks, tail)
    sizes = rows if rows is not None else [e - b for b, e in planner.hosted(terms.sinks, terms.kinds[1])]
    outs = [first.new_empty((n, *first.shape[1:]), dtype=terms.reduce.dtype) for n in sizes]
    if lengths is not None:
        outs.append(first.new_empty((gathered_rows(planner),), dtype=torch.int64))
    return outs


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    shards, lengths, sources, sinks, _, *tail = inputs
    ctx.terms, ctx.group = _terms(shards[0], lengths, sources, sinks, tail), tail[-1]
    ctx.planner = groups[ctx.group]  # the group lives until its last backward
    ctx.rows = [s.shape[0] for s in shards]
    if lengths is not None:
        ctx.save_for_backward(lengths.clone(), keep(output[-1]) if ctx.planner.world_size > 1 else output[-1])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple:
    terms, scale = ctx.terms, ctx.terms.reduce.scale
    grads = [g.contiguous() for g in (grads[:-1] if terms.device_lengths else grads)]
    hosted, mean = ctx.planner.hosted(terms.sources, terms.kinds[0]), terms.reduce.op == "mean"
    if terms.device_lengths:
        whole = grads * len(hosted)
        if not terms.local_adjoint:
            adjoint = whole_adjoint(terms)
            whole = exchange([g.to(adjoint.dtype) for g in grads], None, adjoint, None, ctx.group)
        shards = list(select_padded(terms, whole, *ctx.saved_tensors).unbind(0))
    elif terms.local_adjoint:
        first = terms.sinks[0][0]
        if mean:
            grads, scale = divided(grads, [first], terms, coverage), None
        held = [x - first for x in flatten(hosted)]
        shards = torch.ops.shardsum.local_adjoint(grads[0], held, ctx.rows, scale, terms.dtype)
    else:
        acc = accumulator_dtype(terms.dtype)
        grads = [g.to(acc) for g in grads] if acc == torch.float64 else grads
        shards = exchange(grads, None, terms.adjoint(), ctx.rows, ctx.group)
        if mean:
            shards = divided(shards, [begin for begin, _ in hosted], terms, coverage)
    return shards, *[None] * 13


# Parts of its adjoint, as operators: symbolic bounds need not be traced through slices


def coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    return torch.ops.shardsum.coverage(like, flat, size)


def _local_adjoint(
    grad: Tensor, hosted: list[int], rows: list[int], scale: float | None, dtype: torch.dtype
) -> list[Tensor]:
    spread = finish_gradient(grad, None, scale, dtype)
    return _with_rows([spread[b:e].clone() for b, e in pairs(hosted)], rows)


differentiate(define(_SCHEMA, _exchange, _exchange_fake), _setup, _backward)
define(
    "coverage(Tensor like, SymInt[] intervals, SymInt size) -> Tensor",
    autograd.coverage,
    lambda like, flat, size: like.new_empty((size,), dtype=torch.int64),
)
define(
    "local_adjoint(Tensor grad, SymInt[] hosted, SymInt[] rows, float? scale, ScalarType dtype) -> Tensor[]",
    _local_adjoint,
    lambda grad, hosted, rows, scale, dtype: [grad.new_empty((n, *grad.shape[1:]), dtype=dtype) for n in rows],
)
