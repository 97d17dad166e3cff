"""Pictures of who holds and needs what, and reprs that fit a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardsum
from shardsum import ShardGroup
from tests.processes import run_processes


def bars(picture: str) -> list[str]:
    return [line.split()[2] for line in picture.splitlines()[2:] if line.split()[0].isdigit()]


def test_collectives_of_a_lone_process() -> None:
    group = ShardGroup(3)
    assert bars(shardsum.show(group, [3, 4, 0])) == ["███░", "████", "░░░░"]
    assert bars(shardsum.show(group, [1, 2, 0], collective="all_gather")) == ["█░░", "░██", "░░░"]
    scatter = group.plan("reduce_scatter", [3, 4, 0], splits=[0, 3, 1])
    assert bars(shardsum.show(scatter)) == ["▒▒▒·", "███▒", "···░"]
    assert bars(shardsum.show(scatter.adjoint)) == ["░░░·", "███░", "···▒"]
    assert bars(shardsum.show(group, [0, 0, 0])) == ["·", "·", "·"]


def test_more_positions_than_columns() -> None:
    picture = shardsum.show(ShardGroup(2), [10**6, 5 * 10**5], width=60)
    assert max(map(len, picture.splitlines())) <= 60 and repr(picture) == picture
    first, second = bars(picture)
    held = -(-len(first) // 2)  # a column is held where any of its positions is
    assert first == "█" * len(first) and second == "█" * held + "░" * (len(first) - held)


def test_packed_documents() -> None:
    cp = ShardGroup(4).context_parallel([3, 2, 3, 2], [0, 1, 4, 10])
    assert bars(shardsum.show(cp)) == ["███·······", "·░░██·····", "····░███··", "····░░░░██"]


def test_what_does_not_fit_is_refused() -> None:
    group = ShardGroup(3)
    with pytest.raises(ValueError, match="lengths: "):
        shardsum.show(group, [3, 4])
    with pytest.raises(ValueError, match="splits: all_reduce takes no such argument"):
        shardsum.show(group, [3, 4, 0], splits=[1, 1, 1])
    with pytest.raises(ValueError, match="lengths: a plan and a batch have their own"):
        shardsum.show(group.plan("all_reduce", [3, 4, 0]), [3, 4, 0])


def _on_two(rank: int, world_size: int) -> str:
    group = ShardGroup(3, placement="zigzag", transport="gather")
    return shardsum.show(group, [2, 1, 1], row_shape=(8,)) if rank == 1 else ""  # not collective


def test_between_processes() -> None:
    _, picture = run_processes(_on_two, 2)
    owners = [line.split()[1] for line in picture.splitlines()[2:5]]
    assert owners == ["0", "1", "1"] and "3 virtual ranks on 2 processes" in picture
    assert "by gather: " in picture and " bytes in all, at most " in picture


def test_reprs_fit_a_notebook() -> None:
    group = ShardGroup(256)
    plan = group.plan("all_reduce", [3] * 256, dtype=torch.float32)
    plan([torch.ones(3)] * 256)
    cp = group.context_parallel([4] * 256, [0, 1000, 1024])
    for shown in (group, plan, plan.explain(), plan.stats(), cp):
        assert all(len(line) < 200 for line in repr(shown).splitlines()), repr(shown)
    assert repr(plan.explain()) == str(plan.explain())


@pytest.mark.parametrize("width", [0, -5, 1.5, None, "a"])
def test_a_picture_without_width_is_refused(width: Any) -> None:
    with pytest.raises(ValueError, match="width: expected an int, at least 1"):
        shardsum.show(ShardGroup(2), [1, 2], width=width)


def test_only_groups_plans_and_batches_are_shown() -> None:
    with pytest.raises(ValueError, match="what: expected a ShardGroup, a Plan or a ContextBatch, got 3"):
        shardsum.show(3)
