"""Rows are exactly what this process's sinks want: one all_to_all with uneven splits, nothing padded, nothing twice.

From process a to b travels, for each source r on a, the part of I_r inside the union of b's outputs
(:attr:`ExchangePlan.segments`), behind the header of the wire, if it needs one. What a process gives itself stays where
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .base import Layout, Mover, Pending
from .wire import Wire


class AllToAll:
    name = "all_to_all"

    def prepare(self, layout: Layout) -> Mover:
        return _AllToAll(layout)

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return ((a, b, n) for a, row in enumerate(plan.positions) for b, n in enumerate(row) if a != b and n)


class _AllToAll:
    """
    Attributes:
        _parts: of what is sent, one behind the other: (index of the hosted source, elements, first element of the
            source), or None for a header.
        _senders: of what is received: the first element, positions, and the positions of each piece.
    """

    def __init__(self, layout: Layout) -> None:
        plan, rank, width, item = layout.plan, layout.rank, layout.width, layout.dtype.itemsize
        head = layout.header_bytes // item
        hosted = plan.hosted_sources(rank)
        self._layout, self._moves = layout, width > 0 and plan.total > 0
        self._parts: list[tuple[int, int, int] | None] = []
        self._in_splits, self._out_splits = [0] * plan.world_size, [0] * plan.world_size
        for b, cell in enumerate(plan.segments[rank]):
            if b != rank and cell and width:
                self._parts += [None] if head else []
                for s in cell:
                    first = (s.interval[0] - plan.sources[s.source][0]) * width
                    self._parts.append((hosted.index(s.source), length(s.interval) * width, first))
                self._in_splits[b] = (head + sum(length(s.interval) for s in cell) * width) * item
        self._senders: list[tuple[int, int, list[int]]] = []
        pieces: list[tuple[int, int, int]] = []
        end = 0
        for a, row in enumerate(plan.segments):
            if a != rank and row[rank] and width:
                sizes = [length(s.interval) for s in row[rank]]
                self._senders.append((end + head, sum(sizes), sizes))
                pieces += [(s.source, *s.interval) for s in row[rank]]
                self._out_splits[a] = (head + sum(sizes) * width) * item
                end += head + sum(sizes) * width
        pieces += [(r, *plan.sources[r]) for r in hosted]
        self._received = end * item
        self._strides = torch.empty((0, *layout.row_shape), device="meta").stride()
        in_order = sorted((piece, i) for i, piece in enumerate(pieces))
        self._picked = layout.pick([((begin, end), i) for (_, begin, end), i in in_order])

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        assert wire is not None
        layout, first = self._layout, shards[0]
        if not self._moves:
            return Pending([sink.of(shards) for sink in self._picked], [], [first])
        parts, head = [], wire.header(layout.dtype) if None in self._parts else first
        for part in self._parts:
            if part is None:
                parts.append(head)
            else:
                shard = shards[part[0]]
                parts.append(shard.as_strided((part[1],), (1,), shard.storage_offset() + part[2]))
        send = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else first.new_empty(0)
        receive = torch.empty(self._received, dtype=torch.uint8, device=first.device)
        works = [wire.all_to_all(receive, send, self._out_splits, self._in_splits)]
        elements, pieces = receive.view(layout.dtype), list[Tensor]()
        for begin, positions, sizes in self._senders:
            rows = elements.as_strided((positions, *layout.row_shape), self._strides, begin)
            pieces += rows.split(sizes) if len(sizes) > 1 else (rows,)
        pieces += shards
        return Pending([sink.of(pieces) for sink in self._picked], works, [receive, send])
