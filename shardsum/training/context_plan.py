"""What is decided once a batch: everyone's chunks, what travels, and the work. Nothing here knows a process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..core.layout import Interval, length, split_evenly
from .context_checks import check_lengths
from .context_chunks import plan_chunks
from .documents import UNLIMITED, check_borders, effective_window


def share(needed: Sequence[Interval], owners: Sequence[int]) -> tuple[list[Interval], list[int]]:
    """Overlapping intervals of one process joined.

    Returns:
        The intervals, empty for those that another one holds, and for each the index of the one that holds it.

    Example:
        >>> share([(0, 4), (0, 8), (2, 12), (12, 16)], [0, 1, 1, 0])
        ([(0, 4), (0, 12), (2, 2), (12, 16)], [0, 1, 1, 3])
    """
    joined, homes, last = list(needed), list(range(len(needed))), dict[int, int]()
    for v in sorted(range(len(needed)), key=lambda v: needed[v]):
        (begin, end), home = needed[v], last.get(owners[v])
        if begin == end:
            continue
        if home is not None and begin < joined[home][1]:
            joined[home], homes[v] = (joined[home][0], max(joined[home][1], end)), home
            joined[v] = (begin, begin)
        else:
            last[owners[v]] = v
    return joined, homes


class SequencePlan:
    """One batch of packed documents on the virtual ranks of a group.

    Args:
        owners: the process of every virtual rank.
        rank: this process.
        device: where the kernels' borders are wanted.
        lengths, cu_seqlens, causal, window, recompute_exchange: see :meth:`shardsum.ShardGroup.context_parallel`.

    Attributes:
        owned, needed: intervals of positions per virtual rank: its chunk, and the keys that the chunk needs.
        received: what travels of ``needed``: where several chunks of a process need the same keys, the first of them
            receives the keys of all, and the others an empty interval.
        views: for every hosted chunk, whose received keys hold its own (index among the hosted chunks), and the slice
            of them; None for all of them.
        everyone, chunks: the chunks of all virtual ranks, and the hosted ones.
        work: query-key pairs by process.

    Raises:
        ValueError: bad lengths, borders or window.
    """

    def __init__(
        self,
        owners: Sequence[int],
        rank: int,
        device: torch.device,
        lengths: Sequence[int] | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        causal: bool,
        window: Sequence[int] | None,
        recompute_exchange: bool | None,
    ) -> None:
        if lengths is None:
            cu_seqlens = check_borders(cu_seqlens, None)
            lengths = split_evenly(cu_seqlens[-1], len(owners))
        self.owners, self.processes = owners, range(max(owners) + 1)
        self.lengths = check_lengths(lengths, len(owners))
        self.size = sum(self.lengths)
        self.cu_seqlens = check_borders(cu_seqlens, self.size)
        self.window = effective_window(window, causal)
        self.everyone = plan_chunks(self.lengths, self.cu_seqlens, self.window)
        self.owned, self.needed = [c.owned for c in self.everyone], [c.needed for c in self.everyone]
        self.chunks = [chunk for chunk, owner in zip(self.everyone, owners) if owner == rank]
        self.received, homes = share(self.needed, owners)
        ranks = [v for v, owner in enumerate(owners) if owner == rank]
        self.views: list[tuple[int, slice | None]] = []
        for v in ranks:
            received = self.received[homes[v]]
            at = self.needed[v][0] - received[0]
            rows = None if self.needed[v] == received else slice(at, at + length(self.needed[v]))
            self.views.append((ranks.index(homes[v]), rows))
        self.recompute_exchange = self._exceeds() if recompute_exchange is None else bool(recompute_exchange)
        for chunk in self.chunks:
            chunk.warm(device)

    @cached_property
    def work(self) -> tuple[int, ...]:
        totals = [0 for _ in self.processes]
        for owner, chunk in zip(self.owners, self.everyone):
            totals[owner] += chunk.pairs
        return tuple(totals)

    @property
    def has_chunks_of_two_calls(self) -> bool:
        """Whether some process's chunk takes two calls of a kernel (:attr:`.context_chunks.Chunk.calls`)."""
        return self.window != UNLIMITED and any(c.ahead and len(c.segments) > 1 for c in self.everyone)

    def explain(self) -> str:
        mean = sum(self.work) / len(self.work)
        lines = [
            f"{self.size} positions, {len(self.cu_seqlens) - 1} documents, {len(self.lengths)} chunks, "
            f"window {self.window}; K and V of other chunks are "
            + ("sent again in backward" if self.recompute_exchange else "kept for backward")
        ]
        for process, work in enumerate(self.work):
            rows, keys = self._rows_and_keys(process)
            share = f"{work / mean:.2f} of the mean" if mean else "no work"
            lines.append(f"process {process}: {rows} rows, {keys} keys, {work} query-key pairs, {share}")
        if mean and max(self.work) > 1.1 * mean:
            lines.append("uneven: every layer waits for the busiest process; see ShardGroup.balanced_lengths")
        return "\n".join(lines)

    def _rows_and_keys(self, process: int) -> tuple[int, int]:
        mine = [chunk for chunk, owner in zip(self.everyone, self.owners) if owner == process]
        return sum(chunk.rows for chunk in mine), sum(chunk.keys for chunk in mine)

    def _exceeds(self) -> bool:
        """Whether some process would keep more than half of an even share of K and V beyond its own rows. The same on
        every process: sending again is a collective."""
        spare = self.size / len(self.processes) / 2
        return any(keys > rows + spare for rows, keys in map(self._rows_and_keys, self.processes))
