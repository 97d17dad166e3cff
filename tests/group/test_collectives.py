"""What single collectives of a group promise beyond the sums: movement, layouts, overlap, handles, errors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from shardsum import ShardGroup
from shardsum.group.construction import refuse_shared_gpu
from tests.processes import run_processes
from tests.values import B0_LENGTHS, B0_SUM, assert_same, b0, random_values


def strides(rank: int, world_size: int, transport: str) -> None:
    """Inputs in other memory, and the expanded gradient of a following sum."""
    group = ShardGroup(4, transport=transport)
    x = [random_values((6, 5, 4), torch.float32, v).nan_to_num(1.0, 2.0, 3.0) for v in range(4)]
    whole = group.all_reduce([x[v] for v in group.virtual_ranks], B0_LENGTHS)
    local = torch.tensor([B0_LENGTHS[v] for v in group.virtual_ranks])
    for change in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.stack([t, t * 0], 1).flatten(0, 1)[::2],
        lambda t: torch.stack([t, t * 0], 2).flatten(1, 2)[:, ::2],
        lambda t: t.flip(0).flip(0),
        lambda t: torch.complex(t, -t).conj().imag,  # a sign that torch has not written yet
    ):
        mine = [change(x[v]) for v in group.virtual_ranks]
        assert_same(group.all_reduce(mine, B0_LENGTHS), whole)
        if transport != "all_to_all" or world_size == 1:
            assert_same(group.all_reduce(mine, local, size=6), whole)
    for lengths in (B0_LENGTHS, local) if transport == "gather" or world_size == 1 else (B0_LENGTHS,):
        mine = [x[v].clone().requires_grad_() for v in group.virtual_ranks]
        group.all_reduce(mine, lengths, size=6).sum().backward()
        for v, t in zip(group.virtual_ranks, mine):
            valid = torch.arange(6)[:, None, None] < B0_LENGTHS[v]
            assert_same(t.grad, valid.float().expand(6, 5, 4))


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_memory_layouts_and_expanded_gradients(transport: str) -> None:
    strides(0, 1, "auto")
    run_processes(strides, 3, transport)


def test_exchange_gradient_adds_in_rank_order() -> None:
    group = ShardGroup(5)
    x = [torch.zeros(1, requires_grad=True)] + [torch.zeros(0, requires_grad=True) for _ in range(4)]
    outs = group.exchange(x, [(0, 1)] + [(0, 0)] * 4, [(0, 1)] * 5, size=1)
    torch.autograd.backward(outs, [torch.tensor([g]) for g in (1e8, 1.0, -1e8, 1.0, 3.0)])
    assert x[0].grad.item() == 4.0


def replicated_gradient(rank: int, world_size: int, grad: str) -> float:
    group = ShardGroup(2)
    x = [torch.ones(1, requires_grad=True) for _ in group.virtual_ranks]
    group.all_reduce(x, [1, 1], grad=grad).sum().backward()
    return x[0].grad.item()


def test_the_meaning_of_a_replicated_gradient_is_the_callers() -> None:
    assert run_processes(replicated_gradient, 2, "identity") == [1.0, 1.0]
    assert run_processes(replicated_gradient, 2, "sum") == [2.0, 2.0]


def token_means(rank: int, world_size: int) -> None:
    if world_size < 4:
        small = ShardGroup(2)
        sums = [torch.tensor(2.0 - 2 * v, requires_grad=True) for v in small.virtual_ranks]
        small.token_mean(sums, [1 - v for v in small.virtual_ranks])[0].backward()
        # One valid token in all, of rank 0: whatever R. The other rank's loss does not count, even NaN.
        assert [x.grad.item() for x in sums] == [1.0 - v for v in small.virtual_ranks]
        broken = [torch.tensor(float("nan") if v else 5.0, requires_grad=True) for v in small.virtual_ranks]
        mean, count = small.token_mean(broken, [1 - v for v in small.virtual_ranks])
        mean.backward()
        assert (mean.item(), count.item()) == (5.0, 1)
        assert [x.grad.item() for x in broken] == [1.0 - v for v in small.virtual_ranks]
    group = ShardGroup(4)

    def mean(sums: list, counts: list) -> tuple:
        losses = [torch.tensor(float(sums[v]), requires_grad=True) for v in group.virtual_ranks]
        value, count = group.token_mean(losses, [torch.tensor(counts[v]) for v in group.virtual_ranks])
        value.backward()
        return value.item(), count.item(), [x.grad.item() for x in losses]

    def of(values: list) -> list:
        return [values[v] for v in group.virtual_ranks]

    assert mean([4, 3, 0, 0], [1, 3, 0, 0]) == (1.75, 4, of([0.25, 0.25, 0.0, 0.0]))
    assert mean([2, 0, 0, 0], [1, 0, 0, 0]) == (2.0, 1, of([1.0, 0.0, 0.0, 0.0]))
    assert mean([0] * 4, [0] * 4) == (0.0, 0, of([0.0] * 4))
    assert mean([1] * 4, [2**24 + 1, 0, 0, 0])[1] == 16777217


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_token_mean(world_size: int) -> None:
    if world_size == 1:
        token_means(0, 1)
    else:
        run_processes(token_means, world_size)


def test_counts_and_ranks_may_be_numbers_of_numpy() -> None:
    group = ShardGroup(2)
    assert group.token_mean([torch.tensor(3.0)] * 2, [np.int64(1), np.uint8(2)])[1].item() == 3
    assert group.positions(np.int32(1)) == (0, 1)


def test_counts_are_exact_integers() -> None:
    group = ShardGroup(64)
    losses = [torch.tensor(1.0)] * 64
    _, count = group.token_mean(losses, [torch.tensor(608 + r) for r in range(64)])
    assert count.dtype == torch.int64 and count.item() == 40928


def movement(rank: int, world_size: int, transport: str) -> None:
    group = ShardGroup(4, transport=transport)
    bits_in = torch.tensor([-(2**31), 0x7FC12345, -1, 7], dtype=torch.int32).view(torch.float32)
    shards = [bits_in[:2], bits_in[2:3], bits_in[3:], bits_in[:1]]
    out = group.all_gather([shards[v] for v in group.virtual_ranks])
    assert out.view(torch.int32).tolist() == torch.cat(shards).view(torch.int32).tolist()
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex64):
        parts = [torch.tensor([1, 0, 1][: r + 1]).to(dtype) for r in range(3)] + [torch.empty(0, dtype=dtype)]
        out = group.all_gather([parts[v] for v in group.virtual_ranks])
        assert out.dtype == dtype and out.to(torch.complex64).tolist() == [1, 1, 0, 1, 0, 1]
    lazy = [torch.tensor([v + 1j]).conj() for v in range(4)]  # a sign that torch has not written yet
    assert group.all_gather([lazy[v] for v in group.virtual_ranks]).tolist() == [-1j, 1 - 1j, 2 - 1j, 3 - 1j]


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_all_gather_keeps_bits_in_any_dtype(transport: str) -> None:
    run_processes(movement, 3, transport)
    movement(0, 1, "auto")


def two_groups(rank: int, world_size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
        ShardGroup(4, mesh)
    group = ShardGroup(4, mesh["sp"])
    assert (group.rank, group.world_size) == (rank % 2, 2)
    x = [torch.full((2,), 10.0 * (rank // 2) + v, requires_grad=True) for v in group.virtual_ranks]
    out = group.all_reduce(x, [2, 2, 1, 1], grad="sum")
    assert out.tolist() == [6.0 + 40 * (rank // 2), 1.0 + 20 * (rank // 2)]
    (out * (1 + rank)).sum().backward()
    both = [1 + r for r in range(4) if r // 2 == rank // 2]
    assert x[0].grad[0] == sum(both)
    dist.barrier()


def test_two_groups_in_one_world() -> None:
    run_processes(two_groups, 4)


def overwrite(rank: int, world_size: int) -> None:
    group = ShardGroup(4, transport="all_to_all")
    for step in range(5):
        x = [torch.full((6,), float(v + step)) for v in group.virtual_ranks]
        out = group.all_reduce(x, B0_LENGTHS)
        for t in x:
            t.fill_(float("nan"))
        del x
        handle = group.all_reduce([torch.full((6,), float(v)) for v in group.virtual_ranks], B0_LENGTHS, async_op=True)
        covering = [[v for v in range(4) if j < B0_LENGTHS[v]] for j in range(6)]
        assert out.tolist() == [sum(v + step for v in ranks) for ranks in covering]
        assert handle.wait().tolist() == [sum(ranks) for ranks in covering]


def test_inputs_may_be_overwritten_after_the_call_and_freed_before_the_wait() -> None:
    run_processes(overwrite, 2)


def waits_in_another_order(rank: int, world_size: int) -> None:
    """Handles of two groups wait in an order that differs between processes, late, twice or never."""
    group, other = (ShardGroup(2, transport="all_to_all", timeout=20) for _ in range(2))
    x = [torch.full((6,), 10.0**i) for i in range(4)]
    handles = [(other if i == 1 else group).all_reduce(t, [6, 6], async_op=True) for i, t in enumerate(x)]
    for i in (0, 1, 2) if rank else (2, 0, 1):  # and 3 is left alone
        for _ in range(2):
            assert handles[i].wait().tolist() == [2 * 10.0**i] * 6
    del handles
    for _ in range(2):
        assert group.all_reduce(x[1], [6, 6]).tolist() == [20.0] * 6
    handle = group.all_reduce(x[0], [6, 6], async_op=True)
    early = handle.wait() if rank else None
    assert group.all_gather(x[2], [6, 6]).tolist() == [100.0] * 12
    late = handle.wait() if early is None else early
    assert late.tolist() == [2.0] * 6


def test_the_order_of_waits_changes_nothing() -> None:
    run_processes(waits_in_another_order, 2)


def test_async_refuses_inputs_that_require_grad() -> None:
    with pytest.raises(ValueError, match="async_op"):
        ShardGroup(2).all_reduce([torch.ones(1, requires_grad=True)] * 2, async_op=True)


def test_results_have_storage_of_their_own() -> None:
    group = ShardGroup(2)
    x = [torch.ones(3), torch.ones(3)]
    outs = group.exchange(x, [(0, 3), (3, 6)], [(0, 3), (3, 6)], size=6)
    pointers = {t.untyped_storage().data_ptr() for t in (*x, *outs)}
    assert len(pointers) == 4


BAD = [
    (lambda g: g.all_reduce([torch.ones(2)] * 3), "3 shards, but this process hosts 4"),
    (lambda g: g.all_reduce([torch.ones(2)] * 5), "5 shards, but this process hosts 4"),
    (lambda g: g.all_reduce(torch.ones(3, 2)), r"hosts 4 virtual ranks"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, [1, 2, 3, 1]), "virtual rank 2 has 3, but its shard holds 2"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, [1, 2, -3, 1]), "virtual rank 2 has -3"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, [1, 2, 1]), "3 values for 4 virtual ranks"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, size=1), "virtual rank 0 has 2, beyond size 1"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, [1.0] * 4), "lengths: expected 4 ints"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, torch.tensor([[1, 1, 1, 1]])), "lengths: shape"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, out=torch.ones(3)), r"^out: 3 rows, but the result has 2"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, grad="mean"), 'grad: expected "identity"'),
    (lambda g: g.all_reduce([torch.ones(2, dtype=torch.complex64)] * 4), "cannot be summed"),
    (lambda g: g.all_reduce([torch.ones(2).int()] * 4, op="mean"), "mean of torch.int32"),
    (lambda g: g.reduce_scatter([torch.ones(2)] * 4, splits=[1, 1, 1, 0]), "sum to 3, but size is 2"),
    (lambda g: g.reduce_scatter([torch.ones(2)] * 4, splits=[3, 0, 0, -1]), "splits: virtual rank 3 has -1"),
    (lambda g: g.exchange([torch.ones(2)] * 4, [(0, 2)] * 4, [(0, 3)] * 4, size=2), r"out_intervals: virtual rank 0"),
    (lambda g: g.exchange([torch.ones(2)] * 4, [(0, 2)] * 3, [(0, 2)] * 4, size=2), "3 intervals for 4"),
    (lambda g: g.exchange([torch.ones(1)] * 4, [(0, 2)] * 4, [(0, 2)] * 4, size=2), "its shard holds 1 rows"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, [True, False, True, True]), "lengths: expected 4 ints"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, torch.ones(4, dtype=torch.int64, device="meta"), size=2),
     "lengths: on meta, but the shards are on cpu"),
    (lambda g: g.all_reduce([torch.ones(2)] * 4, out=torch.empty(1).expand(2)), r"^out: is expanded"),
    (lambda g: g.all_gather([torch.ones(2)] * 4, out=torch.empty(1).expand(8)), r"^out: is expanded"),
    (lambda g: g.reduce_scatter([torch.ones(2)] * 4, splits=[True] * 4), "splits: expected 4 ints"),
    (lambda g: g.exchange([torch.ones(2)] * 4, [(False, True)] * 4, [(0, 2)] * 4, size=2), "in_intervals of virtual"),
    (lambda g: g.positions(True), "virtual_rank: expected 0 to .*, got True"),
    (lambda g: g.token_mean([torch.ones(())] * 4, [True] * 4), "num_valid: virtual rank 0 has True"),
    (lambda g: g.token_mean([torch.ones(())] * 4, [torch.tensor(True)] * 4), "num_valid: virtual rank 0 has .*bool"),
    (lambda g: ShardGroup(2, timeout=True), "timeout: expected seconds"),
    (lambda g: g.token_mean([torch.ones(())] * 3, [1] * 4), "loss_sum: 3 values"),
    (lambda g: ShardGroup(), "a lone process cannot guess R"),
    (lambda g: ShardGroup(0), "num_virtual_ranks: expected an int between 1 and 65536, got 0"),
    (lambda g: ShardGroup(2, transport="pigeon"), "transport: expected"),
    (lambda g: ShardGroup(2, check="never"), "check: expected"),
    (lambda g: ShardGroup(2, timeout=-1), "timeout"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_input_is_named(call, message: str) -> None:
    group = ShardGroup(4)
    with pytest.raises(ValueError, match=message):
        call(group)
    assert group.all_reduce(list(b0()), B0_LENGTHS).tolist() == B0_SUM


def test_two_processes_on_one_gpu_are_offered_virtual_ranks() -> None:
    refuse_shared_gpu([["host", "gpu 0"], ["other", "gpu 0"], None, None])
    with pytest.raises(ValueError, match=r"processes 0 and 2 use the same GPU gpu 0 of host.*several virtual ranks"):
        refuse_shared_gpu([["host", "gpu 0"], ["host", "gpu 1"], ["host", "gpu 0"]])


def test_a_launcher_without_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardGroup(4)


def test_a_group_says_why_it_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="a ShardGroup cannot be pickled"):
        pickle.dumps(ShardGroup(4))


def test_autograd_notices_that_all_reduce_overwrote_out() -> None:
    out, weight = torch.ones(6), torch.ones(6, requires_grad=True)
    loss = (out * weight).sum()  # saves out
    ShardGroup(4).all_reduce(list(b0()), B0_LENGTHS, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_out_with_lazy_signs_receives_the_values() -> None:
    group, out = ShardGroup(4), torch._neg_view(torch.full((6,), 7.0))
    assert group.all_reduce(list(b0()), B0_LENGTHS, size=6, out=out) is out and out.tolist() == B0_SUM
    rows = [torch.tensor([complex(r, 1)]) for r in range(4)]
    out = torch.zeros(4, dtype=torch.complex64).conj()
    assert group.all_gather(rows, [1] * 4, out=out) is out and out.tolist() == [complex(r, 1) for r in range(4)]
