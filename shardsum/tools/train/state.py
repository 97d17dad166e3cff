"""The state of a run as named tensors: model, AdamW, generators, losses. What :mod:`.checkpoint` stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...training.generators import rank_seed
from ...training.shard_group import ShardGroup


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and AdamW state by name."""
    state: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return state


def expected_state(model: nn.Module, group: ShardGroup, steps: int, loss_per_position: Tensor) -> dict[str, Tensor]:
    """Tensors of the names, dtypes and shapes that a checkpoint after ``steps`` steps has; no values."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p
        if steps:
            state |= {f"optimizer.{name}.{key}": p for key in ("exp_avg", "exp_avg_sq")}
            state[f"optimizer.{name}.step"] = torch.empty(())
    generators = {"rng.cpu": torch.get_rng_state()}
    if group.device.type == "cuda":
        generators["rng.cuda"] = torch.cuda.get_rng_state(group.device)
    state |= {name: s.new_empty((group.num_virtual_ranks, s.numel())) for name, s in generators.items()}
    return state | {"losses": torch.empty(steps), "loss_per_position": loss_per_position}


@torch.no_grad()
def load_model_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
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


def load_generator_state(group: ShardGroup, tensors: Mapping[str, Tensor]) -> None:
    for v in group.virtual_ranks:
        with group.rng(v):
            torch.set_rng_state(tensors["rng.cpu"][v].clone())
            if group.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["rng.cuda"][v].clone(), group.device)
