"""Rows are exactly what this process's sinks want: one all_to_all with uneven splits, nothing padded, nothing twice.

From process a to b travels, for each source r on a, the part of I_r inside the union of b's outputs
(:attr:`ExchangePlan.segments`), behind the header of the wire, if it needs one. What a process gives itself stays where
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Segment, length
from .base import Pending, rows_of_sink
from .wire import Wire


class AllToAll:
    name = "all_to_all"

    def start(self, plan: ExchangePlan, shards: Sequence[Tensor], rank: int, wire: Wire | None) -> Pending:
        assert wire is not None
        first = shards[0]
        trailing, width = first.shape[1:], first.shape[1:].numel()
        local = dict(zip(plan.hosted_sources(rank), shards))

        def view(segment: Segment) -> Tensor:
            begin = plan.sources[segment.source][0]
            return local[segment.source][segment.interval[0] - begin : segment.interval[1] - begin]

        outgoing = [() if b == rank else cell for b, cell in enumerate(plan.segments[rank])]
        incoming = [() if a == rank else row[rank] for a, row in enumerate(plan.segments)]
        head = wire.header(first)
        ahead = 0 if head is None else head.numel()
        parts = []
        for cell in outgoing if width else ():
            parts += [head] if cell and head is not None else []
            parts += [view(s).reshape(-1) for s in cell]
        send = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else first.new_empty(0)
        in_splits, out_splits = (
            [width and sum(length(s.interval) for s in cell) * width + bool(cell) * ahead for cell in cells]
            for cells in (outgoing, incoming)
        )
        receive = first.new_empty(sum(out_splits))
        works = [wire.all_to_all(receive, send, out_splits, in_splits)] if width and plan.total else []

        pieces = [(s.source, s.interval[0], view(s)) for s in plan.segments[rank][rank]]
        offset = 0
        for cell in incoming:
            offset += bool(cell and width) * ahead
            for s in cell:
                n = length(s.interval)
                pieces.append((s.source, s.interval[0], receive[offset : offset + n * width].view(n, *trailing)))
                offset += n * width
        pieces.sort(key=lambda piece: piece[:2])
        sinks = [rows_of_sink(plan, q, [piece[1:] for piece in pieces]) for q in plan.hosted_sinks(rank)]
        return Pending(sinks, works, [receive, send])

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return ((a, b, n) for a, row in enumerate(plan.positions) for b, n in enumerate(row) if a != b and n)
