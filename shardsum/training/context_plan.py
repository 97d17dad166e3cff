"""What is decided once a batch: chunks, the keys they need, kernel calls, work. Nothing here knows a process group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Interval, length, split_evenly
from .context_checks import check_lengths
from .documents import UNLIMITED, ChunkPlan, Window, check_borders, documents_of, effective_window, plan_chunks


class Borders(NamedTuple):
    """What a variable-length kernel asks for: int32 borders ``(documents + 1,)`` on the device, and the longest parts.

    ``window`` is relative to a query that stands at its document's last key when it is the last one (lower-right
    alignment): ``(-1, 0)`` is a causal mask.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window: Window


class Shape(NamedTuple):
    """Queries and keys of a document's part, and how many keys lie behind the last query's own."""

    queries: int
    keys: int
    ahead: int


class Call:
    """Documents that one variable-length kernel call covers: rows ``queries`` of a chunk, rows ``keys`` of its keys."""

    def __init__(self, segments: Sequence[tuple[int, int]], first_query: int, first_key: int, window: Window) -> None:
        self.segments, self.window = segments, window
        self.cu_q = [0, *accumulate(n for n, _ in segments)]
        self.cu_k = [0, *accumulate(m for _, m in segments)]
        self.queries = slice(first_query, first_query + self.cu_q[-1])
        self.keys = slice(first_key, first_key + self.cu_k[-1])
        self.max_q, self.max_k = max(n for n, _ in segments), max(m for _, m in segments)
        self._borders: dict[torch.device, Borders] = {}
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def borders(self, device: torch.device) -> Borders:
        if device not in self._borders:
            both = to_device(torch.tensor([self.cu_q, self.cu_k], dtype=torch.int32, device="cpu"), device)
            self._borders[device] = Borders(both[0], both[1], self.max_q, self.max_k, self.window)
        return self._borders[device]

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``(document, position in its part)`` of every query."""
        if device not in self._rows:
            both = torch.stack(documents_of(self.cu_q, 0, self.cu_q[-1]))
            self._rows[device] = tuple(to_device(both, device))  # type: ignore[assignment]
        return self._rows[device]


class Chunk:
    """A hosted chunk's documents as the kernels take them. Made once a batch.

    Args:
        plan: of :func:`shardsum.training.documents.plan_chunks`.
        window: the effective one.
    """

    def __init__(self, plan: ChunkPlan, window: Window) -> None:
        self.plan, self.window = plan, window
        self.rows, self.keys = (end - begin for begin, end in (plan.chunk, plan.keys))

    @cached_property
    def calls(self) -> list[Call]:
        """One call; two where a window that is not causal reaches beyond the chunk's end: kernels align the last query
        with the last key, so there the window is another one."""
        segments, ahead = self.plan.segments, self.plan.ahead
        if not segments:
            return []
        if not ahead or self.window == UNLIMITED:
            return [Call(segments, 0, 0, self.window)]
        left, right = self.window
        last = (left if left < 0 else left + ahead, right if right < 0 else right - ahead)
        n, m = segments[-1]
        calls = [Call(segments[-1:], self.rows - n, self.keys - m, last)]
        return calls if len(segments) == 1 else [Call(segments[:-1], 0, 0, self.window), *calls]

    @cached_property
    def shapes(self) -> list[tuple[Shape, list[tuple[int, int]]]]:
        """Documents of one shape together: ``(shape, [(first query, first key), ...])``."""
        found: dict[Shape, list[tuple[int, int]]] = defaultdict(list)
        query = key = 0
        for i, (n, m) in enumerate(self.plan.segments):
            ahead = self.plan.ahead if i == len(self.plan.segments) - 1 else 0
            found[Shape(n, m, ahead)].append((query, key))
            query, key = query + n, key + m
        return list(found.items())

    def warm(self, device: torch.device) -> None:
        """Make what the kernels need on a GPU, so that no layer does."""
        if device.type == "cuda":
            for call in self.calls:
                call.borders(device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


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
        hosted: the chunks of this process.
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
        self.plans = plan_chunks(self.lengths, self.cu_seqlens, self.window)
        self.owned, self.needed = [p.chunk for p in self.plans], [p.keys for p in self.plans]
        self.chunks = [Chunk(plan, self.window) for plan, owner in zip(self.plans, owners) if owner == rank]
        self.hosted = [chunk.plan.chunk for chunk in self.chunks]
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
        for owner, plan in zip(self.owners, self.plans):
            totals[owner] += plan.pairs(self.window)
        return tuple(totals)

    @property
    def has_chunks_of_two_calls(self) -> bool:
        """Whether some process's chunk takes two calls of a kernel (:attr:`Chunk.calls`)."""
        return self.window != UNLIMITED and any(p.ahead and len(p.segments) > 1 for p in self.plans)

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
        mine = [plan for plan, owner in zip(self.plans, self.owners) if owner == process]
        return sum(p.chunk[1] - p.chunk[0] for p in mine), sum(p.keys[1] - p.keys[0] for p in mine)

    def _exceeds(self) -> bool:
        """Whether some process would keep more than half of an even share of K and V beyond its own rows. The same on
        every process: sending again is a collective."""
        spare = self.size / len(self.processes) / 2
        return any(keys > rows + spare for rows, keys in map(self._rows_and_keys, self.processes))
