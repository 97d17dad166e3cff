"""launch/train_llama.py on GPUs: one hash for virtual ranks on one GPU, on two, with DDP and with FSDP2.

Runs are in processes of their own, since cuBLAS reads CUBLAS_WORKSPACE_CONFIG once.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpus import needs_gpus
from tests.processes import run_processes
from tests.scripts import load_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
for package in ("greenlet", "transformers", "peft"):
    pytest.importorskip(package, reason="needs the extra models")

OPTIONS = ["--autocast", "--model qwen2 --lora --autocast"]
Run = tuple[list[float], str]


def _train(rank: int, world_size: int, options: list[str]) -> list[Run]:
    train_llama = load_script("launch/train_llama.py")
    return [train_llama.train(train_llama.parse(o.split()), "cuda") for o in options]


def train(world_size: int, options: list[str]) -> list[Run]:
    return run_processes(_train, world_size, options, backend="nccl", timeout=150)[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    """Four and two virtual ranks on one GPU, with and without activation checkpointing."""
    options = [f"{o} --ranks {r}{c}" for o in OPTIONS for r in (2, 4) for c in ("", " --checkpointing")]
    return dict(zip(options, train(1, options)))


@pytest.mark.parametrize("option", OPTIONS)
def test_checkpointing_changes_no_bits(alone: dict[str, Run], option: str) -> None:
    for ranks in (2, 4):
        assert alone[f"{option} --ranks {ranks}"] == alone[f"{option} --ranks {ranks} --checkpointing"]


@needs_gpus(2)
def test_two_gpus_have_the_hash_of_one(alone: dict[str, Run]) -> None:
    options = [f"{o} {mode}" for o in OPTIONS for mode in ("--ranks 4", "--ranks 2", "--fsdp")]
    for option, found in zip(options, train(2, [f"{o} --checkpointing" for o in options])):
        assert found == alone[option.replace("--fsdp", "--ranks 2")], option
