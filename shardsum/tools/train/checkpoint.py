"""The checkpoint of a run: one safetensors file that any number of processes can resume.

Everything in it belongs to the model or to a virtual rank, nothing to a process:

    model.NAME                                parameters
    optimizer.NAME.{step,exp_avg,exp_avg_sq}  AdamW's state
    rng.cpu, rng.cuda                         uint8 ``(R, n)``: the generator state of every virtual rank
    losses                                    float32 ``(steps,)``
    loss_per_position                         float32 ``(document_length, 2)``: decayed sum and count

The position in the data is the number of steps. Metadata: the settings of the run, the digest of its data.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...training.generators import rank_seed
from ...training.shard_group import ShardGroup
from .config import RunConfig

NAME = "checkpoint.safetensors"
#: Settings that a resumed run may change: how long, how and where it runs, none of which its bits depend on.
_FREE = (
    "folder",
    "resume",
    "data",
    "group.placement",
    "group.transport",
    "group.timeout",
    "group.costs",
    "train.steps",
    "train.save_every",
)


def save(path: Path, tensors: dict[str, Tensor], config: RunConfig, data_digest: str) -> None:
    """Write the checkpoint at once or not at all: a run killed in here keeps the one before."""
    metadata = {"config": json.dumps(asdict(config)), "data": data_digest, "format": "1"}
    unfinished = path.with_suffix(".unfinished")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, unfinished, metadata)
    os.replace(unfinished, path)


def load(path: Path, config: RunConfig, data_digest: str) -> dict[str, Tensor]:
    """The tensors of the checkpoint, on the CPU.

    Raises:
        ValueError: there is none, or it was made with settings or data that would give other bits.
    """
    if not path.exists():
        raise ValueError(f"resume: {path.parent} holds no {path.name}")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        saved, now = _flat(json.loads(metadata["config"])), _flat(asdict(config))
        for option in sorted(saved.keys() | now.keys()):
            if option not in _FREE and saved.get(option) != now.get(option):
                raise ValueError(
                    f"resume: {option} is {now.get(option)!r}, but the checkpoint was made with {saved.get(option)!r}"
                )
        if metadata["data"] != data_digest:
            raise ValueError("resume: the data is not the data of the checkpoint; name its folder with --data")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and AdamW state by name."""
    state: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return state


@torch.no_grad()
def load_model_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of :func:`model_state`; writes into the parameters in place, so their aliases stay good."""
    for name, p in model.named_parameters():
        p.copy_(tensors[f"model.{name}"])
        prefix = f"optimizer.{name}."
        for key, value in tensors.items():
            if key.startswith(prefix):
                # AdamW keeps its step count on the CPU, the moments with the parameter.
                entry = key.removeprefix(prefix)
                optimizer.state[p][entry] = value.clone() if entry == "step" else value.to(p.device)


def seed_generators(group: ShardGroup, seed: int) -> None:
    """Start the generators of the hosted virtual ranks: one stream per (seed, virtual rank)."""
    for v in group.virtual_ranks:
        with group.rng(v):
            torch.manual_seed(rank_seed(seed, v))


def generator_state(group: ShardGroup) -> dict[str, Tensor]:
    """The generator states of all R virtual ranks; collective."""
    states: dict[str, list[Tensor]] = {}
    for v in group.virtual_ranks:
        with group.rng(v):
            states.setdefault("rng.cpu", []).append(torch.get_rng_state())
            if group.device.type == "cuda":
                states.setdefault("rng.cuda", []).append(torch.cuda.get_rng_state(group.device))
    gathered = {}
    for name, shards in states.items():
        shards = [shard.to(group.device) for shard in shards]
        lengths = [shards[0].numel()] * group.num_virtual_ranks
        whole = group.all_gather(shards, lengths)
        gathered[name] = whole.unflatten(0, (group.num_virtual_ranks, -1)).cpu()
    return gathered


def load_generator_state(group: ShardGroup, tensors: dict[str, Tensor]) -> None:
    for v in group.virtual_ranks:
        with group.rng(v):
            torch.set_rng_state(tensors["rng.cpu"][v].clone())
            if group.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["rng.cuda"][v].clone(), group.device)
