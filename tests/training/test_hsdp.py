"""HSDP through FSDPReduceScatter: one sum over shards and replicas, in rank order, on every kind of mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP imports it; here once, not in every forked child
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardsum.core import bits, reference
from shardsum.training.fsdp import FSDPReduceScatter
from tests.gpus import marks
from tests.processes import run_processes

HSDP = ("replicate", "shard")


def _hsdp(rank: int, world_size: int, dims: int, wire: Any, device: str = "cpu") -> list[torch.Tensor]:
    """Two replicas of two shards each, of one each on two processes: gradients 1e8, 1, -1e8, 1 of a layer that must be
    padded. ``dims``: of the mesh that FSDP is given. The gradients after one step, after micro-batches
    (1e8, 1, -1e8, 1), (1, 1, 1, 1) whose all_reduce torch puts off, and after a step with bfloat16 gradients."""
    mesh = init_device_mesh(device, (2, world_size // 2), mesh_dim_names=HSDP)
    torch.manual_seed(0)
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    models = [nn.Sequential(nn.Linear(5, 3, bias=False, device=device)) for _ in range(3)]
    for model, policy in zip(models, (MixedPrecisionPolicy(), MixedPrecisionPolicy(), half)):
        for module in (model[0], model):
            fully_shard(module, mesh=mesh if dims == 2 else mesh["shard"], mp_policy=policy)
        over = None if dims == 2 and wire is None else dist.group.WORLD
        FSDPReduceScatter(scale=0.5, over=over, wire_dtype=wire).install(model)
    x = torch.full((1, 5), [1e8, 1.0, -1e8, 1.0][rank], device=device)
    for model, batches in zip(models, ([x], [x, torch.ones_like(x)], [x])):
        for i, batch in enumerate(batches):
            model.set_requires_all_reduce(i == len(batches) - 1)
            model(batch).sum().backward()
    return [model[0].weight.grad.full_tensor().cpu() for model in models]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2])
def test_hsdp_adds_shards_and_replicas_in_one_order(dims: int, wire: Any) -> None:
    _check_hsdp(run_processes(_hsdp, 4, dims, wire))


@pytest.mark.parametrize(
    "dims, processes",  # a mesh of (2, 1) is refused
    [pytest.param(d, n, marks=marks(n)) for d, n in [(1, 2), (1, 4), (2, 4)]],
)
def test_hsdp_on_gpus(dims: int, processes: int) -> None:
    _check_hsdp(run_processes(_hsdp, processes, dims, None, "cuda", backend="nccl"))


def _half_sum(rows: list[torch.Tensor]) -> float:
    return reference.ragged_sum(rows, [0] * len(rows), 1, scale=0.5, out_dtype=rows[0].dtype).item()


def _check_hsdp(results: list[list[torch.Tensor]]) -> None:
    rows = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)][: len(results)]
    batches = (rows, [row.new_ones(1) for row in rows])
    first, second = (_half_sum(b) for b in batches)
    half = _half_sum([row.bfloat16() for row in rows])
    assert len(rows) == 2 or first == half == 0.5
    for found in results:
        for grad, value in zip(found, (first, first + second, half)):
            assert bits.equal(grad, torch.full((3, 5), value))


def _abandoned_window(rank: int, world_size: int) -> torch.Tensor:
    """A micro-batch whose window is given up must not enter the next step."""
    model = fully_shard(nn.Linear(4, 2, bias=False), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=HSDP))
    FSDPReduceScatter().install(model)
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 4)).sum().backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 4)).sum().backward()
    return model.weight.grad.full_tensor()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 or later")
def test_hsdp_forgets_a_window_that_torch_forgets() -> None:
    for grad in run_processes(_abandoned_window, 4):
        assert bits.equal(grad, torch.full((2, 4), 4.0))


def _one_shard(rank: int, world_size: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=HSDP)
    model = fully_shard(nn.Linear(4, 2, bias=False), mesh=mesh["shard"])
    FSDPReduceScatter(scale=0.5, over=dist.group.WORLD).install(model)
    model(torch.full((1, 4), [1e8, 1.0, -1e8, 1.0][rank])).sum().backward()
    return model.weight.grad.full_tensor()


def test_replicas_of_a_single_shard() -> None:
    for grad in run_processes(_one_shard, 4):
        assert bits.equal(grad, torch.full((2, 4), 0.5))


def _two_meshes(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A module that torch replicates, and one that is another expert on either half of the world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=HSDP)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh["shard"])
    FSDPReduceScatter().install(model)
    for layer in model:
        layer(torch.full((1, 4), 1.0 + rank)).sum().backward()
    return model[0].weight.grad.full_tensor(), model[1].weight.grad.full_tensor()


def test_a_module_is_added_over_its_own_mesh() -> None:
    for rank, (replicated, expert) in enumerate(run_processes(_two_meshes, 4)):
        assert bits.equal(replicated, torch.full((4, 4), 10.0))
        assert bits.equal(expert, torch.full((2, 4), 3.0 if rank < 2 else 7.0))


def _unsuitable_meshes(rank: int, world_size: int) -> list[str]:
    messages = []
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for shape, over in (((4, 1), None), ((2, 2), groups[rank // 2])):
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", shape, mesh_dim_names=HSDP))
        with pytest.raises(ValueError) as caught:
            FSDPReduceScatter(over=over).install(model)
        messages.append(str(caught.value))
    return messages


def test_meshes_that_do_not_fit_are_refused_with_the_way_to_go() -> None:
    for one_shard, other_group in run_processes(_unsuitable_meshes, 4):
        assert "weight has 4 replicas" in one_shard and "one shard each" in one_shard and "over=" in one_shard
        assert "2 replicas" in other_group and "group of these 4 processes (over=...), and has one of 2" in other_group
    with pytest.raises(ValueError, match="model: Linear has no FSDPModule"):
        FSDPReduceScatter().install(nn.Linear(2, 2))


def _with_tensor_parallelism(rank: int, world_size: int) -> torch.Tensor:
    """A weight that tensor parallelism replicates and FSDP shards, on two times two processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tensor"], [Replicate()]))
    fully_shard(model, mesh=mesh["fsdp"])
    FSDPReduceScatter().install(model)
    x = DTensor.from_local(torch.full((1, 4), 1.0 + rank // 2), mesh["tensor"], [Replicate()])
    model(x).sum().to_local().backward()
    return model.weight.grad.full_tensor()


def test_what_tensor_parallelism_replicates_is_not_hsdp() -> None:
    for grad in run_processes(_with_tensor_parallelism, 4):
        assert torch.equal(grad, torch.full((4, 4), 3.0))
