"""Rows are slices of a padded (G, k, S, *F) buffer that one all_gather fills on every process.

k is the largest number of sources on a process and S the longest source, so every process sends the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from ..core.layout import ExchangePlan, length
from .base import Pending, all_gather_transfers, rows_of_sink
from .wire import Wire


class Gather:
    name = "gather"

    def start(self, plan: ExchangePlan, shards: Sequence[Tensor], rank: int, wire: Wire | None) -> Pending:
        assert wire is not None
        slots, longest = _padded(plan)
        first, trailing = shards[0], shards[0].shape[1:]
        if slots == 1 and first.shape[0] == longest:
            mine = first  # already the padded form
        else:
            mine = first.new_empty((slots, longest, *trailing))
            for slot, shard in enumerate(shards):
                mine[slot, : shard.shape[0]] = shard
        everyone = first.new_empty((plan.world_size, slots, longest, *trailing))
        works = [wire.all_gather(everyone, mine)] if everyone.numel() else []
        used: Counter[int] = Counter()
        slots_of_all = everyone.flatten(0, 1).unbind(0)
        pieces = []
        for interval, owner in zip(plan.sources, plan.source_owners):
            row, n = slots_of_all[owner * slots + used[owner]], length(interval)
            pieces.append((interval[0], row if n == longest else row[:n]))
            used[owner] += 1
        sinks = [rows_of_sink(plan, q, pieces) for q in plan.hosted_sinks(rank)]
        return Pending(sinks, works, [everyone, mine])

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        slots, longest = _padded(plan)
        return all_gather_transfers(plan.world_size, slots * longest, ring)


def _padded(plan: ExchangePlan) -> tuple[int, int]:
    slots = max(Counter(plan.source_owners).values())
    return slots, max(length(i) for i in plan.sources)
