"""Chunks of packed documents, the keys they need, and the kernel calls that attend to them. Pure arithmetic.

Virtual rank r holds the chunk of the next ``lengths[r]`` positions. Attention stays inside a document, so a chunk needs
keys from the start of its oldest document to its own end (causal), or to the end of its newest document (not causal); a
window may need fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Interval, intervals_of, length
from .documents import CAUSAL, UNLIMITED, Window, documents_of


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


@dataclass(frozen=True)
class Chunk:
    """A virtual rank's chunk, the keys it needs, and its parts document by document, as the kernels take them.

    Attributes:
        owned, needed: intervals of positions: its own, and those of its keys.
        window: the effective one.
        segments: ``(num_queries, num_keys)``: consecutive parts of ``owned`` and of ``needed``, together all of both.
        ahead: keys of the last segment that lie behind its last query; 0 under a causal mask. In all other segments the
            last query stands at the last key (lower-right alignment).
    """

    owned: Interval
    needed: Interval
    window: Window
    segments: tuple[tuple[int, int], ...] = ()
    ahead: int = 0

    @property
    def rows(self) -> int:
        return length(self.owned)

    @property
    def keys(self) -> int:
        return length(self.needed)

    @property
    def pairs(self) -> int:
        """How many queries and keys meet in this chunk: what attention computes."""
        return sum(_pairs(shape, self.window) * len(places) for shape, places in self.shapes)

    @cached_property
    def calls(self) -> list[Call]:
        """One call; two where a window that is not causal reaches beyond the chunk's end: kernels align the last query
        with the last key, so there the window is another one."""
        segments, ahead = self.segments, self.ahead
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
        for i, (n, m) in enumerate(self.segments):
            ahead = self.ahead if i == len(self.segments) - 1 else 0
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


def plan_chunks(lengths: Sequence[int], borders: Sequence[int], window: Window = CAUSAL) -> list[Chunk]:
    """The chunks of all virtual ranks.

    Args:
        lengths: R chunk lengths; 0 is allowed.
        borders: of :func:`shardsum.training.documents.check_borders`.
        window: of :func:`shardsum.training.documents.effective_window`.

    Example:
        >>> [(c.needed, c.segments) for c in plan_chunks([4, 3, 2], [0, 5, 9])]
        [((0, 4), ((4, 4),)), ((0, 7), ((1, 5), (2, 2))), ((5, 9), ((2, 4),))]
    """
    return [_plan_chunk(chunk, borders, window) for chunk in intervals_of(lengths)]


def _plan_chunk(chunk: Interval, borders: Sequence[int], window: Window) -> Chunk:
    begin, end = chunk
    if begin == end:
        return Chunk(chunk, chunk, window)
    left, right = window
    document = bisect_right(borders, begin) - 1
    oldest = borders[document] if left < 0 else max(borders[document], begin - left)
    position, keys_from, ahead = begin, oldest, 0
    segments = []
    while position < end:
        document_end = borders[document + 1]
        stop = min(document_end, end)
        keys_to = document_end if right < 0 else min(document_end, stop + right)
        if position < stop:  # not an empty document
            segments.append((stop - position, keys_to - keys_from))
            keys_from, ahead = keys_to, keys_to - stop
        position, document = stop, document + 1
    return Chunk(chunk, (oldest, keys_from), window, tuple(segments), ahead)


def _pairs(shape: Shape, window: Window) -> int:
    """Keys that the queries of a document's part see."""
    (n, m, ahead), (left, right) = shape, window
    stop = m - ahead  # queries stand at [start, stop)
    start = stop - n
    to = n * (m - 1) if right < 0 else _sum_of_min(start, stop, m - 1 - right) + n * right
    since = 0 if left < 0 else _sum_of(start, stop) - _sum_of_min(start, stop, left)
    return to - since + n


def _sum_of(start: int, stop: int) -> int:
    return (start + stop - 1) * (stop - start) // 2


def _sum_of_min(start: int, stop: int, most: int) -> int:
    """The sum of ``min(p, most)`` over p in ``[start, stop)``."""
    bend = min(max(most, start), stop)
    return _sum_of(start, bend) + (stop - bend) * most
