"""What reduce_gradients adds up: micro-batches, norms, and what processes must agree on."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from shardsum import ShardGroup
from shardsum.core import bits
from tests.processes import run_processes


def test_micro_batches_accumulate_to_the_mean_over_all_their_tokens() -> None:
    """Counts [[3, 1], [0, 2]] of two micro-batches on two ranks: dw = 21 / 6; the mean of their means is 4."""
    group, model = ShardGroup(2), nn.Linear(1, 1, bias=False)
    hosted, tokens = group.replicas(model), [[[1.0, 2, 3], [4]], [[], [5, 6]]]
    for micro_batch in tokens:
        losses = [
            replica(torch.tensor(x, dtype=torch.float32).view(-1, 1)).sum() / 6
            for replica, x in zip(hosted, micro_batch)
        ]
        sum(losses).backward()
    group.reduce_gradients(hosted)
    assert model.weight.grad.item() == 3.5


def _nine_micro_batches(rank: int, world_size: int, how: str) -> torch.Tensor:
    """Gradients 256, then eight times 1, on each of two virtual ranks; bfloat16 cannot add 1 to 256."""
    group, model = ShardGroup(2), nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    hosted = group.replicas(model)
    for gradient in [256.0] + [1.0] * 8:
        sum(replica(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum() for replica in hosted).backward()
        if how == "accumulate":
            group.reduce_gradients(hosted, accumulate=True)
    if how == "replicas":
        assert all(replica.weight.grad.item() == 264 for replica in hosted)
        group.reduce_gradients(hosted)
    return model.weight.grad


@pytest.mark.parametrize("how", ["replicas", "accumulate"])
def test_micro_batches_of_bf16_parameters_add_up_in_fp32(how: str) -> None:
    for grad in [_nine_micro_batches(0, 1, how), *run_processes(_nine_micro_batches, 2, how)]:
        assert grad.dtype == torch.bfloat16 and grad.item() == 528


def test_accumulate_adds_to_what_the_gradient_is() -> None:
    """A new sum after zero_grad, and from the values of a gradient that somebody changed."""
    group, model = ShardGroup(2), nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), nn.Linear(1, 1))
    hosted = group.replicas(model)

    def step(gradient: float, accumulate: bool = True) -> float:
        x = torch.full((1, 1), gradient, dtype=torch.bfloat16)
        sum(replica[0](x).sum() for replica in hosted).backward()
        group.reduce_gradients(hosted, accumulate=accumulate)
        return model[0].weight.grad.item()

    model[1].bias.grad = torch.ones(1)
    assert [step(128), step(0.5), step(0.5)] == [256, 256, 258]  # 257 is rounded to 256, but not forgotten
    model[0].weight.grad.mul_(0.5)
    assert step(1) == 131  # the changed value, 129, and 2
    model.zero_grad()
    assert step(3) == 6 and step(3, accumulate=False) == 6 and step(1) == 8
    sum(replica[1](torch.ones(1, 1)).sum() for replica in hosted).backward()
    group.reduce_gradients(hosted, accumulate=True)
    assert model[1].bias.grad.item() == 2 and model[0].weight.grad.item() == 8  # unused ones stay


def _clipped(rank: int, world_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient norm of virtual ranks with 5, 0, 4 and 2 rows, and the clipped gradients."""
    group = ShardGroup(4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    hosted, rows = group.replicas(model), [5, 0, 4, 2]
    x = torch.randn(sum(rows), 7).split(rows)
    losses = [replica(x[v]).square().sum() for v, replica in zip(group.virtual_ranks, hosted)]
    group.token_mean(losses, [rows[v] for v in group.virtual_ranks])[0].backward()
    group.reduce_gradients(hosted)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm, [p.grad for p in model.parameters()]


def test_the_gradient_norm_and_clipped_gradients_are_the_same_everywhere() -> None:
    torch.set_num_threads(1)
    norm, grads = _clipped(0, 1)
    assert norm > 0.1
    for world_size in (2, 3, 4):
        for found_norm, found in run_processes(_clipped, world_size):
            assert bits.equal(found_norm, norm) and all(map(bits.equal, found, grads))


def _accumulate_differs(rank: int, world_size: int) -> str:
    group = ShardGroup(2)
    hosted = group.replicas(nn.Linear(2, 2))
    with pytest.raises(ValueError) as caught:
        group.reduce_gradients(hosted, accumulate=rank == 1)
    return str(caught.value)


def test_processes_must_agree_on_accumulate() -> None:
    for message in run_processes(_accumulate_differs, 2):
        assert message == "reduce_gradients: accumulate differs: process 0 has False, process 1 has True"


def _other_parameters(rank: int, world_size: int) -> list[str]:
    group, found = ShardGroup(2), []
    for change in ("frozen", "name", "shape", "count"):
        names = ["a", "b" if change != "name" or rank else "c"]
        sizes = (4, 4) if change != "shape" or rank else (2, 8)  # as many elements
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(n, 16 // n)) for name, n in zip(names, sizes)})
        if change == "frozen":
            model[names[rank]].requires_grad_(False)
        if change == "count" and rank:
            model |= {f"more {i}": nn.Parameter(torch.ones(1)) for i in range(100)}
        hosted = group.replicas(model)
        for replica in hosted:
            sum(p.sum() for p in replica.parameters()).backward()
        with pytest.raises(ValueError) as caught:
            group.reduce_gradients(hosted)
        found.append(str(caught.value))
    assert group.all_reduce(torch.ones(2), [2, 2]).tolist() == [2.0, 2.0]
    return found


def test_processes_must_have_the_same_parameters() -> None:
    for messages in run_processes(_other_parameters, 2):
        for message, (ours, theirs) in zip(messages, ((1, 1), (2, 2), (2, 2), (2, 102)), strict=True):
            what = r"trainable parameters of replicas differs: process 0 has {} \(hash .*, process 1 has {} \(hash "
            assert re.match("reduce_gradients: " + what.format(ours, theirs), message), message
