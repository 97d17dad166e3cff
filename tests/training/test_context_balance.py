"""Balance: predicted work of balanced lengths against equal chunks, for documents of log-normal lengths."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

import pytest

from shardsum import ShardGroup
from shardsum.core.layout import owners_of, split_evenly
from shardsum.training.context_balance import balanced_lengths
from shardsum.training.context_chunks import plan_chunks
from shardsum.training.context_plan import SequencePlan
from shardsum.training.documents import CAUSAL, Window, effective_window


def log_normal_borders(documents: int, seed: int, mean: int = 600, sigma: float = 1.2) -> list[int]:
    draw, borders = random.Random(seed), [0]
    for _ in range(documents):
        borders.append(borders[-1] + max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
    return borders


def most_work(
    lengths: list[int], owners: tuple[int, ...], borders: list[int], window: Window = CAUSAL, position_cost: float = 0
) -> float:
    """That of the busiest process over the mean."""
    totals = [0.0] * (max(owners) + 1)
    for owner, chunk in zip(owners, plan_chunks(lengths, borders, window)):
        totals[owner] += chunk.pairs + position_cost * chunk.rows
    return max(totals) / fmean(totals)


@pytest.mark.parametrize("position_cost", [0, 2000])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("processes", "ranks"), [(4, 4), (4, 8), (3, 7), (8, 8)])
def test_within_five_percent_of_the_mean(processes: int, ranks: int, placement: str, position_cost: float) -> None:
    owners = owners_of(ranks, processes, placement)
    equal = []
    for seed in range(20):
        borders = log_normal_borders(16 * processes, seed)
        lengths = balanced_lengths(owners, borders, position_cost=position_cost)
        assert sum(lengths) == borders[-1] and min(lengths) >= 0 and len(lengths) == ranks
        assert most_work(lengths, owners, borders, position_cost=position_cost) <= 1.05
        equal.append(most_work(split_evenly(borders[-1], ranks), owners, borders, position_cost=position_cost))
    assert fmean(equal) > 1.05  # what it is good for


@pytest.mark.parametrize(("window", "causal"), [((300, 0), True), ((100, 50), False), (None, False)])
def test_windows_and_whole_documents(window: Any, causal: bool) -> None:
    for seed in range(5):
        borders = log_normal_borders(64, seed)
        lengths = balanced_lengths(range(4), borders, causal=causal, window=window, position_cost=0)
        assert most_work(lengths, (0, 1, 2, 3), borders, effective_window(window, causal)) <= 1.05


def test_work_and_explanation() -> None:
    group = ShardGroup(2)
    batch = group.context_parallel([8, 8], [0, 4, 16])
    assert [chunk.pairs for chunk in batch.plan.everyone] == [20, 68] and batch.work == (88,)
    assert "process 0: 16 rows, 20 keys, 88 query-key pairs, 1.00 of the mean" in batch.explain()
    assert "work=[88]" in repr(batch)
    assert group.balanced_lengths([0, 4, 16], position_cost=0) == [12, 4]


def test_uneven_work_is_said() -> None:
    sequence = SequencePlan((0, 1), 0, ShardGroup(1).device, [8, 8], [0, 4, 16], True, None, None)
    assert sequence.work == (20, 68)
    said = sequence.explain().splitlines()
    assert "process 1: 8 rows, 12 keys, 68 query-key pairs, 1.55 of the mean" in said
    assert said[-1].startswith("uneven: ")


def test_ends_and_errors() -> None:
    assert balanced_lengths([0, 1, 1], [0]) == [0, 0, 0]
    assert balanced_lengths([0, 1, 2], [0, 1], position_cost=0) in ([1, 0, 0], [0, 1, 0], [0, 0, 1])
    for borders, message in (([1, 2], "the first border must be 0"), ([0, 3, 2], "border 2 is 2")):
        with pytest.raises(ValueError, match=message):
            balanced_lengths([0], borders)
    with pytest.raises(ValueError, match="position_cost: -1"):
        balanced_lengths([0], [0, 3], position_cost=-1)
