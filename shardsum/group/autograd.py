"""Gradients of exchanges.

Eager calls run a :class:`~.plan.Plan`, through the functions here where a gradient is needed. Compiled code has a
registered operator (:mod:`.compiled`), whose gradient is made of the same parts.

The adjoint of an exchange is the exchange with sources and sinks swapped. A mean divides by the forward's count of
contributions, in the accumulator's dtype, before the one rounding. With ``grad="identity"`` every process has the whole
cotangent and takes its parts of it; the derivative of *that* is the forward collective again. With lengths on the
device every source gets the whole cotangent; its length then selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.numerics import accumulator_dtype
from ..local.gradients import finish_gradient, select
from .arguments import NO_BATCHES
from .terms import Reduce, Terms, flatten, pairs

if TYPE_CHECKING:
    from .plan import Plan


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
            shards = divided(shards, [begin for begin, _ in plan.bounds], terms, coverage)
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
            (spread,) = divided([grad], [first], terms, coverage)
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


class PaddedExchange(torch.autograd.Function):
    """``PaddedExchange.apply(plan, x, lengths)``: the results of a plan with device lengths, then all lengths."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        outs = plan.run_recorded([x, lengths])
        ctx.plan, ctx.call = plan, plan.call
        ctx.save_for_backward(lengths.clone(), outs[-1])  # the caller may write the next step's lengths before backward
        ctx.mark_non_differentiable(outs[-1])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        return None, PaddedAdjoint.apply(ctx.plan, ctx.call, *ctx.saved_tensors, *grads[:-1]), None

    jvp = Exchange.jvp


class PaddedAdjoint(torch.autograd.Function):
    """``PaddedAdjoint.apply(plan, call, lengths, all_lengths, *grads)``: the gradient of padded shards, in one Tensor
    ``(k, S_MAX, *F)``.

    It is linear in the cotangents, and its own derivative is the forward collective.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, plan: Plan, call: int, lengths: Tensor, all_lengths: Tensor, *grads: Tensor
    ) -> Tensor:
        ctx.plan, ctx.call, ctx.dtype = plan, call, grads[0].dtype
        ctx.save_for_backward(lengths)
        adjoint = whole_adjoint(plan.terms)
        if plan.terms.local_adjoint:
            whole = [grads[0]] * len(plan.virtual_ranks)
        else:
            whole = plan.of(adjoint).on_list([g.to(adjoint.dtype) for g in grads], call)
        return select_padded(plan.terms, whole, lengths, all_lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (lengths,) = ctx.saved_tensors
        results = ctx.plan.again(ctx.dtype).on_list(list(grad.unbind(0)), ctx.call, lengths)
        return None, None, None, None, *results

    jvp = Exchange.jvp


def whole_adjoint(terms: Terms) -> Terms:
    """The exchange that brings every virtual rank the whole sum of cotangents, in the accumulator's dtype."""
    acc, end = accumulator_dtype(terms.dtype), max(end for _, end in terms.sinks)
    adjoint, held = terms.adjoint(), ((0, end),) * len(terms.sources)
    return replace(adjoint, sinks=held, size=end, reduce=Reduce("sum", None, acc), device_lengths=False)


def select_padded(terms: Terms, whole: list[Tensor], lengths: Tensor, all_lengths: Tensor) -> Tensor:
    """The gradient of padded shards from the whole cotangent of every hosted one; exactly 0 behind its length."""
    capacity, device, acc = terms.sources[0][1], lengths.device, accumulator_dtype(terms.dtype)
    end = whole[0].shape[0]
    count = None
    if terms.reduce.op == "mean":
        count = (torch.arange(end, device=device) < all_lengths.clamp(0, capacity)[:, None]).sum(0)
    if count is not None or terms.reduce.scale is not None:
        whole = [finish_gradient(w.to(acc), count, terms.reduce.scale, terms.dtype) for w in whole]
    rows = torch.stack([w.to(terms.dtype) for w in whole])
    if end < capacity:
        rows = torch.cat([rows, rows.new_zeros((rows.shape[0], capacity - end, *rows.shape[2:]))], 1)
    valid = torch.arange(capacity, device=device) < lengths[:, None]
    return select(valid, rows[:, :capacity])


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


def coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    """``(size,)`` int64 on the device of ``like``: how many of the flat intervals cover each position."""
    count = torch.zeros(size, dtype=torch.int64, device=like.device)
    for begin, end in pairs(flat):
        count[max(begin, 0) : max(min(end, size), 0)] += 1
    return count
