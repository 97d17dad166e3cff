"""Training on GPUs: one hash for one and for two GPUs, in bf16 and fp32, resuming included.

Every run is in a process of its own, since cuBLAS reads CUBLAS_WORKSPACE_CONFIG once. A failure names the first
difference: an early loss means the forward pass, one that comes later a gradient or the optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardsum.tools.compare_runs import compare_runs
from shardsum.tools.train import GroupConfig, ModelConfig, RunConfig, TrainConfig, run
from tests.gpus import needs_gpus
from tests.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 8
#: parallel, precision, placement of the run on two GPUs
MODES = [("context", "bf16", "zigzag"), ("context", "fp32", "contiguous"), ("documents", "bf16", "contiguous")]


def config(folder: Path, parallel: str, precision: str, placement: str, steps: int = STEPS) -> RunConfig:
    """R = 4, uneven chunks, grouped queries, dropout, two micro-steps."""
    train = {"parallel": parallel, "precision": precision, "steps": steps, "sequence_length": 1021, "accumulation": 2}
    return RunConfig(
        group=GroupConfig(placement=placement),  # type: ignore[arg-type]
        model=ModelConfig(layers=2, dropout=0.1),
        train=TrainConfig(**train),  # type: ignore[arg-type]
        device="cuda",
        folder=str(folder),
    )


def _train(rank: int, world_size: int, configs: list[RunConfig]) -> list[tuple[str, float, float]]:
    """Hash, first and last loss of every run."""
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    with contextlib.redirect_stdout(io.StringIO()):
        results = [run(c) for c in configs]
    return [(r.hash, r.losses[0].item(), r.losses[-1].item()) for r in results]


def train(world_size: int, configs: list[RunConfig]) -> list[tuple[str, float, float]]:
    return run_processes(_train, world_size, configs, backend="nccl", timeout=150)[0]


def assert_same_runs(a: Path, b: Path) -> None:
    """The checkpoints of two run folders hold the same bits; prints where they first differ."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = compare_runs(str(a), str(b))
    assert code == 0, f"{a.name} and {b.name} differ; {out.getvalue()}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The runs of one GPU that hosts all four virtual ranks, each done twice."""
    folder = tmp_path_factory.mktemp("alone")
    names = ["-".join(mode[:2]) for mode in MODES]
    runs = [config(folder / f"{n}{again}", *mode) for n, mode in zip(names, MODES) for again in ("", "-again")]
    results = train(1, runs)
    for name, (_, first, last) in zip(names, results[::2]):
        assert first > 5 and last < first - 0.5, f"{name}: the loss went from {first} to {last}"
    return lambda name: folder / name


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_one_gpu_repeats_its_bits(alone: Callable[[str], Path], mode: tuple[str, str, str]) -> None:
    name = "-".join(mode[:2])
    assert_same_runs(alone(name), alone(f"{name}-again"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two GPUs, and half of the first of them."""
    folder = tmp_path_factory.mktemp("together")
    runs = [config(folder / "-".join(mode[:2]), *mode) for mode in MODES]
    train(2, [*runs, config(folder / "half", *MODES[0], steps=STEPS // 2)])
    return folder


@needs_gpus(2)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_two_gpus_have_the_hash_of_one(
    alone: Callable[[str], Path], together: Path, mode: tuple[str, str, str]
) -> None:
    name = "-".join(mode[:2])
    assert_same_runs(alone(name), together / name)


@needs_gpus(2)
def test_a_checkpoint_of_two_gpus_goes_on_on_one(alone: Callable[[str], Path], together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "half", tmp_path / "resumed")
    train(1, [dataclasses.replace(config(tmp_path / "resumed", *MODES[0]), resume="required")])
    assert_same_runs(alone("-".join(MODES[0][:2])), tmp_path / "resumed")
