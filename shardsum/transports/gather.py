"""Rows are slices of one buffer (G, n, *F) that one all_gather fills on every process.

Every process sends the same bytes: its sources one behind the other, and nothing that is read up to the n positions of
the process that has most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .base import Layout, Mover, Pending, all_gather_transfers
from .wire import Wire


class Gather:
    name = "gather"

    def prepare(self, layout: Layout) -> Mover:
        return _Gather(layout)

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return all_gather_transfers(plan.world_size, max(_held(plan)), ring)


class _Gather:
    """
    Attributes:
        _sizes: positions of all sources in the order in which they lie, each process's followed by what is not read.
    """

    def __init__(self, layout: Layout) -> None:
        plan, held = layout.plan, _held(layout.plan)
        self._layout, self._total, self._mine = layout, max(held), held[layout.rank]
        self._bytes = plan.world_size * self._total * layout.row_bytes
        self._sizes: list[int] = []
        places = {}
        for process, n in enumerate(held):
            for r in plan.hosted_sources(process):
                places[r] = len(self._sizes)
                self._sizes.append(length(plan.sources[r]))
            self._sizes.append(self._total - n)
        self._picked = layout.pick([(interval, places[r]) for r, interval in enumerate(plan.sources)])

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        assert wire is not None
        layout, first = self._layout, shards[0]
        if self._mine < self._total:
            mine = first.new_empty((self._total, *layout.row_shape))
            torch.cat(list(shards), out=mine[: self._mine])
        else:
            mine = first if len(shards) == 1 else torch.cat(list(shards))
        everyone = torch.empty(self._bytes, dtype=torch.uint8, device=first.device)
        works = [wire.all_gather(everyone, mine)] if self._bytes else []
        rows = everyone.view(layout.dtype).view(sum(self._sizes), *layout.row_shape).split(self._sizes)
        return Pending([sink.of(rows) for sink in self._picked], works, [everyone, mine])


def _held(plan: ExchangePlan) -> list[int]:
    """Positions that every process holds, its sources one behind the other."""
    held = [0] * plan.world_size
    for interval, owner in zip(plan.sources, plan.source_owners):
        held[owner] += length(interval)
    return held
