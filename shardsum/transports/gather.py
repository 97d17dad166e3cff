"""Rows are slices of one buffer (G, n, *F) that one all_gather fills on every process.

Every process sends the same bytes: its sources one behind the other, and nothing that is read up to the n positions of
the process that has most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .base import Pending, Transport, all_gather_transfers
from .wire import Wire


class Gather(Transport):
    """
    Attributes:
        _sizes: positions of all sources in the order in which they lie, each process's followed by what is not read.
    """

    @staticmethod
    def transfers(plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return all_gather_transfers(plan.world_size, max(_held(plan)), ring)

    def _decide(self) -> None:
        plan, held = self.plan, _held(self.plan)
        self._total, self._mine = max(held), held[self.rank]
        self._bytes = plan.world_size * self._total * self.width * self.dtype.itemsize
        self._sizes: list[int] = []
        places = {}
        for process, n in enumerate(held):
            for r in plan.hosted_sources(process):
                places[r] = len(self._sizes)
                self._sizes.append(length(plan.sources[r]))
            self._sizes.append(self._total - n)
        self._place([(interval, places[r]) for r, interval in enumerate(plan.sources)])

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        assert wire is not None
        first = shards[0]
        if self._mine < self._total:
            mine = first.new_empty((self._total, *self.row_shape))
            torch.cat(list(shards), out=mine[: self._mine])
        else:
            mine = first if len(shards) == 1 else torch.cat(list(shards))
        everyone = torch.empty(self._bytes, dtype=torch.uint8, device=first.device)
        transfer = wire.all_gather(everyone, mine) if self._bytes else None
        rows = everyone.view(self.dtype).view(sum(self._sizes), *self.row_shape).split(self._sizes)
        return Pending(self._rows(rows), transfer, [everyone, mine])


def _held(plan: ExchangePlan) -> list[int]:
    """Positions that every process holds, its sources one behind the other."""
    held = [0] * plan.world_size
    for interval, owner in zip(plan.sources, plan.source_owners):
        held[owner] += length(interval)
    return held
