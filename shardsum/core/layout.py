"""Who holds and who wants which positions: pure arithmetic on half-open intervals, no tensors, no communication.

An interval is ``(begin, end)`` in global positions. The *sources* of an exchange hold intervals I_r, its *sinks* want
intervals O_q; every source and sink lives on one process (its owner). :class:`ExchangePlan` says what has to travel:
from process a to process b, for each source r on a, the part of I_r inside the union of b's outputs, once.
The adjoint of an exchange is the plan with the two sides swapped.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Interval = tuple[int, int]


def intersect(a: Interval, b: Interval) -> Interval:
    """The common part; an empty interval (begin == end) when there is none."""
    begin = max(a[0], b[0])
    return begin, max(begin, min(a[1], b[1]))


def length(interval: Interval) -> int:
    return interval[1] - interval[0]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The covered positions as disjoint, sorted, non-touching intervals. Empty ones vanish."""
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def split_evenly(size: int, parts: int) -> list[int]:
    """``parts`` lengths that sum to ``size``, the longer ones first (as ``numpy.array_split``).

    Example:
        >>> split_evenly(10, 4)
        [3, 3, 2, 2]
    """
    return [(size + parts - 1 - i) // parts for i in range(parts)]


def intervals_of(splits: Sequence[int]) -> list[Interval]:
    """Consecutive intervals of the given lengths, from 0."""
    out, begin = [], 0
    for n in splits:
        out.append((begin, begin + n))
        begin += n
    return out


def owners_of(num_virtual_ranks: int, world_size: int, placement: str | Sequence[int]) -> tuple[int, ...]:
    """The owning process of every virtual rank.

    ``"contiguous"`` gives processes consecutive blocks (longer first); ``"zigzag"`` deals ranks out to 0, 1, ..., G-1
    and back again (for causal work, whose cost grows with the rank); a sequence names the owners.

    Raises:
        ValueError: fewer virtual ranks than processes, an unknown placement, a process that hosts none.
    """
    r_count, g_count = num_virtual_ranks, world_size
    if r_count < g_count:
        raise ValueError(
            f"num_virtual_ranks: {r_count} is less than the {g_count} processes of the group; each hosts at least one"
        )
    if isinstance(placement, str):
        if placement == "contiguous":
            counts = split_evenly(r_count, g_count)
            return tuple(g for g, n in enumerate(counts) for _ in range(n))
        if placement == "zigzag":
            ks = [v % (2 * g_count) for v in range(r_count)]
            return tuple(k if k < g_count else 2 * g_count - 1 - k for k in ks)
        raise ValueError(f'placement: expected "contiguous", "zigzag" or a list of owners, got {placement!r}')
    try:
        owners = tuple(operator.index(g) for g in placement)
    except TypeError:
        raise ValueError(f'placement: expected "contiguous", "zigzag" or a list of owners, got {placement!r}') from None
    if len(owners) != r_count:
        raise ValueError(f"placement: {len(owners)} owners for {r_count} virtual ranks")
    for v, g in enumerate(owners):
        if not 0 <= g < g_count:
            raise ValueError(
                f"placement: virtual rank {v} is given to process {g}, but the group has {g_count} processes"
            )
    missing = sorted(set(range(g_count)) - set(owners))
    if missing:
        raise ValueError(f"placement: process {missing[0]} hosts no virtual rank; each process hosts at least one")
    return owners


class Segment(NamedTuple):
    """Positions ``interval`` of source ``source``."""

    source: int
    interval: Interval


@dataclass(frozen=True)
class ExchangePlan:
    """An exchange on ``world_size`` processes: sources with intervals and owners, sinks with intervals and owners."""

    sources: tuple[Interval, ...]
    source_owners: tuple[int, ...]
    sinks: tuple[Interval, ...]
    sink_owners: tuple[int, ...]
    world_size: int

    def hosted_sources(self, process: int) -> list[int]:
        return [r for r, owner in enumerate(self.source_owners) if owner == process]

    def hosted_sinks(self, process: int) -> list[int]:
        return [q for q, owner in enumerate(self.sink_owners) if owner == process]

    def wanted(self, process: int) -> list[Interval]:
        """The union of the outputs of ``process``."""
        return union([o for o, owner in zip(self.sinks, self.sink_owners) if owner == process])

    @cached_property
    def segments(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """``segments[a][b]``: what process a gives to process b, by source, then by position."""
        wanted = [self.wanted(b) for b in range(self.world_size)]
        table: list[list[list[Segment]]] = [[[] for _ in wanted] for _ in wanted]
        for source, (interval, owner) in enumerate(zip(self.sources, self.source_owners)):
            for b, components in enumerate(wanted):
                for component in components:
                    common = intersect(interval, component)
                    if length(common):
                        table[owner][b].append(Segment(source, common))
        return tuple(tuple(tuple(cell) for cell in row) for row in table)

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """``positions[a][b]``: how many positions travel from a to b (a to a stays in place)."""
        begins, ends = np.array(self.sources, dtype=np.int64).reshape(-1, 2).T
        owners, columns = np.array(self.source_owners, dtype=np.int64), []
        outputs: list[list[Interval]] = [[] for _ in range(self.world_size)]
        for sink, owner in zip(self.sinks, self.sink_owners):
            outputs[owner].append(sink)
        for wanted in outputs:
            common = np.zeros(len(owners), dtype=np.int64)
            for begin, end in union(wanted):
                common += np.maximum(np.minimum(ends, end) - np.maximum(begins, begin), 0)
            column = np.zeros(self.world_size, dtype=np.int64)
            np.add.at(column, owners, common)
            columns.append(column.tolist())
        return tuple(zip(*columns))

    def egress(self, process: int) -> int:
        return sum(n for b, n in enumerate(self.positions[process]) if b != process)

    def ingress(self, process: int) -> int:
        return sum(row[process] for a, row in enumerate(self.positions) if a != process)

    @property
    def total(self) -> int:
        return sum(self.egress(a) for a in range(self.world_size))

    def cut(self, begin: float, end: float) -> ExchangePlan:
        """The part of the exchange that fills the fraction ``[begin, end)`` of every sink (one chunk of a message)."""
        sinks = tuple((lo + int((hi - lo) * begin), lo + int((hi - lo) * end)) for lo, hi in self.sinks)
        return ExchangePlan(self.sources, self.source_owners, sinks, self.sink_owners, self.world_size)
