"""Plans: what group.plan gives, alone and between processes, with gradients of any order and in compiled code."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import intervals_of
from tests.processes import run_processes
from tests.values import assert_same, random_values

LENGTHS, SIZE, HELD = [4, 0, 7, 2], 7, [(0, 4), (3, 3), (0, 7), (5, 7)]
WANTED = [(1, 5), (0, 7), (2, 2), (6, 7)]


def plans_of(group: ShardGroup, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    kinds = dict(row_shape=(3,), dtype=dtype)
    return {
        "all_reduce": group.plan("all_reduce", LENGTHS, size=SIZE, op="mean", **kinds),
        "reduce_scatter": group.plan("reduce_scatter", LENGTHS, size=SIZE, scale=0.5, **kinds),
        "all_gather": group.plan("all_gather", LENGTHS, **kinds),
        "exchange": group.plan("exchange", in_intervals=HELD, out_intervals=WANTED, size=SIZE, **kinds),
    }


def expected_of(name: str, shards: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The results of every virtual rank, or the one of every process."""
    starts = [0] * 4
    if name == "all_reduce":
        return [reference.ragged_sum(shards, starts, SIZE, op="mean", out_dtype=dtype)]
    if name == "reduce_scatter":
        return list(reference.ragged_sum(shards, starts, SIZE, scale=0.5, out_dtype=dtype).split([2, 2, 2, 1]))
    if name == "all_gather":
        return [torch.cat(shards)]
    return reference.exchange(shards, HELD, WANTED, out_dtype=dtype)


def every_plan(rank: int, world_size: int) -> None:
    group = ShardGroup(4, placement="zigzag")
    for name, plan in plans_of(group).items():
        for step in range(2):
            shards = [random_values((n, 3), torch.bfloat16, 10 * step + r) for r, n in enumerate(LENGTHS)]
            mine = [
                torch.cat([shards[v], torch.full((1, 3), torch.nan, dtype=torch.bfloat16)]) for v in group.virtual_ranks
            ]
            want = expected_of(name, shards, torch.bfloat16)
            want = want if len(want) == 1 else [want[v] for v in group.virtual_ranks]
            got = plan(mine)
            assert isinstance(got, list) == (name in ("reduce_scatter", "exchange"))
            outs = [torch.full_like(w, torch.nan) for w in want]
            given = outs if isinstance(got, list) else outs[0]
            assert plan(mine, out=given) is given
            wide = [torch.full((2, *w.shape), torch.nan, dtype=w.dtype).transpose(0, -1)[..., 0].mT for w in want]
            strided = wide if isinstance(got, list) else wide[0]
            assert plan(mine, out=strided) is strided
            for results in (got, plan.start(mine).wait(), given, strided, plan.start(mine, out=given).wait()):
                for a, b in zip(results if isinstance(results, list) else [results], want):
                    assert_same(a.contiguous(), b)
    if world_size > 1:
        assert plan.stats().sent + plan.stats().received > 0 and "bytes" in str(plan.explain())


def test_every_collective_has_plans() -> None:
    every_plan(0, 1)
    run_processes(every_plan, 3)


def test_the_collectives_use_the_plan_that_is_held() -> None:
    group = ShardGroup(4)
    plan = plans_of(group)["all_gather"]
    assert plans_of(group)["all_gather"] is plan
    x = [torch.ones(n, 3, dtype=torch.bfloat16) for n in LENGTHS]
    assert_same(group.all_gather(x, LENGTHS), plan(x))
    assert len(group._planner._plans) == 4


def test_the_adjoint_is_the_exchange_swapped() -> None:
    group = ShardGroup(4)
    grads = [random_values((e - b, 3), torch.float32, r) for r, (b, e) in enumerate(WANTED)]
    plan = plans_of(group, torch.float32)["exchange"]
    for got, want in zip(plan.adjoint(grads), reference.exchange_adjoint(grads, HELD, WANTED, dtype=torch.float32)):
        assert_same(got, want)
    x = [random_values((e - b, 3), torch.float32, 9 + r) for r, (b, e) in enumerate(HELD)]
    for a, b in zip(plan.adjoint.adjoint(x), plan(x)):
        assert_same(a, b)


def test_a_plan_with_device_lengths() -> None:
    group = ShardGroup(4)
    plan = group.plan("all_reduce", s_max=SIZE, size=SIZE, row_shape=(3,), dtype=torch.float32)
    x = random_values((4, SIZE, 3), torch.float32, 1)
    for lengths in (LENGTHS, [7, 7, 0, 1]):
        want = reference.ragged_sum([s[:n] for s, n in zip(x, lengths)], [0] * 4, SIZE, out_dtype=torch.float32)
        assert_same(plan(x, lengths=torch.tensor(lengths)), want)
        assert_same(plan.start(list(x), lengths=torch.tensor(lengths)).wait(), want)
    leaf = x.clone().requires_grad_()
    plan(leaf, lengths=torch.tensor(LENGTHS)).sum().backward()
    assert leaf.grad[..., 0].tolist() == [[float(j < n) for j in range(SIZE)] for n in LENGTHS]
    with pytest.raises(ValueError, match="lengths: hosted shard 2 has 99"):
        plan(x, lengths=torch.tensor([1, 1, 99, 1]))
    with pytest.raises(ValueError, match="lengths: this plan takes device lengths"):
        plan(x)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda g: g.plan("broadcast", LENGTHS), "collective: expected one of all_reduce"),
        (lambda g: g.plan("all_reduce", [1, 2]), "lengths: 2 values for 4 virtual ranks"),
        (lambda g: g.plan("all_reduce", LENGTHS, size=6), "lengths: virtual rank 2 has 7, beyond size 6"),
        (lambda g: g.plan("all_reduce"), "lengths: a plan takes R ints"),
        (lambda g: g.plan("all_reduce", LENGTHS, splits=[7, 0, 0, 0]), "splits: all_reduce takes no such argument"),
        (lambda g: g.plan("all_reduce", LENGTHS, scale="x"), "scale: expected a float"),
        (lambda g: g.plan("all_reduce", s_max=4), "size: required"),
        (lambda g: g.plan("all_reduce", LENGTHS, dtype=torch.complex64), "dtype torch.complex64 cannot be summed"),
        (lambda g: g.plan("all_gather", LENGTHS, name=3), "name: expected a str"),
        (lambda g: g.plan(["all_gather"], LENGTHS), "collective: expected one of"),
        (lambda g: g.plan("reduce_scatter", LENGTHS, grad="identity"), "grad: reduce_scatter takes no such argument"),
        (lambda g: g.plan("all_gather", LENGTHS, dtype="float32"), "dtype: expected a torch.dtype, got 'float32'"),
        (lambda g: g.plan("all_gather", LENGTHS, row_shape=3), "row_shape: expected a tuple of ints.*got 3"),
        (lambda g: g.plan("all_gather", LENGTHS, row_shape=(2.0,)), r"row_shape: .*got \(2.0,\)"),
        (lambda g: g.plan("all_gather", LENGTHS, row_shape=(-1,)), r"row_shape: .*got \(-1,\)"),
        (lambda g: g.plan("all_reduce", s_max=True, size=4), "s_max: expected an int, at least 0, got True"),
        (lambda g: g.plan("all_reduce", s_max=-1, size=4), "s_max: expected an int, at least 0, got -1"),
        (lambda g: g.plan("all_reduce", LENGTHS, s_max=9, size=9), "lengths: a plan takes R ints, or s_max"),
        (
            lambda g: g.plan("exchange", LENGTHS, in_intervals=HELD, out_intervals=WANTED, size=7),
            "lengths: an exchange takes in_intervals",
        ),
        (
            lambda g: g.plan("exchange", in_intervals=HELD, out_intervals=WANTED, size=6),
            "in_intervals: virtual rank 2",
        ),
    ],
)
def test_what_a_plan_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ShardGroup(4))


def test_what_a_plan_does_not_take() -> None:
    group = ShardGroup(4)
    plan = plans_of(group)["reduce_scatter"]
    x = [torch.ones(n, 3, dtype=torch.bfloat16) for n in LENGTHS]
    outs = [torch.empty(n, 3, dtype=torch.bfloat16) for n in (2, 2, 2, 1)]
    overlapping = torch.empty(7, 3, dtype=torch.bfloat16)
    for shards, out, message in (
        (x[:3], None, "shards: 3 shards"),
        ([*x[:3], x[3].float()], None, "dtype"),
        ([*x[:3], x[3][:1]], None, "lengths: virtual rank 3 has 2, but its shard holds 1 rows"),
        ([s[:, :2] for s in x], None, "trailing shape"),
        (x, outs[0], "out: expected a list of 4 Tensors"),
        (x, outs[:3], "out: expected a list of 4 Tensors"),
        (x, [*outs[:3], outs[0]], r"out: torch.bfloat16 \(2, 3\) on cpu, but the result is torch.bfloat16 \(1, 3\)"),
        (x, [overlapping[:2], overlapping[1:3], *outs[2:]], "out: two of its Tensors share memory"),
        (x, [*outs[:3], x[3][:1]], "out: shares memory with the shards"),
        ([s.requires_grad_(False).clone().requires_grad_() for s in x], outs, "out: not possible where gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(shards, out=out)
        assert len(plan(x)) == 4


def calls_of_another_name(rank: int, world_size: int) -> str:
    group = ShardGroup(2, timeout=3)
    with pytest.raises(ValueError, match="name differs") as caught:
        group.all_reduce([torch.ones(2)], [2, 2], name=f"step {rank}")
    return str(caught.value)


def test_a_name_is_part_of_what_processes_compare() -> None:
    messages = run_processes(calls_of_another_name, 2)
    assert messages[0] == messages[1] and "process 0 has step 0, process 1 has step 1" in messages[0]


# Derivatives


def second_derivatives(rank: int, world_size: int) -> list[torch.Tensor]:
    """Of sums that every process has, by every form of lengths, and of all_gather."""
    group, results = ShardGroup(4), []
    hosted = group.virtual_ranks
    lengths = [3, 2, 3, 0]
    local = torch.tensor([lengths[v] for v in hosted])
    padded = [torch.arange(3.0) + 1 + v for v in hosted]
    forms: list[Any] = [
        (1, lambda x: group.all_reduce(x, lengths, size=3)),
        (1, lambda x: group.all_reduce(x, lengths, size=3, op="mean", scale=0.3)),
        (1, lambda x: group.all_reduce([s[: lengths[v]] for s, v in zip(x, hosted)], size=3)),
        (1, lambda x: group.all_reduce(x, local, size=3, scale=0.7)),
        (1, lambda x: group.all_gather(x, lengths, grad="identity")),
        (world_size, lambda x: group.all_gather(x, lengths, grad="sum")),
    ]
    for parts, form in forms:  # with grad="sum" each process's loss is its own part of the whole
        x = [p.clone().requires_grad_() for p in padded]
        q = torch.autograd.grad((form(x) ** 3).sum() / parts, x, create_graph=True)
        (form([t**2 for t in q]).sum() / parts).backward()
        results.append([t.grad for t in x])
    y = group.all_gather(torch.cat([torch.stack(r) for r in results], 1).unbind(0) if len(hosted) > 1 else
                         [torch.cat([r[0] for r in results])])  # fmt: skip
    return [y]


@pytest.mark.parametrize("world_size", [2, 4])
def test_second_derivatives_have_the_bits_of_the_emulation(world_size: int) -> None:
    (alone,) = second_derivatives(0, 1)
    for (result,) in run_processes(second_derivatives, world_size):
        assert_same(result.reshape(-1), alone.reshape(-1))


def forces(rank: int, world_size: int) -> float:
    group = ShardGroup(2)
    x = [torch.tensor([1.0 + v], requires_grad=True) for v in group.virtual_ranks]
    q = torch.autograd.grad((group.all_reduce(x, [1, 1]) ** 3).sum(), x, create_graph=True)
    group.all_reduce([t**2 for t in q], [1, 1]).sum().backward()
    return float(x[0].grad)


def test_the_second_derivative_of_a_cube() -> None:
    """y = 3, q_v = 27 for both: d/dx of sum q^2 is 2 (2 x 27) (6 x 3) = 1944."""
    assert forces(0, 1) == 1944
    assert run_processes(forces, 2) == [1944, 1944]


def recomputed(rank: int, world_size: int) -> list[float]:
    """Only one process saves what its loss needs: all must run the checkpointed region again, or none."""
    group = ShardGroup(2, timeout=5)
    x = torch.tensor([1.0 + rank], requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = group.all_gather([x], [1, 1])
        return y * y if rank == 0 else y

    checkpoint(region, x, use_reentrant=False).sum().backward()
    return x.grad.tolist()


def test_collectives_in_checkpointed_regions_stay_in_step() -> None:
    assert run_processes(recomputed, 2) == [[3.0], [5.0]]


def test_torch_func() -> None:
    group = ShardGroup(4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (group.all_reduce(list(x), [3, 2, 0, 1], size=3) ** 2).sum()

    x = torch.arange(12.0).view(4, 3)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert_same(torch.func.grad(loss)(x), leaf.grad)
    for transformed, argument in (
        (torch.func.jacrev(loss), x),
        (torch.func.hessian(loss), x),
        (torch.func.vmap(loss), x[None]),
        (torch.func.jacfwd(loss), x),
    ):
        with pytest.raises(Exception, match=r"vmap|forward-mode"):
            transformed(argument)
    y = group.all_gather(list(leaf), [3, 2, 0, 1])
    with pytest.raises(ValueError, match="cannot be batched by vmap"):
        torch.autograd.grad(y, leaf, torch.eye(6), is_grads_batched=True, retain_graph=True)
    assert_same(torch.func.grad(loss)(x), leaf.grad)


def test_a_compiled_plan() -> None:
    torch._dynamo.reset()
    group = ShardGroup(4)
    plans = plans_of(group, torch.float32)

    def step(x: list[torch.Tensor]) -> torch.Tensor:
        parts = [*plans["reduce_scatter"](x), *plans["exchange"](held(x)), plans["all_reduce"](x)]
        return sum((p * p).sum() for p in parts) + plans["all_gather"](x).sum()

    def held(x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [s[: e - b] for s, (b, e) in zip(x, HELD)]

    x = [random_values((7, 3), torch.float32, r).nan_to_num(1.0, 2.0, 3.0).requires_grad_() for r in range(4)]
    want = torch.autograd.grad(step(x), x)
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), x)
    for a, b in zip(got, want):
        assert_same(a, b)


def test_intervals_of_terms() -> None:
    group = ShardGroup(4)
    plan = group.plan("reduce_scatter", LENGTHS, size=SIZE, dtype=torch.float32)
    assert plan.terms.sinks == tuple(intervals_of([2, 2, 2, 1])) and [n for _, n in plan.bounds] == LENGTHS


def closed_groups(rank: int, world_size: int) -> None:
    """A closed group and its plans raise; the next one works; descriptors do not grow."""
    held = []
    for _ in range(6):
        with ShardGroup(2) as group:
            plan = group.plan("all_reduce", [1, 1])
            assert plan([torch.ones(1)]).tolist() == [2.0]
            again = ShardGroup(2)
            assert again.all_reduce([torch.ones(1)], [1, 1]).tolist() == [2.0]
            again.close()
            again.close()
        with pytest.raises(RuntimeError, match="this group was closed"):
            plan([torch.ones(1)])
        with pytest.raises(RuntimeError, match="this group was closed"):
            group.all_gather([torch.ones(1)], [1, 1])
        with pytest.raises(RuntimeError, match="this group was closed"):
            group.check()
        gc.collect()
        held.append(len(os.listdir("/proc/self/fd")))
    assert held[-1] <= held[2], held


def test_closed_groups() -> None:
    run_processes(closed_groups, 2)
    with ShardGroup(2) as group:
        assert group.all_reduce([torch.ones(1)] * 2, [1, 1]).tolist() == [2.0]
    with pytest.raises(RuntimeError, match="this group was closed"):
        group.all_reduce([torch.ones(1)] * 2, [1, 1])
    with pytest.raises(ValueError, match="workspace_bytes: expected a positive int, got 0"):
        ShardGroup(2, workspace_bytes=0)


def wrapped_shards(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group, mesh = ShardGroup(2), init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="is a DTensor, which wraps other tensors") as caught:
        group.all_reduce(sharded if rank == 1 else torch.ones(2), [2, 2])
    assert group.all_reduce(sharded.to_local(), [2, 2]).tolist() == [2.0, 2.0]
    return str(caught.value)


def test_a_wrapped_shard_is_refused_on_every_process() -> None:
    first, second = run_processes(wrapped_shards, 2)
    assert first == second


def _profiled(rank: int, world_size: int) -> list[str]:
    group = ShardGroup(4, transport="gather")
    plan = group.plan("reduce_scatter", LENGTHS, row_shape=(3,), dtype=torch.float32, name="loss")
    shards = [torch.ones(LENGTHS[v], 3, requires_grad=True) for v in group.virtual_ranks]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.cat(plan(shards)).sum().backward()
        with torch.no_grad():
            group.all_gather(shards, LENGTHS)
            group.all_gather(shards, LENGTHS, async_op=True).wait()
            torch.compile(plan, fullgraph=True, backend="eager")(shards)
    sent = [plan.explain().route.egress[rank], plan.adjoint.explain().route.egress[rank]]
    return [*map(str, sent), *sorted(e.key for e in profile.events() if e.key.startswith("shardsum."))]


@pytest.mark.parametrize("processes", [1, 2])
def test_profiles_name_collective_transport_and_bytes(processes: int) -> None:
    transport = "local" if processes == 1 else "gather"
    for forward, backward, *found in run_processes(_profiled, processes):
        gathers = [name for name in found if name.startswith(f"shardsum.all_gather ({transport}, sends ")]
        assert len(gathers) == 2 and (forward != "0") == (processes > 1)
        assert [name for name in found if name not in gathers] == [
            f"shardsum.backward of reduce_scatter 'loss' ({transport}, sends {backward} bytes)",
            f"shardsum.reduce_scatter 'loss' ({transport}, sends {forward} bytes)",
            f"shardsum.reduce_scatter 'loss' ({transport}, sends {forward} bytes)",
        ]
