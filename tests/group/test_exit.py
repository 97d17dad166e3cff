"""Calls made while Python ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys
import torch
import torch.distributed as dist
from shardsum import ShardGroup

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
group = ShardGroup(2, timeout=10)
shards = [torch.ones(3) for _ in group.virtual_ranks]
handle = group.all_reduce(shards, [3, 3], async_op=True)

class Late:
    def __del__(self, calls=[lambda: group.all_reduce(shards, [3, 3]), handle.wait, ShardGroup]):
        for call in calls:
            try:
                print(call())
            except RuntimeError as error:
                print(str(error)[:16])

late = Late()
atexit.register(lambda: print(group.all_reduce(shards, [3, 3]).tolist()))
"""


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_in_a_destructor_at_exit_is_an_error_and_one_of_atexit_is_not(world: int, tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(world), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    for program in programs:
        out, errors = program.communicate(timeout=60)
        assert (program.returncode, out) == (0, "[2.0, 2.0, 2.0]\n" + 3 * "Python is ending\n"), errors
