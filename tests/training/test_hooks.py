"""DDP through the hook: the bits of virtual ranks in one process, and which state goes with which loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; here once, not in every forked child
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.training.hooks import FSDPReduceScatter, HookState, ddp_comm_hook
from tests.gpus import needs_gpus
from tests.processes import run_processes

STEPS = 10


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Sizes that no number of processes divides."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 13), nn.Tanh(), nn.Linear(13, 5)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * rank + step)
    return (10.0 ** (rank - 1) * torch.randn(4, 9, generator=g)).to(dtype)  # ranks of unlike weight: order matters


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return model(batch(rank, step, dtype)).float().square().sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def emulate(
    num_ranks: int, dtype: torch.dtype, *, wire: torch.dtype | None = None, batches: list[int] | None = None
) -> list[torch.Tensor]:
    """Training with the ranks one after the other in this process; ``batches`` per rank, zeros once they ran out."""
    torch.set_num_threads(1)
    model = make_model(dtype)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        rows: list[list[torch.Tensor]] = []
        for rank in range(num_ranks):
            model.zero_grad()
            if batches is None or step < batches[rank]:
                loss_of(model, rank, step, dtype).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            rows.append([g if wire is None else g.to(wire) for g in grads])
        for i, p in enumerate(model.parameters()):
            parts = [row[i].flatten() for row in rows]
            total = reference.ragged_sum(parts, [0] * num_ranks, p.numel(), op="mean", out_dtype=wire or p.dtype)
            p.grad = total.view_as(p).to(p.dtype)
        optimizer.step()
        if batches is not None and step + 1 >= max(batches):
            break
    return [p.detach() for p in model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for i, (f, e) in enumerate(zip(found, expected)):
        assert bits.equal(f, e), (i, bits.first_difference(f, e))


def _ddp(rank: int, world_size: int, dtype: torch.dtype, wire: Any, views: bool, batches: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.001, gradient_as_bucket_view=views)
    model.register_comm_hook(HookState.for_mean_loss(ShardGroup(), wire_dtype=wire), ddp_comm_hook)
    optimizer = optimizer_of(model)
    with model.join(enable=batches is not None):
        for step in range(STEPS if batches is None else batches[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step, dtype).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world_size", "dtype", "wire", "views"),
    [
        (2, torch.float32, None, False),
        (4, torch.float32, None, True),
        (4, torch.float32, torch.bfloat16, False),
        (4, torch.bfloat16, None, False),
    ],
)
def test_ddp_equals_virtual_ranks(world_size: int, dtype: torch.dtype, wire: Any, views: bool) -> None:
    expected = emulate(world_size, dtype, wire=wire)
    for found in run_processes(_ddp, world_size, dtype, wire, views, None):
        assert_same(found, expected)


def test_ddp_join_with_unequal_batches() -> None:
    expected = emulate(2, torch.float32, batches=[3, 5])
    for found in run_processes(_ddp, 2, torch.float32, None, False, [3, 5]):
        assert_same(found, expected)


def _one_gradient(rank: int, world_size: int, scale: float | None, wire: Any) -> torch.Tensor:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(HookState(ShardGroup(), scale=scale, wire_dtype=wire), ddp_comm_hook)
    (ddp(torch.ones(1, 1, dtype=torch.float64)) * (1 + 2 * rank)).sum().backward()
    return model.weight.grad.flatten()


@pytest.mark.parametrize(
    ("scale", "wire", "expected"), [(None, None, 2.0), (1.0, None, 4.0), (None, torch.float16, 2.0)]
)
def test_ddp_averages_unless_told_otherwise(scale: float | None, wire: Any, expected: float) -> None:
    for grad in run_processes(_one_gradient, 2, scale, wire):
        assert bits.equal(grad, torch.tensor([expected], dtype=torch.float64))


def _bf16_gradients(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    mine = (torch.randn(5000, generator=g) * 2.0 ** torch.randint(-9, 9, (5000,), generator=g)).bfloat16()
    layer = nn.Linear(5000, 1, bias=False, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(layer)
    ddp.register_comm_hook(HookState.for_sum_loss(ShardGroup()), ddp_comm_hook)
    ddp(mine[None]).sum().backward()  # the weight's gradient is the input
    return mine, layer.weight.grad[0]


def test_bf16_gradients_are_within_one_ulp_of_float64() -> None:
    results = run_processes(_bf16_gradients, 4)
    exact = sum(mine.double() for mine, _ in results)
    below = exact.abs().log2().floor().clamp(min=-126)
    ulp = 2.0 ** (below - 7)
    chained = results[0][0]
    for mine, _ in results[1:]:
        chained = chained + mine
    for _, grad in results:
        assert ((grad.double() - exact).abs() <= ulp).all()
    assert not ((chained.double() - exact).abs() <= ulp).all()  # adding in bf16 does not reach that


def _bytes(rank: int, world_size: int, wire: Any, transport: str) -> int:
    group, ddp = ShardGroup(transport=transport), DistributedDataParallel(nn.Linear(300, 300))
    ddp.register_comm_hook(HookState.for_mean_loss(group, wire_dtype=wire), ddp_comm_hook)
    ddp(torch.ones(2, 300)).sum().backward()
    return group.stats().total


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_bf16_wire_moves_half_the_bytes(transport: str) -> None:
    full, half = (run_processes(_bytes, 2, wire, transport)[0] for wire in (None, torch.bfloat16))
    assert full == 2 * half > 0


def test_hook_state_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="group: 4 virtual ranks on 1 processes"):
        HookState.for_sum_loss(ShardGroup(4))
    with pytest.raises(ValueError, match=r"wire_dtype: expected one of torch.float16, .*, got torch\.int32"):
        HookState.for_mean_loss(ShardGroup(1), wire_dtype=torch.int32)
    for refuse in (lambda: HookState(ShardGroup(1), scale="1"), lambda: FSDPReduceScatter(scale=True)):
        with pytest.raises(ValueError, match="scale: expected a float"):
            refuse()


# Which state goes with which loss: rows of the table in shardsum.training.hooks.

COUNTS = [1, 3]


def _gradient_of_loss(rank: int, world_size: int, loss: str) -> float:
    """d/dw of the mean over all four tokens of w * token, or of the mean of both processes' means."""
    group, model = ShardGroup(), nn.Linear(1, 1, bias=False)
    by_sum = loss in ("identity", "denominator", "sum over all")
    state = (HookState.for_sum_loss if by_sum else HookState.for_mean_loss)(group)
    if loss == "groups":
        alone = ShardGroup(1, group=[dist.new_group([r]) for r in range(2)][rank])
        state = HookState(group, scale=1 / 2)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, ddp_comm_hook)
    tokens = torch.arange(1.0, 5).split(COUNTS)[rank].view(-1, 1)
    losses, count = ddp(tokens).sum(), COUNTS[rank]
    {
        "identity": lambda: group.token_mean(losses, count)[0],
        "denominator": lambda: group.token_mean(losses, count, denominator=4)[0],
        "sum over all": lambda: losses / 4,
        "sum": lambda: group.token_mean(losses, count, grad="sum")[0],
        "own mean": lambda: losses / count,
        "groups": lambda: alone.token_mean(losses, count)[0],
    }[loss]().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("identity", 2.5), ("denominator", 2.5), ("sum over all", 2.5), ("sum", 2.5), ("own mean", 2.0), ("groups", 2.0)],
)
def test_state_fits_the_loss(loss: str, expected: float) -> None:
    assert run_processes(_gradient_of_loss, 2, loss) == [expected, expected]


def test_the_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="scale"):
        HookState(ShardGroup(1))


def _nine_micro_batches(rank: int, world_size: int, views: bool) -> list[float]:
    """Gradients 256, then eight times 1, on each process; bfloat16 cannot add 1 to 256. Twice: totals are used up."""
    model, found = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), []
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    state = HookState.for_sum_loss(ShardGroup())
    ddp.register_comm_hook(state, ddp_comm_hook)
    for _ in range(2):
        for gradient in [256.0] + [1.0] * 7:
            with state.accumulate(ddp):
                ddp(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum().backward()
        ddp(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        found.append(model.weight.grad.item())
        model.weight.grad = None
    ddp(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    return [*found, model.weight.grad.item()]


@pytest.mark.parametrize("views", [False, True])
def test_micro_batches_of_bf16_parameters_add_up_in_fp32(views: bool) -> None:
    assert run_processes(_nine_micro_batches, 2, views) == [[528.0, 528.0, 2.0]] * 2


def _loss_scaling(rank: int, world_size: int) -> list[tuple[float, float, float]]:
    """Gradient, scale and weight after each step. 70000 is beyond fp16, on one process and in one step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(HookState.for_mean_loss(ShardGroup(), wire_dtype=torch.float16), ddp_comm_hook)
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1.0)
    found = []
    for gradient in (60000.0, 70000.0 if rank == 1 else 1.0, 4.0):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.full((1, 1), gradient)).sum()).backward()
        grad = model.weight.grad.item()
        scaler.step(optimizer)
        scaler.update()
        found.append((grad, scaler.get_scale(), model.weight.item()))
    return found


def test_an_fp16_overflow_on_one_process_skips_the_step_on_all() -> None:
    for found in run_processes(_loss_scaling, 4):
        assert found == [(60000.0, 1.0, -60000.0), (float("inf"), 0.5, -60000.0), (2.0, 0.5, -60004.0)]


def _ddp_on_gpu(rank: int, world_size: int, wire: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of a plain backward pass here, and those that DDP leaves."""
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).cuda()
    ddp = DistributedDataParallel(module, device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.3)
    module(x).square().sum().backward()
    plain = [p.grad.clone().cpu() for p in module.parameters()]
    ddp.register_comm_hook(HookState.for_mean_loss(ShardGroup(), wire_dtype=wire), ddp_comm_hook)
    for _ in range(3):  # buckets are rebuilt after the first step
        module.zero_grad()
        ddp(x).square().sum().backward()
    return plain, [p.grad.cpu() for p in module.parameters()]


@needs_gpus(2)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_ddp_on_gpus_gives_the_mean_in_rank_order(wire: Any) -> None:
    results = run_processes(_ddp_on_gpu, 2, wire, backend="nccl")
    for i, rows in enumerate(zip(*[plain for plain, _ in results])):
        sent = [row.flatten() if wire is None else row.flatten().to(wire) for row in rows]
        expected = reference.ragged_sum(sent, [0, 0], sent[0].numel(), op="mean", out_dtype=sent[0].dtype)
        for _, found in results:
            assert bits.equal(found[i].flatten(), expected.to(rows[0].dtype))
