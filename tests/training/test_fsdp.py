"""FSDP2 through FSDPReduceScatter: the bits of virtual ranks in one process, narrow wires, errors that name modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP imports it; here once, not in every forked child
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.training.fsdp import FSDPReduceScatter
from tests.gpus import needs_gpus
from tests.processes import run_processes
from tests.training.test_hooks import STEPS, assert_same, loss_of, make_model, optimizer_of


def shard(model: nn.Module, reduce_scatter: FSDPReduceScatter, **options: Any) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in (*model.children(), model):
        if isinstance(layer, nn.Linear) or layer is model:
            fully_shard(layer, mesh=mesh, **options)
    reduce_scatter.install(model)
    return model


def _fsdp(rank: int, world_size: int, reduce_dtype: torch.dtype | None) -> list[torch.Tensor]:
    reduce_scatter = FSDPReduceScatter(scale=1 / world_size)
    model = shard(make_model(), reduce_scatter, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step, torch.float32).backward()
        optimizer.step()
    assert len(reduce_scatter._groups) == 1
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize(("world_size", "reduce_dtype"), [(2, None), (4, None), (4, torch.bfloat16)])
def test_fsdp_equals_virtual_ranks(world_size: int, reduce_dtype: torch.dtype | None) -> None:
    expected = emulate_fsdp(world_size, reduce_dtype)
    for found in run_processes(_fsdp, world_size, reduce_dtype):
        assert_same(found, expected)


def emulate_fsdp(num_ranks: int, reduce_dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The same training by ``replicas``; with a low-precision reduce dtype the result is rounded to it as well."""
    torch.set_num_threads(1)
    model, group = make_model(), ShardGroup(num_ranks)
    hosted, optimizer = group.replicas(model), optimizer_of(model)
    for step in range(STEPS):
        for rank, replica in enumerate(hosted):
            loss_of(replica, rank, step, torch.float32).backward()
            if reduce_dtype is not None:
                for p in replica.parameters():
                    p.grad = p.grad.to(reduce_dtype).to(p.dtype)
        group.reduce_gradients(hosted, scale=1 / num_ranks)
        if reduce_dtype is not None:
            for p in model.parameters():
                p.grad = p.grad.to(reduce_dtype).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _fsdp_average(rank: int, world_size: int, first: bool) -> str:
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (world_size,)))
    if first:
        model.set_gradient_divide_factor(1.0)
    model.set_custom_reduce_scatter(FSDPReduceScatter())
    with pytest.raises(ValueError) as caught:
        loss_of(model, rank, 0, torch.float32).backward()
    return str(caught.value)


@pytest.mark.parametrize("first", [False, True])
def test_fsdp_average_is_refused_with_the_remedy(first: bool) -> None:
    for message in run_processes(_fsdp_average, 2, first):
        assert "set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True)" in message
        assert ("asks for PREMUL_SUM" if first else "asks for AVG") in message


def _call_directly(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    reduce_scatter = FSDPReduceScatter()
    x = reduce_scatter.allocate((6,), dtype=torch.float32, device=torch.device("cpu")).copy_(torch.arange(6.0))
    out = reduce_scatter.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    try:
        reduce_scatter(out, x, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)
    except ValueError as error:
        message = str(error)
    reduce_scatter(out, x * (1 + rank), dist.group.WORLD, dist.ReduceOp.SUM)
    return message, out


def test_fsdp_interface() -> None:
    for rank, (message, out) in enumerate(run_processes(_call_directly, 2)):
        assert message.startswith("async_op:")
        assert torch.equal(out, 3 * torch.arange(6.0)[3 * rank : 3 * rank + 3])


def _fsdp_wire(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    out, moved = torch.empty(1000, dtype=dtype), []
    for wire in (dtype, torch.bfloat16):
        reduce_scatter = FSDPReduceScatter(0.5, wire_dtype=wire if wire != torch.float64 else None)
        reduce_scatter(out, x, dist.group.WORLD, dist.ReduceOp.SUM)
        moved.append(reduce_scatter._groups[dist.group.WORLD].stats().total)
    return x, out, moved[0] // moved[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fsdp_on_a_bf16_wire(dtype: torch.dtype) -> None:
    results = run_processes(_fsdp_wire, 4, dtype)
    rows = [x.bfloat16() for x, _, _ in results]
    expected = reference.ragged_sum(rows, [0] * 4, 4000, scale=0.5, out_dtype=torch.float32)
    assert bits.equal(torch.cat([out for _, out, _ in results]), expected.to(dtype))
    assert {fewer for _, _, fewer in results} == {dtype.itemsize // 2}


class Gated(nn.Module):
    """The second layer does not reach the loss of some processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.first(x)
        y = self.expert(x)
        return y if use else x


def _uneven_use(rank: int, world_size: int, layers: bool, known: bool) -> str:
    model = Gated()
    for module in (model.first, model.expert, model) if layers else (model,):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    FSDPReduceScatter(timeout=5).install(model)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        for use in [True] * known + [rank == 0]:
            model(torch.ones(1, 4), use).sum().backward()
    return str(caught.value)


FIRST = "first.weight [4, 4], first.bias [4]"
EXPERT = "expert.weight [4, 4], expert.bias [4]"


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_layer_that_some_processes_do_not_use_is_named(layers: bool, known: bool) -> None:
    found = run_processes(_uneven_use, 2, layers, known)
    names = [f"module expert (parameters {EXPERT})", f"module first (parameters {FIRST})"]
    for name, message in zip(names if layers else [f"module the root (parameters {FIRST}, {EXPERT})"] * 2, found):
        assert f"gradients of FSDP {name}: " in message and "set_reduce_scatter_unused_params(True)" in message


def _fsdp_on_gpu(rank: int, world_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A direct call, and the gradients of a sharded model whose every process has the same batch."""
    reduce_scatter = FSDPReduceScatter(scale=1 / world_size)
    x = torch.randn(2000, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
    out = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    reduce_scatter(out, x, dist.group.WORLD, dist.ReduceOp.SUM)
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 13)).cuda(), reduce_scatter)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 9, device="cuda")).square().sum().backward()
    return out.cpu(), [p.grad.full_tensor().cpu() for p in model.parameters()]


@needs_gpus(2)
def test_fsdp_on_gpus() -> None:
    results = run_processes(_fsdp_on_gpu, 2, backend="nccl")
    rows = [torch.randn(2000, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)]
    expected = reference.ragged_sum(rows, [0, 0], 2000, scale=0.5, out_dtype=torch.bfloat16)
    assert bits.equal(torch.cat([out for out, _ in results]), expected)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 13)).cuda()
    model(torch.ones(4, 9, device="cuda")).square().sum().backward()
    for _, grads in results:
        for grad, p in zip(grads, model.parameters()):
            torch.testing.assert_close(grad, p.grad.cpu(), rtol=1e-5, atol=1e-5)
