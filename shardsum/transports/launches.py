"""What kernels do on GPUs in an exchange of rows, beside NCCL's: how many there are, and what they read and write.

One makes the headers, one packs what is sent, one sums the rows of each hosted sink, one checks what has come (after
every chunk). All of a process run one behind the other. In a collective processes wait for each other, so what counts
is the busiest process between each and the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.layout import ExchangePlan, length


@dataclass(frozen=True)
class Work:
    """By process: kernels, and bytes that they read and write."""

    launches: tuple[int, ...]
    bytes: tuple[int, ...]

    def microseconds(self, launch_us: float, memory_gbps: float) -> float:
        """Of the busiest process."""
        return max(n * launch_us + moved / memory_gbps / 1e3 for n, moved in zip(self.launches, self.bytes))


def of_rows(
    plan: ExchangePlan, gathered: bool, chunks: int, row_bytes: int, result_bytes: int, copies: bool, shared: bool
) -> list[Work]:
    """Of an exchange in so many chunks, from each of its collectives to the next (the last: that of the next call).

    Args:
        gathered: by all_gather, else by all_to_all.
        row_bytes, result_bytes: of one position.
        copies: rows are copied into the result, one by one, not summed.
        shared: an all_gather of the results follows each chunk.
    """
    world, packing, summing = plan.world_size, [], []
    held = [[length(i) for i, owner in zip(plan.sources, plan.source_owners) if owner == p] for p in range(world)]
    most = max(map(sum, held))
    read, rows = _read(plan)
    for p in range(world):
        sent = sum(held[p]) if gathered else sum(n for b, n in enumerate(plan.positions[p]) if b != p)
        packs = (len(held[p]) > 1 or sent < most) if gathered else sent > 0
        sinks = plan.hosted_sinks(p)
        sums = sum(rows[q] if copies else 1 for q in sinks)
        packing.append((1 + chunks * packs + shared, 2 * packs * sent * row_bytes))
        written = sum(length(plan.sinks[q]) for q in sinks) * result_bytes
        summing.append((chunks * (sums + 1), sum(read[q] for q in sinks) * row_bytes + written))
    if shared:
        return [Work(*zip(*packing)), Work(*zip(*summing))]
    both = [(a + c, b + d) for (a, b), (c, d) in zip(packing, summing)]
    return [Work(*zip(*both))]


def _read(plan: ExchangePlan) -> tuple[Sequence[int], Sequence[int]]:
    """Positions of all sources that each sink needs, and how many sources that are."""
    begins, ends = np.array(plan.sources, dtype=np.int64).reshape(-1, 2).T
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for lo, hi in set(plan.sinks):
        common = np.maximum(np.minimum(ends, hi) - np.maximum(begins, lo), 0)
        found[lo, hi] = int(common.sum()), int(np.count_nonzero(common))
    each = [found[sink] for sink in plan.sinks]
    return [n for n, _ in each], [k for _, k in each]
