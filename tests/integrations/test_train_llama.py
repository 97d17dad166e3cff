"""launch/train_llama.py: virtual ranks in one process, DDP and FSDP2 end with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # DDP and AdamW import it; here once, not in every forked child

from tests.processes import run_processes
from tests.scripts import load_script

for package in ("greenlet", "transformers", "peft"):
    pytest.importorskip(package, reason="needs the extra models")

train_llama = load_script("launch/train_llama.py")

OPTIONS = {"llama": "--checkpointing --autocast", "lora": "--model qwen2 --lora --checkpointing"}


def _train(rank: int, world_size: int, options: str) -> tuple[list[float], str]:
    torch.set_num_threads(1)
    return train_llama.train(train_llama.parse(options.split()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_one_hash_for_lockstep_ddp_and_fsdp2(options: str) -> None:
    options += " --steps 3"
    losses, digest = _train(0, 1, f"{options} --ranks 4")
    assert losses[-1] < losses[0] or "lora" in options
    for world_size, more in ((2, " --ranks 4"), (4, ""), (4, " --fsdp")):
        assert run_processes(_train, world_size, options + more) == [(losses, digest)] * world_size
