"""The state of a run as named tensors: model, AdamW, random streams. What :mod:`.checkpoint` stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...training.shard_group import ShardGroup


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, group: ShardGroup) -> dict[str, Tensor]:
    """Parameters and AdamW state by name, and the random streams of all R virtual ranks. Collective."""
    state: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    streams = group.generators.state_dict()
    for kind in _kinds(group):
        shards = [streams[f"{v}.{kind}"].to(group.device) for v in group.virtual_ranks]
        whole = group.all_gather(shards, [len(shards[0])] * group.num_virtual_ranks)
        state[f"rng.{kind}"] = whole.unflatten(0, (group.num_virtual_ranks, -1)).cpu()
    return state


def expected_state(model: nn.Module, group: ShardGroup, steps: int, loss_per_position: Tensor) -> dict[str, Tensor]:
    """Tensors of the names, dtypes and shapes that a checkpoint after ``steps`` steps has; no values."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p
        if steps:
            state |= {f"optimizer.{name}.{key}": p for key in ("exp_avg", "exp_avg_sq")}
            state[f"optimizer.{name}.step"] = torch.empty(())
    streams, v = group.generators.state_dict(), group.virtual_ranks[0]
    state |= {f"rng.{kind}": streams[f"{v}.{kind}"].expand(group.num_virtual_ranks, -1) for kind in _kinds(group)}
    return state | {"losses": torch.empty(steps), "loss_per_position": loss_per_position}


@torch.no_grad()
def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: ShardGroup, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of :func:`state_of`; writes into the parameters in place, so their aliases stay good."""
    for name, p in model.named_parameters():
        p.copy_(tensors[f"model.{name}"])
        prefix = f"optimizer.{name}."
        for key, value in tensors.items():
            if key.startswith(prefix):
                # AdamW keeps its step count on the CPU, the moments with the parameter.
                entry = key.removeprefix(prefix)
                optimizer.state[p][entry] = value.clone() if entry == "step" else value.to(p.device)
    kinds, ranks = _kinds(group), group.virtual_ranks
    group.generators.load_state_dict({f"{v}.{kind}": tensors[f"rng.{kind}"][v] for v in ranks for kind in kinds})


def _kinds(group: ShardGroup) -> list[str]:
    """Of generators."""
    return ["cpu"] if group.device.type == "cpu" else ["cpu", group.device.type]
