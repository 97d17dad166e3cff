"""Which queries see which keys: the plan against a brute-force mask over positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardsum.training.documents import plan_chunks


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    total = sum(lengths)
    inner = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    return lengths, [0, *inner, total]


@given(sequences(), st.booleans())
def test_segments_are_exactly_the_visible_keys(sequence: tuple[list[int], list[int]], causal: bool) -> None:
    lengths, borders = sequence
    document = [sum(b <= j for b in borders[1:-1]) for j in range(sum(lengths))]
    begin = 0
    for plan, n in zip(plan_chunks(lengths, borders, causal=causal), lengths):
        assert plan.chunk == (begin, begin + n)
        query, key = begin, plan.keys[0]
        for num_queries, num_keys in plan.segments:
            keys = range(key, key + num_keys)
            for i in range(query, query + num_queries):
                # lower-right alignment: the segment's last query sees its last key
                last = key + num_keys - (query + num_queries - 1 - i) if causal else key + num_keys
                visible = [j for j, d in enumerate(document) if d == document[i] and (j <= i or not causal)]
                assert visible == [j for j in keys if j < last]
            query, key = query + num_queries, key + num_keys
        assert (query, key) == (plan.chunk[1], plan.keys[1])  # together, all of both
        begin += n


def test_one_causal_sequence() -> None:
    plans = plan_chunks([3, 0, 2, 4])
    assert [p.keys for p in plans] == [(0, 3), (3, 3), (0, 5), (0, 9)]
    assert [p.segments for p in plans] == [((3, 3),), (), ((2, 5),), ((4, 9),)]


@pytest.mark.parametrize(
    ("lengths", "borders", "message"),
    [
        ([2, -1], None, "lengths: virtual rank 1 has the negative length -1"),
        ([2, 3], [0, 2.5, 5], "cu_seqlens: expected integers, got \\[0, 2.5, 5\\]"),
        ([2, 3], [[0, 2], [2, 5]], "cu_seqlens: expected integers, got \\[\\[0, 2\\], \\[2, 5\\]\\]"),
        ([2, 3], [], "the first border must be 0, got \\[\\]"),
        ([2, 3], [1, 5], "the first border must be 0, got \\[1\\]"),
        ([2, 3], [0, 4, 3, 5], "border 2 is 3, less than the 4 before it"),
        ([2, 3], [0, 4], "the last border is 4, but the lengths sum to 5"),
    ],
)
def test_errors(lengths: list[int], borders: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_chunks(lengths, borders)
