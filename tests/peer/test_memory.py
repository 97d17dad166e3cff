"""Who can reach whose memory, and a row that lies behind the result."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum.transports.peer import transport as peer
from shardsum.transports.peer.memory import available, gather_objects, unreachable
from tests.processes import run_processes


def test_who_cannot_be_reached() -> None:
    places = [["a|1", "gpu0"], ["a|1", "gpu1"]]
    visible = {"gpu0": 0, "gpu1": 1}
    assert unreachable(places[0], places, visible, False, lambda a, b: True) is None
    assert "peer access to cuda:1 of process 1" in str(
        unreachable(places[0], places, visible, False, lambda a, b: False)
    )
    assert "hidden" in str(unreachable(places[0], places, {"gpu0": 0}, False, lambda a, b: True))
    assert "another host (b)" in str(
        unreachable(places[0], [places[0], ["b|2", "gpu1"]], visible, False, lambda a, b: True)
    )
    twice = [places[0], places[0]]
    assert "one GPU" in str(unreachable(places[0], twice, visible, False, lambda a, b: True))
    assert unreachable(places[0], twice, visible, True, lambda a, b: True) is None


def _available(rank: int, world_size: int) -> Any:
    return available(dist.group.WORLD, torch.device("cpu"), gather_objects(dist.group.WORLD))


def test_on_the_cpu_every_process_hears_the_same_reason() -> None:
    assert run_processes(_available, 2) == ["process 0: shards live on cpu, not on CUDA"] * 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_row_that_starts_behind_the_result_holds_nothing(tmp_path: Path) -> None:
    """Else pushing would read behind the shard."""
    csrc = Path(peer.__file__).parents[3] / "csrc"
    (tmp_path / "main.cu").write_text(
        """
        #include "peer/rows.cuh"
        #include <cstdio>
        int main() {
          static shardsum::PeerCall c{};
          c.size = 4, c.width = 8, c.in_bytes = 4, c.chunk_end = 32;
          for (uint32_t start : {0, 2, 4, 6}) std::printf("%u ", shardsum::describe_held(c, 0, start, 3).length);
        }
        """
    )
    command = ["nvcc", "-std=c++17", f"-I{csrc}", str(tmp_path / "main.cu"), "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.split() == list(
        "3200"
    )
