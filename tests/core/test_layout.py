"""Pure arithmetic of intervals, placements and plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardsum.core.layout import ExchangePlan, intersect, intervals_of, length, owners_of, split_evenly, union

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple), min_size=1, max_size=6)


@given(INTERVALS)
def test_union_covers_the_same_positions_once(intervals: list) -> None:
    merged = union(intervals)
    covered = [p for begin, end in merged for p in range(begin, end)]
    assert covered == sorted({p for begin, end in intervals for p in range(begin, end)})
    assert all(a[1] < b[0] for a, b in zip(merged, merged[1:]))


@given(st.integers(0, 50), st.integers(1, 9))
def test_split_evenly_and_intervals(size: int, parts: int) -> None:
    splits = split_evenly(size, parts)
    assert sum(splits) == size and max(splits) - min(splits) <= 1 and splits == sorted(splits, reverse=True)
    assert intervals_of(splits)[-1][1] == size


def test_placements() -> None:
    assert owners_of(5, 2, "contiguous") == (0, 0, 0, 1, 1)
    assert owners_of(8, 4, "zigzag") == (0, 1, 2, 3, 3, 2, 1, 0)
    assert owners_of(6, 4, "zigzag") == (0, 1, 2, 3, 3, 2)
    assert owners_of(3, 2, [1, 0, 1]) == (1, 0, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((2, 3, "contiguous"), "num_virtual_ranks: 2 is less than the 3 processes"),
        ((4, 2, "spiral"), "placement: expected"),
        ((3, 2, [0, 1]), "placement: 2 owners for 3"),
        ((3, 2, [0, 1, 2]), "virtual rank 2 is given to process 2"),
        ((3, 2, [0, 0, 0]), "process 1 hosts no virtual rank"),
    ],
)
def test_bad_placements_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owners_of(*arguments)


@given(INTERVALS, INTERVALS, st.integers(1, 4), st.randoms())
def test_plan_sends_each_wanted_position_once(sources: list, sinks: list, world_size: int, random) -> None:
    source_owners = tuple(random.randrange(world_size) for _ in sources)
    sink_owners = tuple(random.randrange(world_size) for _ in sinks)
    plan = ExchangePlan(tuple(sources), source_owners, tuple(sinks), sink_owners, world_size)
    for b in range(world_size):
        wanted = {p for s, owner in zip(sinks, sink_owners) if owner == b for p in range(*s)}
        for r, (source, owner) in enumerate(zip(sources, source_owners)):
            segments = [s for s in plan.segments[owner][b] if s.source == r]
            sent = [p for s in segments for p in range(*s.interval)]
            assert sent == sorted(wanted & set(range(*source)))
        for a in range(world_size):
            assert plan.positions[a][b] == sum(length(s.interval) for s in plan.segments[a][b])
    assert plan.total == sum(plan.ingress(b) for b in range(world_size))
    halves = [plan.cut(0, 0.5), plan.cut(0.5, 1)]
    assert [sum(length(h.sinks[q]) for h in halves) for q in range(len(sinks))] == [length(s) for s in sinks]


def test_intersect_of_disjoint_is_empty() -> None:
    assert length(intersect((0, 3), (5, 9))) == 0
