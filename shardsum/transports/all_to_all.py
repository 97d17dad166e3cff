"""Rows are exactly what this process's sinks want: one all_to_all with uneven splits, nothing padded, nothing twice.

From process a to b travels, for each source r on a, the part of I_r inside the union of b's outputs
(:attr:`ExchangePlan.segments`), behind the header of the wire, if it needs one. What a process gives itself stays where
it is. So where one process has all, rows are the shards themselves: the transport "local".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .base import Pending, Transport
from .wire import Wire


class AllToAll(Transport):
    """
    Attributes:
        _parts: of what is sent, one behind the other: (index of the hosted source, elements, first element of the
            source), or None for a header.
        _senders: of what is received: the first element, positions, and the positions of each piece.
    """

    @staticmethod
    def transfers(plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return ((a, b, n) for a, row in enumerate(plan.positions) for b, n in enumerate(row) if a != b and n)

    def _decide(self) -> None:
        plan, rank, width, item = self.plan, self.rank, self.width, self.dtype.itemsize
        head = self.header_bytes // item
        hosted = plan.hosted_sources(rank)
        self._moves = width > 0 and plan.world_size > 1 and plan.total > 0
        self._parts: list[tuple[int, int, int] | None] = []
        self._in_splits, self._out_splits = [0] * plan.world_size, [0] * plan.world_size
        for b, cell in enumerate(plan.segments[rank]) if self._moves else ():
            if b != rank and cell:
                self._parts += [None] if head else []
                for s in cell:
                    first = (s.interval[0] - plan.sources[s.source][0]) * width
                    self._parts.append((hosted.index(s.source), length(s.interval) * width, first))
                self._in_splits[b] = (head + sum(length(s.interval) for s in cell) * width) * item
        self._senders: list[tuple[int, int, list[int]]] = []
        pieces: list[tuple[int, int, int]] = []
        end = 0
        for a, row in enumerate(plan.segments) if self._moves else ():
            if a != rank and row[rank]:
                sizes = [length(s.interval) for s in row[rank]]
                self._senders.append((end + head, sum(sizes), sizes))
                pieces += [(s.source, *s.interval) for s in row[rank]]
                self._out_splits[a] = (head + sum(sizes) * width) * item
                end += head + sum(sizes) * width
        pieces += [(r, *plan.sources[r]) for r in hosted]
        self._received = end * item
        self._strides = torch.empty((0, *self.row_shape), device="meta").stride()
        in_order = sorted((piece, i) for i, piece in enumerate(pieces))
        self._place([((begin, end), i) for (_, begin, end), i in in_order])

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        if not self._moves:
            return Pending(self._rows(shards))
        assert wire is not None
        first = shards[0]
        parts, head = [], wire.header(self.dtype) if None in self._parts else first
        for part in self._parts:
            if part is None:
                parts.append(head)
            else:
                shard = shards[part[0]]
                parts.append(shard.as_strided((part[1],), (1,), shard.storage_offset() + part[2]))
        send = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else first.new_empty(0)
        receive = torch.empty(self._received, dtype=torch.uint8, device=first.device)
        transfer = wire.all_to_all(receive, send, self._out_splits, self._in_splits)
        elements, pieces = receive.view(self.dtype), list[Tensor]()
        for begin, positions, sizes in self._senders:
            rows = elements.as_strided((positions, *self.row_shape), self._strides, begin)
            pieces += rows.split(sizes) if len(sizes) > 1 else (rows,)
        pieces += shards
        return Pending(self._rows(pieces), transfer, [receive, send])
