"""A process that was forked from a member of a group."""

from __future__ import annotations

import os

import torch

from shardsum import ShardGroup
from tests.processes import run_processes


def forked(rank: int, world_size: int) -> None:
    group = ShardGroup(2)
    x = torch.ones(4)
    group.all_reduce(x, [4, 4])
    child = os.fork()
    if child == 0:
        try:
            group.all_reduce(x, [4, 4])
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert group.all_reduce(x, [4, 4]).tolist() == [2.0] * 4


def test_a_forked_child_is_refused_and_leaves_its_parents_group_alone() -> None:
    run_processes(forked, 2)
