"""Which queries see which keys: the plan against a brute-force mask over positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardsum import ShardGroup
from shardsum.training.context_chunks import plan_chunks
from shardsum.training.documents import cu_seqlens_from_position_ids, documents_of, effective_window


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    total = sum(lengths)
    inner = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    return lengths, [0, *inner, total]


windows = st.none() | st.tuples(st.integers(-1, 7), st.integers(-1, 7))


@given(sequences(), st.booleans(), windows)
def test_segments_are_exactly_the_visible_keys(
    sequence: tuple[list[int], list[int]], causal: bool, window: tuple[int, int] | None
) -> None:
    lengths, borders = sequence
    document = [sum(b <= j for b in borders[1:-1]) for j in range(sum(lengths))]
    left, right = effective_window(window, causal)

    def sees(i: int, j: int) -> bool:
        near = (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
        return document[i] == document[j] and near

    begin = 0
    for chunk, n in zip(plan_chunks(lengths, borders, (left, right)), lengths):
        assert chunk.owned == (begin, begin + n)
        query, key, pairs = begin, chunk.needed[0], 0
        for num_queries, num_keys in chunk.segments:
            keys = range(key, key + num_keys)
            query, key = query + num_queries, key + num_keys
            ahead = chunk.ahead if (num_queries, num_keys) == chunk.segments[-1] and query == chunk.owned[1] else 0
            assert keys[-1] - ahead == query - 1  # the last query stands there
            for i in range(query - num_queries, query):
                visible = [j for j in range(len(document)) if sees(i, j)]
                assert set(visible) <= set(keys) and set(keys) <= {
                    j for j, d in enumerate(document) if d == document[i]
                }
                pairs += len(visible)
        assert (query, key) == (chunk.owned[1], chunk.needed[1])  # together, all of both
        assert chunk.pairs == pairs
        begin += n


def test_documents_and_positions() -> None:
    document, position = documents_of([0, 2, 2, 5], 1, 5)
    assert document.tolist() == [0, 2, 2, 2] and position.tolist() == [1, 0, 1, 2]


def test_borders_from_position_ids() -> None:
    assert cu_seqlens_from_position_ids(torch.tensor([0, 1, 0, 0, 1, 2])) == [0, 2, 3, 6]
    assert cu_seqlens_from_position_ids(torch.tensor([[0, 1, 2], [0, 0, 1]], dtype=torch.int32)) == [0, 3, 4, 6]
    with pytest.raises(ValueError, match="position_ids: entry 2 is 3, expected 0 or 2"):
        cu_seqlens_from_position_ids(torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match="position_ids: entry 3 is 3, expected 0 or 0"):
        cu_seqlens_from_position_ids(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    with pytest.raises(ValueError, match=r"position_ids: expected integers \(S,\) or \(B, S\), got torch.float32"):
        cu_seqlens_from_position_ids(torch.zeros(3))


@pytest.mark.parametrize("window", [3, (1, 2, 3), (-2, 0), (1.5, 0), "ab"])
def test_bad_windows(window: Any) -> None:
    with pytest.raises(ValueError, match="window: "):
        effective_window(window, causal=True)


def test_one_causal_sequence() -> None:
    found = plan_chunks([3, 0, 2, 4], [0, 9])
    assert [c.needed for c in found] == [(0, 3), (3, 3), (0, 5), (0, 9)]
    assert [c.segments for c in found] == [((3, 3),), (), ((2, 5),), ((4, 9),)]


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
        ShardGroup(2).context_parallel(lengths, borders)


def test_a_window_beyond_any_document_is_none() -> None:
    for far in (1 << 30, 1 << 31, 1 << 70):
        assert effective_window((far, 2), False) == (-1, 2) and effective_window((3, far), False) == (3, -1)
    assert effective_window(((1 << 30) - 1, 0), True) == ((1 << 30) - 1, 0)
