"""Exchanges of padded shards whose lengths only the device knows.

Lengths travel with the rows (behind them in the gathered buffer, or with the peers' flags) and are never read by the
host. Every source starts at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval
from ..core.numerics import Reduce
from ..local import kernels
from ..local.ops import readable
from .exchanges import Prepared
from .handle import Job
from .routes import LOCAL_ROUTE, Route, fingerprint
from .terms import Terms

if TYPE_CHECKING:
    from .planner import Planner


class PreparedPadded(Prepared):
    def __init__(self, planner: Planner, terms: Terms) -> None:
        plan = planner.layout(terms)
        super().__init__(planner, terms, plan, _route(planner, terms, plan))

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        x, lengths = shards
        self._begin()
        if self.route.transport == "peer":
            return Job(self._over_peers(x, lengths), iter(()))
        rows, all_lengths = self._gather(x, lengths)
        parts = [sum_padded_part(rows, all_lengths, self._plan.sinks[q], self._reduce) for q in self._sinks]
        results = [*parts, all_lengths]
        if self._planner.wire is not None:
            self._planner.wire.verify(results)
        return Job(results, iter(()))

    def _over_peers(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        """All R lengths are needed, and gathered, for the divisor of a mean's gradient only; else they are 0."""
        peers, plan, reduce = self._planner.peers, self._plan, self._reduce
        assert peers is not None
        outs = self._results(x, None)
        if not self._is_empty:
            said, number = fingerprint(self._terms, plan, self.route).hash, self._planner.peer_number()
            rows = list(x.unbind(0))
            peers.exchange(plan, rows, outs, reduce.op, reduce.scale, lengths, number=number, signature=said)
        if reduce.op == "mean":
            return [*outs, peers.gather_lengths(plan, lengths, self._planner.peer_number())]
        return [*outs, lengths.new_zeros(len(self._planner.owners))]

    def _gather(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Padded rows ``(R', S_MAX, *F)`` and lengths ``(R',)`` of all virtual ranks, in their order.

        Each row travels with its length behind it. A process that hosts fewer than the most sends empty rows, so R' is
        at least R; rows of length 0 add nothing.
        """
        planner = self._planner
        if planner.wire is None:
            return x, lengths.clone()
        slots, stride = padded_stride(planner.owners, self._terms)
        row_bytes = x[0].numel() * x.element_size()
        mine = torch.zeros((slots, stride), dtype=torch.uint8, device=x.device)
        mine[: x.shape[0], :row_bytes] = x.view(x.shape[0], -1).view(torch.uint8)
        mine[: x.shape[0], stride - 8 :].view(torch.int64)[:, 0] = lengths
        everyone = torch.empty((planner.world_size * slots, stride), dtype=torch.uint8, device=x.device)
        planner.wire.wait(planner.wire.all_gather(everyone, mine), x.device)
        order = _row_order(planner.owners, slots)
        if order is not None:
            everyone = everyone[torch.tensor(order, device=x.device)]
        strides = (stride // x.element_size(), *x.stride()[1:])
        rows = everyone.view(x.dtype).as_strided((everyone.shape[0], *x.shape[1:]), strides)
        return rows, everyone[:, stride - 8 :].contiguous().view(torch.int64)[:, 0].contiguous()


def _route(planner: Planner, terms: Terms, plan: ExchangePlan) -> Route:
    if planner.world_size == 1:
        return LOCAL_ROUTE
    if planner.router.takes_peers():
        return planner.router.route(plan, torch.Size(terms.row_shape).numel(), terms.dtype, terms.reduce, "cuda")
    slots, stride = padded_stride(planner.owners, terms)
    sent = (slots * stride * (planner.world_size - 1),) * planner.world_size
    reason = "lengths on the device travel with the padded rows"
    if planner.router.transport == "carry":
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


def gathered_rows(planner: Planner) -> int:
    """R', the number of lengths that a :class:`PreparedPadded` returns."""
    if planner.wire is None or planner.router.takes_peers():
        return len(planner.owners)
    slots = max(planner.owners.count(p) for p in range(planner.world_size))
    return len(planner.owners) if _row_order(planner.owners, slots) is not None else planner.world_size * slots


def sum_padded_part(rows: Tensor, lengths: Tensor, wanted: Interval, reduce: Reduce) -> Tensor:
    """Positions ``wanted`` of the sum of padded rows with device lengths."""
    begin, end = wanted
    out = rows.new_empty((end - begin, *rows.shape[2:]), dtype=reduce.dtype)
    part = rows[:, begin : max(begin, min(end, rows.shape[1]))]
    if out.numel() == 0 or part.shape[1] == 0:
        return out.fill_(reduce.empty)
    lengths = lengths - begin if begin else lengths
    kernels.sum_padded_device(out, readable(part), None, lengths, reduce.op == "mean", reduce.scale)
    return out
