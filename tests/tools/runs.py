"""Small runs of ``shardsum train`` that several test files start."""

from __future__ import annotations

import contextlib
import shutil
import sysconfig
from pathlib import Path

from shardsum.tools.train import GroupConfig, ModelConfig, RunConfig, RunResult, TrainConfig, run
from tests.processes import run_processes

STEPS = 4
SMALLEST = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, dropout=0.1)


def copy_text(folder: Path) -> str:
    """Some real source files: reading the whole standard library takes longer than a tiny run."""
    for name in ("argparse.py", "heapq.py", "textwrap.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, folder)
    return str(folder)


def children(parent: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def tiny(text: str, folder: Path, parallel: str = "context", **changes: object) -> RunConfig:
    """R = 4, uneven chunks, grouped queries, dropout, two micro-steps: everything that could tell processes apart."""
    train = {"steps": STEPS, "sequence_length": 110, "document_length": 48, "accumulation": 2, "save_every": 0}
    return RunConfig(
        group=GroupConfig(placement=str(changes.pop("placement", "contiguous"))),  # type: ignore[arg-type]
        model=ModelConfig(width=32, layers=2, heads=4, kv_heads=2, dropout=0.1),
        train=TrainConfig(**{**train, "parallel": parallel, **changes}),  # type: ignore[arg-type]
        data=text,
        folder=str(folder),
    )


def train_processes(config: RunConfig, world_size: int) -> RunResult:
    """Run on forked processes; all of them must return the same."""
    results = run_processes(train, world_size, config)
    assert len({result.hash for result in results}) == 1
    return results[0]


def train(rank: int, world_size: int, config: RunConfig) -> RunResult:
    return run(config)
