"""Exchanges of padded shards whose lengths only the device knows.

Lengths travel with the rows (behind them in the gathered buffer, or with the peers' flags) and are never read by the
host. Every source starts at position 0. The gradient brings every source the whole cotangent; its length then selects.
Compiled code calls the registered operator ``shardsum::exchange_padded``, eager calls go through
:class:`PaddedExchange`. Both take x ``(k, S_MAX, *F)`` and lengths ``(k,)`` and return one tensor a hosted sink, then
all lengths ``(R',)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval
from ..core.numerics import accumulator_dtype
from ..local import kernels
from ..local.gradients import finish_gradient, select
from ..local.ops import readable
from ..local.registry import define, differentiate
from .autograd import TAIL, Exchange, groups, keep, refuse_recomputation, tail_of, terms_of
from .autograd import exchange as registered_exchange
from .executor import Executor
from .handle import Job
from .prepared import Prepared
from .routes import LOCAL_ROUTE, Route, fingerprint
from .terms import Reduce, Terms, flatten, pairs

if TYPE_CHECKING:
    from .plan import Plan


class PreparedPadded(Prepared):
    def __init__(self, executor: Executor, terms: Terms) -> None:
        plan = executor.layout(terms)
        super().__init__(executor, terms, plan, _route(executor, terms, plan))

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        x, lengths = shards
        self._executor.begin(self.route, self._stamp)
        if self.route.transport == "peer":
            return Job(self._over_peers(x, lengths), iter(()))
        rows, all_lengths = self._gather(x, lengths)
        parts = [sum_padded_part(rows, all_lengths, self._plan.sinks[q], self._reduce) for q in self._sinks]
        results = [*parts, all_lengths]
        if self._executor.wire is not None:
            self._executor.wire.verify(results)
        return Job(results, iter(()))

    def _over_peers(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        """All R lengths are needed, and gathered, for the divisor of a mean's gradient only; else they are 0."""
        peers, plan, reduce = self._executor.peers, self._plan, self._reduce
        assert peers is not None
        outs = self._results(x, None)
        if not self._is_empty:
            said, number = fingerprint(self._terms, plan, self.route).hash, self._executor.peer_number()
            rows = list(x.unbind(0))
            peers.exchange(plan, rows, outs, reduce.op, reduce.scale, lengths, number=number, signature=said)
        if reduce.op == "mean":
            return [*outs, peers.gather_lengths(plan, lengths, self._executor.peer_number())]
        return [*outs, lengths.new_zeros(len(self._executor.owners))]

    def _gather(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Padded rows ``(R', S_MAX, *F)`` and lengths ``(R',)`` of all virtual ranks, in their order.

        Each row travels with its length behind it. A process that hosts fewer than the most sends empty rows, so R' is
        at least R; rows of length 0 add nothing.
        """
        executor = self._executor
        if executor.wire is None:
            return x, lengths.clone()
        slots, stride = padded_stride(executor.owners, self._terms)
        row_bytes = x[0].numel() * x.element_size()
        mine = torch.zeros((slots, stride), dtype=torch.uint8, device=x.device)
        mine[: x.shape[0], :row_bytes] = x.view(x.shape[0], -1).view(torch.uint8)
        mine[: x.shape[0], stride - 8 :].view(torch.int64)[:, 0] = lengths
        everyone = torch.empty((executor.world_size * slots, stride), dtype=torch.uint8, device=x.device)
        executor.wire.wait(executor.wire.all_gather(everyone, mine), x.device)
        order = _row_order(executor.owners, slots)
        if order is not None:
            everyone = everyone[torch.tensor(order, device=x.device)]
        strides = (stride // x.element_size(), *x.stride()[1:])
        rows = everyone.view(x.dtype).as_strided((everyone.shape[0], *x.shape[1:]), strides)
        return rows, everyone[:, stride - 8 :].contiguous().view(torch.int64)[:, 0].contiguous()


def _route(executor: Executor, terms: Terms, plan: ExchangePlan) -> Route:
    if executor.world_size == 1:
        return LOCAL_ROUTE
    if executor.router.takes_peers():
        return executor.router.route(plan, torch.Size(terms.row_shape).numel(), terms.dtype, terms.reduce, "cuda")
    slots, stride = padded_stride(executor.owners, terms)
    sent = (slots * stride * (executor.world_size - 1),) * executor.world_size
    reason = "lengths on the device travel with the padded rows"
    if executor.router.transport == "carry":
        reason = f'transport="carry" needs lengths that the host knows; {reason}'
    return Route("gather", False, 1, sent, sent, reason)


def padded_stride(owners: Sequence[int], terms: Terms) -> tuple[int, int]:
    """Rows that a process sends, and the bytes of one with its length. Rows stay 16-byte aligned."""
    capacity = terms.sources[0][1]
    row_bytes = capacity * torch.Size(terms.row_shape).numel() * terms.dtype.itemsize
    return max(map(owners.count, set(owners))), -(-row_bytes // 16) * 16 + 16


def _row_order(owners: Sequence[int], slots: int) -> list[int] | None:
    """Gathered row of each virtual rank; None when rows already lie in virtual-rank order (empty ones between them)."""
    used = [0] * (max(owners) + 1)
    order = []
    for owner in owners:
        order.append(owner * slots + used[owner])
        used[owner] += 1
    return None if order == sorted(order) else order


def gathered_rows(executor: Executor) -> int:
    """R', the number of lengths that a :class:`PreparedPadded` returns."""
    if executor.wire is None or executor.router.takes_peers():
        return len(executor.owners)
    slots = max(executor.owners.count(p) for p in range(executor.world_size))
    return len(executor.owners) if _row_order(executor.owners, slots) is not None else executor.world_size * slots


def sum_padded_part(rows: Tensor, lengths: Tensor, wanted: Interval, reduce: Reduce) -> Tensor:
    """Positions ``wanted`` of the sum of padded rows with device lengths."""
    begin, end = wanted
    out = rows.new_empty((end - begin, *rows.shape[2:]), dtype=reduce.dtype)
    part = rows[:, begin : max(begin, min(end, rows.shape[1]))]
    if out.numel() == 0 or part.shape[1] == 0:
        return out.fill_(reduce.empty)
    lengths = lengths - begin if begin else lengths
    kernels.sum_padded_device(out, readable(part), None, lengths, reduce.op == "mean", reduce.scale, False)
    return out


# Gradients


class PaddedExchange(torch.autograd.Function):
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
    """``PaddedAdjoint.apply(plan, lengths, all_lengths, *grads)``: the gradient of padded shards ``(k, S_MAX, *F)``.

    It is linear in the cotangents, and its own derivative is the forward collective.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, plan: Plan, call: int, lengths: Tensor, all_lengths: Tensor, *grads: Tensor
    ) -> Tensor:
        ctx.plan, ctx.call, ctx.dtype = plan, call, grads[0].dtype
        ctx.save_for_backward(lengths)
        adjoint = _whole_adjoint(plan.terms)
        if plan.terms.local_adjoint:
            whole = [grads[0]] * len(plan.virtual_ranks)
        else:
            whole = plan.of(adjoint).on_list([g.to(adjoint.dtype) for g in grads], call)
        return _select(plan.terms, whole, lengths, all_lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (lengths,) = ctx.saved_tensors
        results = ctx.plan.again(ctx.dtype).on_list(list(grad.unbind(0)), ctx.call, lengths)
        return None, None, None, None, *results

    jvp = Exchange.jvp


def _whole_adjoint(terms: Terms) -> Terms:
    """The exchange that brings every virtual rank the whole sum of cotangents, in the accumulator's dtype."""
    acc, end = accumulator_dtype(terms.dtype), max(end for _, end in terms.sinks)
    adjoint, held = terms.adjoint(), ((0, end),) * len(terms.sources)
    return replace(adjoint, sinks=held, size=end, reduce=Reduce("sum", None, acc), device_lengths=False)


def _select(terms: Terms, whole: list[Tensor], lengths: Tensor, all_lengths: Tensor) -> Tensor:
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


# The registered operator


def exchange_padded(x: Tensor, lengths: Tensor, terms: Terms, group: str) -> list[Tensor]:
    return torch.ops.shardsum.exchange_padded(x, lengths, flatten(terms.sinks), *tail_of(terms, group))


def _terms(x: Tensor, sinks: Any, tail: tuple[Any, ...]) -> Terms:
    sources = (0, x.shape[1]) * groups[tail[-1]].num_virtual_ranks
    return replace(terms_of(tail, sources, sinks, x, row_dims=2), device_lengths=True)


def _exchange_padded(x: Tensor, lengths: Tensor, sinks: Any, *tail: Any) -> list[Tensor]:
    return groups[tail[-1]].run_registered(_terms(x, sinks, tail), [x], lengths)


def _fake(x: Tensor, lengths: Tensor, sinks: Any, *tail: Any) -> list[Tensor]:
    refuse_recomputation([x])
    planner = groups[tail[-1]]
    wanted = planner.hosted(pairs(sinks), tail[2][1])
    outs = [x.new_empty((e - b, *x.shape[2:]), dtype=tail[5]) for b, e in wanted]
    return [*outs, x.new_empty((gathered_rows(planner.executor),), dtype=torch.int64)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, lengths, sinks, *tail = inputs
    ctx.terms, ctx.group = _terms(x, sinks, tuple(tail)), tail[-1]
    ctx.planner = groups[ctx.group]  # the group lives until its last backward
    ctx.save_for_backward(lengths.clone(), keep(output[-1]) if ctx.planner.world_size > 1 else output[-1])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple:
    lengths, all_lengths = ctx.saved_tensors
    terms, outs = ctx.terms, [g.contiguous() for g in grads[:-1]]
    if terms.local_adjoint:
        whole = [outs[0]] * len(ctx.planner.virtual_ranks)
    else:
        adjoint = _whole_adjoint(terms)
        whole = registered_exchange([g.to(adjoint.dtype) for g in outs], adjoint, None, ctx.group)
    return _select(terms, whole, lengths, all_lengths), *[None] * 11


_SCHEMA = f"exchange_padded(Tensor x, Tensor lengths, SymInt[] sinks, {TAIL}) -> Tensor[]"
differentiate(define(_SCHEMA, _exchange_padded, _fake), _setup, _backward)
