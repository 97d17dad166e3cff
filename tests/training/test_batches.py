"""Unequal numbers of batches with collective calls in the forward: the training of one process with all rows."""

from __future__ import annotations

import torch
import torch._dynamo  # DDP imports it; here once, not in every forked child
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup
from shardsum.training.batches import until_all_are_done
from shardsum.training.hooks import HookState, ddp_comm_hook
from tests.processes import run_processes

NUM_BATCHES = [2, 4, 0]


def batches(rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(2 + i + rank, 4, generator=g) for i in range(NUM_BATCHES[rank])]


class Model(nn.Module):
    """Every row sees the sum of all processes' rows."""

    def __init__(self, group: ShardGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.first, self.second = group, nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        everyone = h if self.group is None else self.group.all_gather(h)
        return self.second(h + everyone.sum(0))


def _train(rank: int, world_size: int) -> list[Tensor]:
    group = ShardGroup()
    model = DistributedDataParallel(Model(group))
    model.register_comm_hook(HookState.for_sum_loss(group), ddp_comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in until_all_are_done(group, batches(rank)):
        x = torch.empty(0, 4) if batch is None else batch
        optimizer.zero_grad()
        group.token_mean(model(x).square().sum(), len(x))[0].backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_processes_without_a_batch_take_part_with_empty_ones() -> None:
    model = Model(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(NUM_BATCHES)):
        x = torch.cat([b[step] for b in map(batches, range(3)) if step < len(b)])
        optimizer.zero_grad()
        (model(x).square().sum() / len(x)).backward()
        optimizer.step()
    first, *others = run_processes(_train, 3)
    for other in others:
        assert all(map(torch.equal, first, other))
    torch.testing.assert_close(first, [p.detach() for p in model.parameters()], rtol=1e-4, atol=1e-5)


def test_none_while_others_go_on() -> None:
    found = run_processes(_count, 3)
    assert found == [["a", "b", None], ["a", "b", "c"], [None, None, None]]


def _count(rank: int, world_size: int) -> list[str | None]:
    return list(until_all_are_done(ShardGroup(), "abc"[: [2, 3, 0][rank]]))
