"""Which queries see which keys when packed documents are cut into chunks: pure arithmetic.

One sequence of ``sum(lengths)`` positions holds documents, one after the other; ``cu_seqlens`` are their borders
(``[0, 5, 9]``: documents ``[0, 5)`` and ``[5, 9)``). Virtual rank r holds the chunk of the next ``lengths[r]``
positions. Attention stays inside a document, so a chunk needs keys from the start of its oldest document to its own
end (causal), or to the end of its newest document (not causal).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..core.checks import as_index
from ..core.layout import Interval, intervals_of


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk, the keys it needs, and its parts document by document.

    ``segments`` are ``(num_queries, num_keys)``: consecutive parts of ``chunk`` and of ``keys``, together all of both.
    Under a causal mask the last query of a segment sees its last key (lower-right alignment).
    """

    chunk: Interval
    keys: Interval
    segments: tuple[tuple[int, int], ...]


def plan_chunks(
    lengths: Sequence[int], cu_seqlens: Sequence[int] | None = None, *, causal: bool = True
) -> list[ChunkPlan]:
    """One plan per virtual rank.

    Args:
        lengths: R chunk lengths; 0 is allowed.
        cu_seqlens: document borders from 0 to ``sum(lengths)``, never decreasing; None is one document.
        causal: a query sees keys up to its own position only.

    Raises:
        ValueError: no integers, a negative length, or borders that do not start at 0, decrease, or end elsewhere.

    Example:
        >>> [(p.keys, p.segments) for p in plan_chunks([4, 3, 2], [0, 5, 9])]
        [((0, 4), ((4, 4),)), ((0, 7), ((1, 5), (2, 2))), ((5, 9), ((2, 4),))]
    """
    lengths = _as_ints("lengths", lengths)
    for r, n in enumerate(lengths):
        if n < 0:
            raise ValueError(f"lengths: virtual rank {r} has the negative length {n}")
    total = sum(lengths)
    borders = [0, total] if cu_seqlens is None else _as_ints("cu_seqlens", cu_seqlens)
    _check_borders(borders, total)
    return [_plan_chunk(chunk, borders, causal) for chunk in intervals_of(lengths)]


def _as_ints(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [as_index(value) for value in values]
    except TypeError as error:
        raise ValueError(f"{name}: expected integers, got {values!r}") from error


def _check_borders(borders: list[int], total: int) -> None:
    if not borders or borders[0] != 0:
        raise ValueError(f"cu_seqlens: the first border must be 0, got {borders[:1]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if b < a:
            raise ValueError(f"cu_seqlens: border {i + 1} is {b}, less than the {a} before it")
    if borders[-1] != total:
        raise ValueError(f"cu_seqlens: the last border is {borders[-1]}, but the lengths sum to {total}")


def _plan_chunk(chunk: Interval, borders: list[int], causal: bool) -> ChunkPlan:
    begin, end = chunk
    if begin == end:
        return ChunkPlan(chunk, chunk, ())
    document = bisect_right(borders, begin) - 1
    oldest, position, keys_from = borders[document], begin, borders[document]
    segments = []
    while position < end:
        document_end = borders[document + 1]
        stop = min(document_end, end)
        keys_to = stop if causal else document_end
        if position < stop:  # not an empty document
            segments.append((stop - position, keys_to - keys_from))
            keys_from = keys_to
        position, document = stop, document + 1
    return ChunkPlan(chunk, (oldest, keys_from), tuple(segments))
