"""Transformers' Trainer on packed documents: what processes that share sequences learn is what one learns alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here once, not in every forked child

from shardsum import ShardGroup
from tests.processes import run_processes
from tests.scripts import load_script

for package in ("greenlet", "transformers", "accelerate"):
    pytest.importorskip(package, reason="needs the extra models")

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments  # noqa: E402

from shardsum.integrations.transformers_trainer import ContextParallelMixin  # noqa: E402
from tests.integrations.test_transformers import make_model  # noqa: E402


class PackedTrainer(ContextParallelMixin, Trainer):
    pass


def documents() -> list[dict[str, list[int]]]:
    g = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(0, 61, (n,), generator=g).tolist()} for n in (5, 9, 3, 14, 2, 7, 11, 6) * 3]


def _as_torchrun_does(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, world_size, world_size))))


def _train(rank: int, world_size: int, folder: str, share: int | None, batch_size: int) -> torch.Tensor:
    """The weights after two optimizer steps; ``share`` processes share a sequence, None is transformers alone."""
    _as_torchrun_does(rank, world_size)
    model = make_model("llama")
    model.config.use_cache = False  # else transformers lets packed documents attend to each other
    fixed: dict[str, Any] = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    fixed |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        **fixed,
    )
    more: dict[str, Any] = {}
    if share is not None:
        groups = [torch.distributed.new_group(range(i, i + share)) for i in range(0, world_size, share)]
        more["shard_group"] = ShardGroup(group=groups[rank // share])
    kind = Trainer if share is None else PackedTrainer
    kind(model, arguments, train_dataset=documents(), data_collator=DataCollatorWithFlattening(), **more).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trains_as_one_process_does(tmp_path: Path) -> None:
    start = torch.cat([p.detach().flatten() for p in make_model("llama").parameters()])
    (alone,) = run_processes(_train, 1, str(tmp_path), None, 4)
    assert (start - alone).abs().max() > 1e-2
    for world_size, share, batch_size in ((2, 2, 4), (4, 2, 2)):  # one group; two groups with half of the batch each
        found = run_processes(_train, world_size, str(tmp_path), share, batch_size)
        assert all(torch.equal(x, found[0]) for x in found)
        torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-6)


def _example(rank: int, world_size: int, folder: str) -> tuple[list[float], str]:
    _as_torchrun_does(rank, world_size)
    return load_script("launch/train_trainer.py").train(folder, 2)


def test_the_example_runs(tmp_path: Path) -> None:
    (losses, digest), other = run_processes(_example, 2, str(tmp_path))
    assert 5 < losses[1] < losses[0] < 6 and other == (losses, digest)
