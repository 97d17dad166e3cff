"""launch/train_step.py: runs under torchrun, learns, and computes what one process without shardsum's groups does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch._dynamo  # DDP and AdamW import it; here once, not in every forked child

from tests.processes import run_processes
from tests.scripts import ROOT, load_script

SCRIPT = "launch/train_step.py"


def _train(rank: int, world_size: int, sequence_ranks: int, steps: int) -> list[float]:
    return load_script(SCRIPT).train(sequence_ranks, steps)


def test_stays_short() -> None:
    assert len((ROOT / SCRIPT).read_text().splitlines()) <= 80


def test_cutting_the_sequence_changes_rounding_only() -> None:
    """World 1 x 1 (whole sequence), 1 x 3 and 2 x 1 against 2 x 2: losses agree to fp32 rounding after 6 steps."""
    torch.set_num_threads(1)
    whole = run_processes(_train, 1, 1, 6)[0]
    for losses in run_processes(_train, 3, 3, 6):
        assert losses == pytest.approx(whole, rel=1e-4)
    data = run_processes(_train, 2, 1, 6)
    both = run_processes(_train, 4, 2, 6)
    for rank, losses in enumerate(both):
        assert losses == pytest.approx(data[rank // 2], rel=1e-4)
    assert both[0] == both[1] and both[2] == both[3] and both[0] != both[2]
    assert data[0] != pytest.approx(whole, rel=1e-3)  # two data ranks average over two sequences


@pytest.mark.slow
def test_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / SCRIPT), "2", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"loss ([\d.]+) at step 1, ([\d.]+) at step 20", done.stdout)[0])
    assert first > 5 and last < 0.9 * first
