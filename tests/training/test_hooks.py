"""DDP and FSDP2 through the hooks: the bits of virtual ranks in one process, over 10 steps of a small model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; here once, not in every forked child
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.training.hooks import FSDPReduceScatter, HookState, ddp_comm_hook
from tests.gpus import marks, needs_gpus
from tests.processes import run_processes

STEPS = 10
HSDP = ("replicate", "shard")


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
    try:
        loss_of(model, rank, 0, torch.float32).backward()
    except ValueError as error:
        return str(error)
    return "no error"


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


# HSDP


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
    try:
        for use in [True] * known + [rank == 0]:
            model(torch.ones(1, 4), use).sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


FIRST = "first.weight [4, 4], first.bias [4]"
EXPERT = "expert.weight [4, 4], expert.bias [4]"


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_layer_that_some_processes_do_not_use_is_named(layers: bool, known: bool) -> None:
    found = run_processes(_uneven_use, 2, layers, known)
    names = [f"module expert (parameters {EXPERT})", f"module first (parameters {FIRST})"]
    for name, message in zip(names if layers else [f"module the root (parameters {FIRST}, {EXPERT})"] * 2, found):
        assert f"gradients of FSDP {name}: " in message and "set_reduce_scatter_unused_params(True)" in message


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
