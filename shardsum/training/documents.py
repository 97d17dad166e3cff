"""Which queries see which keys when packed documents are cut into chunks: pure arithmetic.

One sequence of ``sum(lengths)`` positions holds documents, one after the other; ``cu_seqlens`` are their borders
(``[0, 5, 9]``: documents ``[0, 5)`` and ``[5, 9)``). Virtual rank r holds the chunk of the next ``lengths[r]``
positions. Attention stays inside a document, so a chunk needs keys from the start of its oldest document to its own
end (causal), or to the end of its newest document (not causal); a window may need fewer.

A window ``(left, right)`` lets the query at position p see the keys from ``p - left`` to ``p + right``; -1 is no limit.
A causal mask is the window ``(-1, 0)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..core.checks import as_index
from ..core.layout import Interval, intervals_of

Window = tuple[int, int]
CAUSAL: Window = (-1, 0)
UNLIMITED: Window = (-1, -1)
_FAR = 1 << 30


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk, the keys it needs, and its parts document by document.

    Attributes:
        segments: ``(num_queries, num_keys)``: consecutive parts of ``chunk`` and of ``keys``, together all of both.
        ahead: keys of the last segment that lie behind its last query; 0 under a causal mask. In all other segments the
            last query stands at the last key (lower-right alignment).
    """

    chunk: Interval
    keys: Interval
    segments: tuple[tuple[int, int], ...]
    ahead: int = 0

    def pairs(self, window: Window) -> int:
        """How many queries and keys meet in this chunk: what attention computes."""
        last = len(self.segments) - 1
        return sum(_pairs(n, m, self.ahead if i == last else 0, window) for i, (n, m) in enumerate(self.segments))


def effective_window(window: Sequence[int] | None, causal: bool) -> Window:
    """``(left, right)`` with the causal mask in it.

    Raises:
        ValueError: not a pair of ints of at least -1.
    """
    try:
        left, right = (-1, -1) if window is None else map(as_index, window)
    except (TypeError, ValueError):
        raise ValueError(f"window: expected a pair of ints (left, right), -1 for no limit, got {window!r}") from None
    if min(left, right) < -1:
        raise ValueError(f"window: ({left}, {right}), but both are at least -1 (no limit)")
    left, right = (-1 if side >= _FAR else side for side in (left, right))  # kernels take 32 bits, and add to them
    return left, 0 if causal else right


def check_borders(cu_seqlens: Sequence[int] | Tensor | None, total: int | None) -> list[int]:
    """Document borders as ints.

    Args:
        cu_seqlens: ints or an integer tensor on the CPU, from 0 to ``total``, never decreasing; None is one document.
        total: positions of the sequence; None where the borders tell.

    Raises:
        ValueError: no integers, or borders that do not start at 0, decrease, or end elsewhere.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            shape = tuple(cu_seqlens.shape)
            raise ValueError(f"cu_seqlens: expected integers of one dimension, got {cu_seqlens.dtype} {shape}")
        cu_seqlens = cu_seqlens.tolist()
    if cu_seqlens is None and total is None:
        raise ValueError("cu_seqlens: required where lengths are not given")
    try:
        borders = [0, total or 0] if cu_seqlens is None else list(map(as_index, cu_seqlens))
    except TypeError:
        raise ValueError(f"cu_seqlens: expected integers, got {cu_seqlens!r}") from None
    if not borders or borders[0] != 0:
        raise ValueError(f"cu_seqlens: the first border must be 0, got {borders[:1]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if b < a:
            raise ValueError(f"cu_seqlens: border {i + 1} is {b}, less than the {a} before it")
    if total is not None and borders[-1] != total:
        raise ValueError(f"cu_seqlens: the last border is {borders[-1]}, but the lengths sum to {total}")
    return borders


def plan_chunks(lengths: Sequence[int], borders: Sequence[int], window: Window = CAUSAL) -> list[ChunkPlan]:
    """One plan per virtual rank.

    Args:
        lengths: R chunk lengths; 0 is allowed.
        borders: of :func:`check_borders`.
        window: of :func:`effective_window`.

    Example:
        >>> [(p.keys, p.segments) for p in plan_chunks([4, 3, 2], [0, 5, 9])]
        [((0, 4), ((4, 4),)), ((0, 7), ((1, 5), (2, 2))), ((5, 9), ((2, 4),))]
    """
    return [_plan_chunk(chunk, borders, window) for chunk in intervals_of(lengths)]


def documents_of(borders: Sequence[int], begin: int, end: int) -> tuple[Tensor, Tensor]:
    """``(document, position in it)`` of the positions ``[begin, end)``, int64 on the CPU.

    Example:
        >>> documents_of([0, 2, 5], 1, 4)
        (tensor([0, 1, 1]), tensor([1, 0, 1]))
    """
    starts = torch.tensor(borders, dtype=torch.int64, device="cpu")
    positions = torch.arange(begin, end, device="cpu")
    document = torch.searchsorted(starts, positions, right=True) - 1
    return document, positions - starts[document]


def cu_seqlens_from_position_ids(position_ids: Tensor) -> list[int]:
    """The borders of the documents that ``position_ids`` count: each starts at 0 and goes up by one.

    Args:
        position_ids: ``(S,)`` or ``(B, S)``, integers; rows follow each other, and each starts a document. On a GPU the
            host waits for it, once.

    Raises:
        ValueError: a position that is neither 0 nor the one after its predecessor.

    Example:
        >>> cu_seqlens_from_position_ids(torch.tensor([[0, 1, 2, 0, 1]]))
        [0, 3, 5]
    """
    if position_ids.dim() not in (1, 2) or position_ids.is_floating_point():
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids: expected integers (S,) or (B, S), got {position_ids.dtype} {shape}")
    rows = position_ids.detach().cpu().long()
    before = torch.nn.functional.pad(rows, (1, 0), value=-1)[..., :-1].flatten()
    flat = rows.flatten()
    wrong = ((flat != 0) & (flat != before + 1)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"position_ids: entry {i} is {flat[i]}, expected 0 or {before[i] + 1}")
    return [*(flat == 0).nonzero().flatten().tolist(), flat.numel()]


def _plan_chunk(chunk: Interval, borders: Sequence[int], window: Window) -> ChunkPlan:
    begin, end = chunk
    if begin == end:
        return ChunkPlan(chunk, chunk, ())
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
    return ChunkPlan(chunk, (oldest, keys_from), tuple(segments), ahead)


def _pairs(n: int, m: int, ahead: int, window: Window) -> int:
    """Keys that n queries see of m, the last query standing ``ahead`` keys before the last key."""
    left, right = window
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
