"""Gradients of exchanges, and the operator that torch.compile, fake tensors and dispatch modes see.

Eager calls run a :class:`~.plan.Plan`, through :class:`Exchange` where a gradient is needed. Compiled code calls the
registered operator ``shardsum::exchange``, which finds the same plan when it runs: only tensors, ints and strings cross
its boundary (intervals as flat ``SymInt[]``: begin, end, begin, end, ...), the group goes by name.

The adjoint of an exchange is the exchange with sources and sinks swapped. A mean divides by the forward's count of
contributions, in the accumulator's dtype, before the one rounding. With ``grad="identity"`` every process has the whole
cotangent and takes its parts of it; the derivative of *that* is the forward collective again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.numerics import accumulator_dtype
from ..local.gradients import finish_gradient
from ..local.registry import define, differentiate
from .arguments import NO_BATCHES
from .terms import Reduce, Terms, flatten, pairs

if TYPE_CHECKING:
    from .plan import Plan
    from .planner import Planner

#: What the operators find by a group's name. Entries go with their groups.
groups: WeakValueDictionary[str, Planner] = WeakValueDictionary()


class Exchange(torch.autograd.Function):
    """``Exchange.apply(plan, *shards)``: the results of a plan, one a hosted sink.

    It saves an empty tensor. Under activation checkpointing, needing a saved tensor is what runs a region again: every
    process then does so at the same place of its backward, whatever else it saved, and collectives stay in step.
    """

    @staticmethod
    def forward(plan: Plan, *shards: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(plan.run_recorded(shards))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.plan, ctx.call = inputs[0], inputs[0].call
        ctx.save_for_backward(inputs[1].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        _ = ctx.saved_tensors
        plan, terms = ctx.plan, ctx.plan.terms
        if terms.local_adjoint:
            return None, *LocalAdjoint.apply(plan, ctx.call, grads[0])
        acc = accumulator_dtype(terms.dtype)
        shards = plan.adjoint.on_list([g.to(acc) if acc == torch.float64 else g for g in grads], ctx.call)
        if terms.reduce.op == "mean":
            shards = divided(shards, [begin for begin, _ in plan.bounds], terms, _coverage)
        return None, *shards

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ValueError("shards: forward-mode derivatives are not implemented; use backward")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ValueError(NO_BATCHES)


class LocalAdjoint(torch.autograd.Function):
    """``LocalAdjoint.apply(plan, call, grad)``: the gradient of a replicated result whose cotangent every process has.

    Nothing travels. The cotangent stands for one tensor that all processes hold, so its own derivative is the sum over
    the virtual ranks of all processes: the forward collective.
    """

    @staticmethod
    def forward(plan: Plan, call: int, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        terms, first = plan.terms, plan.terms.sinks[0][0]
        if terms.reduce.op == "mean":
            (spread,) = divided([grad], [first], terms, _coverage)
        else:
            spread = finish_gradient(grad, None, terms.reduce.scale, terms.dtype)
        return tuple(spread[begin - first : begin - first + n].clone() for begin, n in plan.bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.plan, ctx.call, grad = inputs
        ctx.dtype = grad.dtype
        ctx.save_for_backward(grad.new_empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        _ = ctx.saved_tensors
        return None, None, ctx.plan.again(ctx.dtype).on_list(list(grads), ctx.call)[0]

    jvp = Exchange.jvp
    vmap = Exchange.vmap


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


# The registered operator

TAIL = "SymInt size, str name, str kinds, str op, float? scale, ScalarType dtype, str grad, str? label, str group"


def tail_of(terms: Terms, group: str) -> tuple[Any, ...]:
    """The arguments of the operators that are no tensors and no intervals."""
    reduce = terms.reduce
    rest = (reduce.op, reduce.scale, reduce.dtype, terms.grad, terms.label, group)
    return terms.size, terms.name, terms.kinds, *rest


def terms_of(tail: tuple[Any, ...], sources: Any, sinks: Any, like: Tensor, row_dims: int = 1) -> Terms:
    """The terms of such arguments; ``like`` is a shard, whose trailing shape begins at dim ``row_dims``."""
    size, name, kinds, op, scale, dtype, grad, label, _ = tail
    reduce, row_shape = Reduce(op, scale, dtype), tuple(like.shape[row_dims:])
    return Terms(name, pairs(sources), pairs(sinks), kinds, reduce, grad, size, row_shape, like.dtype, label=label)


def exchange(shards: list[Tensor], terms: Terms, rows: list[int] | None, group: str) -> list[Tensor]:
    """The registered operator.

    Shards may have more rows than their interval (the rest is not read), and ``rows`` asks for results with zeros
    behind theirs: so compiled code neither slices nor makes tensors whose size is a length, which would compile anew
    for 0 and 1.
    """
    sources, sinks = flatten(terms.sources), flatten(terms.sinks)
    return torch.ops.shardsum.exchange(shards, sources, sinks, rows, *tail_of(terms, group))


def _exchange(shards: list[Tensor], sources: Any, sinks: Any, rows: Any, *tail: Any) -> list[Tensor]:
    terms = terms_of(tail, sources, sinks, shards[0])
    outs = groups[tail[-1]].run_registered(terms, shards)
    return outs if rows is None else _with_rows(outs, rows)


def _with_rows(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The tensors with zeros behind their rows, up to ``rows`` each."""
    return [
        t if t.shape[0] == n else torch.cat([t, t.new_zeros((n - t.shape[0], *t.shape[1:]))])
        for t, n in zip(tensors, rows)
    ]


def _exchange_fake(shards: list[Tensor], sources: Any, sinks: Any, rows: Any, *tail: Any) -> list[Tensor]:
    refuse_recomputation(shards)
    terms = terms_of(tail, sources, sinks, shards[0])
    sizes = rows if rows is not None else [e - b for b, e in groups[tail[-1]].hosted(terms.sinks, terms.kinds[1])]
    return [shards[0].new_empty((n, *shards[0].shape[1:]), dtype=terms.reduce.dtype) for n in sizes]


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    shards, sources, sinks, _, *tail = inputs
    ctx.terms, ctx.group = terms_of(tuple(tail), sources, sinks, shards[0]), tail[-1]
    ctx.planner = groups[ctx.group]  # the group lives until its last backward
    ctx.rows = [s.shape[0] for s in shards]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple:
    terms = ctx.terms
    grads = [g.contiguous() for g in grads]
    hosted, scale = ctx.planner.hosted(terms.sources, terms.kinds[0]), terms.reduce.scale
    mean = terms.reduce.op == "mean"
    if terms.local_adjoint:
        first = terms.sinks[0][0]
        if mean:
            grads, scale = divided(grads, [first], terms, coverage), None
        held = [x - first for x in flatten(hosted)]
        shards = torch.ops.shardsum.local_adjoint(grads[0], held, ctx.rows, scale, terms.dtype)
    else:
        acc = accumulator_dtype(terms.dtype)
        grads = [g.to(acc) for g in grads] if acc == torch.float64 else grads
        shards = exchange(grads, terms.adjoint(), ctx.rows, ctx.group)
        if mean:
            shards = divided(shards, [begin for begin, _ in hosted], terms, coverage)
    return shards, *[None] * 12


def divided(
    grads: Sequence[Tensor], begins: Sequence[int], terms: Terms, count: Callable[[Tensor, list[int], int], Tensor]
) -> list[Tensor]:
    """What contributions to a mean get of cotangents that begin at these positions: divided by the count of
    contributions, multiplied by the scale and rounded."""
    flat = flatten(terms.sources)
    return [
        finish_gradient(g, count(g, [x - begin for x in flat], g.shape[0]), terms.reduce.scale, terms.dtype)
        for g, begin in zip(grads, begins)
    ]


# Parts of its adjoint, as operators: symbolic bounds need not be traced through slices


def coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    """``(size,)`` int64 on the device of ``like``: how many of the flat intervals cover each position."""
    return torch.ops.shardsum.coverage(like, flat, size)


def _coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    count = torch.zeros(size, dtype=torch.int64, device=like.device)
    for begin, end in pairs(flat):
        count[max(begin, 0) : max(min(end, size), 0)] += 1
    return count


def _local_adjoint(
    grad: Tensor, hosted: list[int], rows: list[int], scale: float | None, dtype: torch.dtype
) -> list[Tensor]:
    spread = finish_gradient(grad, None, scale, dtype)
    return _with_rows([spread[b:e].clone() for b, e in pairs(hosted)], rows)


_SCHEMA = f"exchange(Tensor[] shards, SymInt[] sources, SymInt[] sinks, SymInt[]? rows, {TAIL}) -> Tensor[]"
differentiate(define(_SCHEMA, _exchange, _exchange_fake), _setup, _backward)
define(
    "coverage(Tensor like, SymInt[] intervals, SymInt size) -> Tensor",
    _coverage,
    lambda like, flat, size: like.new_empty((size,), dtype=torch.int64),
)
define(
    "local_adjoint(Tensor grad, SymInt[] hosted, SymInt[] rows, float? scale, ScalarType dtype) -> Tensor[]",
    _local_adjoint,
    lambda grad, hosted, rows, scale, dtype: [grad.new_empty((n, *grad.shape[1:]), dtype=dtype) for n in rows],
)
