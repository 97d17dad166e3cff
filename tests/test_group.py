"""ShardGroup against the loops of reference.py: the same bits for every number of processes, placement and transport.

Layer 1: R virtual ranks in one process. Layer 2: gloo processes, forked; each child compares with the reference itself.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from processes import run_processes
from values import B0_LENGTHS, B0_SUM, FLOATS, INTEGERS, assert_same, b0, random_values

import shardsum
from shardsum import ShardGroup, bits, membership, reference
from shardsum.layout import intervals_of
from shardsum.numerics import resolve_out_dtype

TRANSPORTS = ["gather", "all_to_all", "auto"]


def placement_of(rng: random.Random, num_ranks: int, world_size: int) -> str | list[int]:
    owners = [*range(world_size), *(rng.randrange(world_size) for _ in range(num_ranks - world_size))]
    rng.shuffle(owners)
    return rng.choice(["contiguous", "zigzag", owners])


def random_problem(rng: random.Random, num_ranks: int) -> dict:
    size = rng.randrange(0, 12)
    pairs = [sorted((rng.randint(0, size), rng.randint(0, size))) for _ in range(2 * num_ranks)]
    dtype = rng.choice(FLOATS if rng.random() < 0.8 else INTEGERS)
    floating = dtype.is_floating_point
    return dict(
        size=size,
        I=[tuple(p) for p in pairs[:num_ranks]],
        O=[tuple(p) for p in pairs[num_ranks:]],
        dtype=dtype,
        op=rng.choice(["sum", "mean"]) if floating else "sum",
        scale=rng.choice([None, 0.3, -2.0]) if floating else None,  # -2 makes the sum of nothing -0.0
        trailing=rng.choice([(), (3,), (2, 4), (0,)]),
        seed=rng.randrange(10**6),
    )


def check_exchange(group: ShardGroup, p: dict) -> None:
    """exchange, its gradient, and its special cases, each against the reference loops."""
    num_ranks, hosted = group.num_virtual_ranks, group.virtual_ranks
    out_dtype = resolve_out_dtype(p["dtype"], None)
    reduce = dict(op=p["op"], scale=p["scale"])

    def values(intervals: list, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        return [random_values((e - b, *p["trailing"]), dtype, seed + r) for r, (b, e) in enumerate(intervals)]

    shards = values(p["I"], p["dtype"], p["seed"])
    mine = [shards[v].clone().to(group.device).requires_grad_(p["dtype"].is_floating_point) for v in hosted]
    outs = group.exchange(mine, p["I"], p["O"], size=p["size"], **reduce)
    expected = reference.exchange(shards, p["I"], p["O"], out_dtype=out_dtype, **reduce)
    for v, out in zip(hosted, outs):
        assert_same(out, expected[v])
    if p["dtype"].is_floating_point:
        grads = values(p["O"], out_dtype, p["seed"] + 100)
        torch.autograd.backward(outs, [grads[v].to(group.device) for v in hosted])
        adjoint = reference.exchange_adjoint(grads, p["I"], p["O"], dtype=p["dtype"], **reduce)
        for v, shard in zip(hosted, mine):
            assert_same(shard.grad, adjoint[v])

    lengths = [e - b for b, e in p["I"]]
    with torch.no_grad():
        data = [m.detach() for m in mine]
        size = p["size"]
        whole = reference.ragged_sum(shards, [0] * num_ranks, size, out_dtype=out_dtype, **reduce)
        assert_same(group.all_reduce(data, lengths, size=size, **reduce), whole)
        assert_same(group.all_reduce(data, None, size=size, **reduce), whole)
        padded = [
            torch.cat([d, random_values((size - d.shape[0], *p["trailing"]), p["dtype"], 9).to(d.device)]) for d in data
        ]
        local = torch.tensor([lengths[v] for v in hosted], device=group.device)
        if group.world_size > 1 and group.engine.transport == "all_to_all":
            with pytest.raises(ValueError, match="cannot take device lengths"):
                group.all_reduce(padded, local, size=size)
        else:
            assert_same(group.all_reduce(padded, local, size=size, **reduce), whole)
            for v, part in zip(hosted, group.reduce_scatter(padded, local, size=size, **reduce)):
                begin = sum(len(c) for c in torch.arange(size).tensor_split(num_ranks)[:v])
                assert_same(part, whole[begin : begin + part.shape[0]])
        splits = [len(c) for c in torch.arange(size).tensor_split(num_ranks)]
        for v, part in zip(hosted, group.reduce_scatter(data, lengths, size=size, **reduce)):
            assert_same(part, whole.split(splits)[v])
        assert_same(group.all_gather(data, lengths), torch.cat(shards))
        assert_same(group.all_gather(data), torch.cat(shards))
        reduced = group.all_reduce(data, lengths, size=size, async_op=True, **reduce)
        gathered = group.all_gather(data, lengths, async_op=True)
        assert_same(reduced.wait(), whole)
        assert_same(gathered.wait(), torch.cat(shards))


def check_gradients(group: ShardGroup, p: dict, grad: str) -> None:
    """Gradients of all_reduce, reduce_scatter and all_gather, with lengths of all forms, against the adjoint loops."""
    num_ranks, size, dtype, trailing = group.num_virtual_ranks, p["size"], p["dtype"], p["trailing"]
    reduce, hosted = dict(op=p["op"], scale=p["scale"]), group.virtual_ranks
    lengths = [e - b for b, e in p["I"]]
    splits = [len(c) for c in torch.arange(size).tensor_split(num_ranks)]
    padded = [random_values((size + 1, *trailing), dtype, p["seed"] + r) for r in range(num_ranks)]

    def check(call, form: str, held: list, wanted: list, cotangents: list, mine: list, **reduce) -> None:
        rows = [padded[v][: lengths[v]] if form == "counted" else padded[v] for v in hosted]
        leaves = [t.clone().to(group.device).requires_grad_() for t in rows]
        values = {"host": lengths, "counted": None, "device": torch.tensor([lengths[v] for v in hosted])}[form]
        outs = call(leaves, values.to(group.device) if form == "device" else values)
        torch.autograd.backward(outs, [t.to(group.device) for t in mine])
        expected = reference.exchange_adjoint(cotangents, held, wanted, dtype=dtype, **reduce)
        if not isinstance(outs, list) and grad == "identity":
            starts = [b for b, _ in held]
            expected = reference.ragged_sum_adjoint(mine[0], starts, lengths, dtype=dtype, **reduce)
        for v, leaf in zip(hosted, leaves):
            assert_same(leaf.grad[: lengths[v]], expected[v])
            assert_same(leaf.grad[lengths[v] :], torch.zeros_like(leaf.grad[lengths[v] :]))

    valid, chunks, all_rows = [(0, n) for n in lengths], intervals_of(splits), intervals_of(lengths)
    forms = ["host", "counted", "device"]
    if group.world_size > 1 and group.engine.transport == "all_to_all":
        forms.remove("device")
    for form in forms:
        whole = [random_values((size, *trailing), dtype, 50 + p) for p in range(group.world_size)]
        check(
            lambda x, n: group.all_reduce(x, n, size=size, grad=grad, **reduce),
            form, valid, [(0, size)] * group.world_size, whole, [whole[group.rank]], **reduce,
        )  # fmt: skip
        parts = [random_values((n, *trailing), dtype, 70 + q) for q, n in enumerate(splits)]
        check(
            lambda x, n: group.reduce_scatter(x, n, size=size, **reduce),
            form, valid, chunks, parts, [parts[v] for v in hosted], **reduce,
        )  # fmt: skip
        if form != "device":
            rows = [random_values((sum(lengths), *trailing), dtype, 90 + p) for p in range(group.world_size)]
            every = [(0, sum(lengths))] * group.world_size
            check(lambda x, n: group.all_gather(x, n, grad=grad), form, all_rows, every, rows, [rows[group.rank]])


def gradients_in_processes(rank: int, world_size: int, transport: str, seed: int, problems: int) -> None:
    rng = random.Random(seed)
    for i in range(problems):
        num_ranks = rng.randint(world_size, 7)
        group = ShardGroup(num_ranks, placement=placement_of(rng, num_ranks, world_size), transport=transport)
        p = random_problem(rng, num_ranks)
        if p["dtype"].is_floating_point:
            check_gradients(group, p, ("identity", "sum")[i % 2])


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_every_collective_equal_the_adjoint_loops(world_size: int, transport: str) -> None:
    if world_size == 1:
        gradients_in_processes(0, 1, "auto", len(transport), 30)
    else:
        run_processes(gradients_in_processes, world_size, transport, world_size, 10)


def exchange_in_processes(
    rank: int, world_size: int, transport: str, seed: int, problems: int, device: str | None = None
) -> None:
    rng = random.Random(seed)
    for _ in range(problems):
        num_ranks = rng.randint(world_size, 9)
        placement = placement_of(rng, num_ranks, world_size)
        group = ShardGroup(num_ranks, placement=placement, transport=transport, device=device)
        for _ in range(2):
            check_exchange(group, random_problem(rng, num_ranks))


@pytest.mark.parametrize("seed", range(15))
def test_one_process_equals_reference(seed: int) -> None:
    exchange_in_processes(0, 1, "auto", seed, 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_equal_reference(world_size: int, transport: str) -> None:
    run_processes(exchange_in_processes, world_size, transport, world_size * 7, 6)


# Chunks, bytes, transports


def chunked(rank: int, world_size: int, transport: str) -> None:
    from shardsum import engine

    engine.CHUNK_BYTES = 256
    group = ShardGroup(5, transport=transport, placement=[2, 0, 1, 0, 1][:5] if world_size > 2 else "contiguous")
    lengths = [37, 5, 0, 64, 21]
    shards = [random_values((n, 3), torch.bfloat16, r) for r, n in enumerate(lengths)]
    mine = [shards[v].to(group.device) for v in group.virtual_ranks]
    for size in (64, 65, 70):
        out = group.all_reduce(mine, lengths, size=size, out_dtype=torch.float32)
        assert_same(out, reference.ragged_sum(shards, [0] * 5, size, out_dtype=torch.float32))
        stats = group.stats()
        assert (stats.sent, stats.received) == (stats.route.egress[rank], stats.route.ingress[rank])
    if transport == "all_to_all":
        assert stats.route.chunks > 1 and stats.route.two_shot
    parts = group.reduce_scatter(mine, lengths, splits=[10, 0, 30, 4, 20])
    whole = reference.ragged_sum(shards, [0] * 5, 64, out_dtype=torch.bfloat16).split([10, 0, 30, 4, 20])
    for v, part in zip(group.virtual_ranks, parts):
        assert_same(part, whole[v])
    stats = group.stats()
    assert (stats.sent, stats.received) == (stats.route.egress[rank], stats.route.ingress[rank])


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_chunks_and_byte_counts(transport: str) -> None:
    run_processes(chunked, 3, transport)


def bytes_on_the_wire(rank: int, world_size: int) -> tuple[int, int, int]:
    group = ShardGroup(4, transport="all_to_all")
    # Two documents a chunk: what straddles a border is all that travels.
    held = [(0, 10), (10, 20), (20, 30), (30, 40)]
    wanted = [(0, 10), (8, 20), (20, 30), (27, 40)]
    x = [torch.ones(10, 4, dtype=torch.bfloat16)] * len(group.virtual_ranks)
    group.exchange(x, held, wanted, size=40)
    stats = group.stats()
    return stats.total, stats.sent, stats.received


def test_only_what_straddles_a_border_travels() -> None:
    row = 4 * 2  # bytes a position
    results = run_processes(bytes_on_the_wire, 4)
    assert results == [(5 * row, 2 * row, 0), (5 * row, 0, 2 * row), (5 * row, 3 * row, 0), (5 * row, 0, 3 * row)]


def test_explain_names_transport_bytes_and_factor() -> None:
    def explain(rank: int, world_size: int) -> str:
        group = ShardGroup(8, costs={"cpu": shardsum.transports.costs.Costs(1.0, 1.0, 100.0)})
        small = group.explain([1] * 8)
        large = group.explain([1 << 20] + [0] * 7, row_shape=(64,))
        assert (small.route.transport, large.route.transport) == ("gather", "all_to_all")
        return str(large)

    for text in run_processes(explain, 2):
        assert "all_to_all" in text and "4 virtual ranks" in text and "bytes" in text


# Numerics and gradients that users have hit


def test_base_case_in_emulation() -> None:
    group = ShardGroup(4)
    x = b0()
    assert group.all_reduce(list(x), B0_LENGTHS).tolist() == B0_SUM
    assert group.all_reduce(x, B0_LENGTHS).tolist() == B0_SUM
    assert group.all_reduce([x[r, :n] for r, n in enumerate(B0_LENGTHS)]).tolist() == B0_SUM


def integer_hash(rank: int, world_size: int, num_ranks: int) -> str:
    group = ShardGroup(num_ranks)
    shards = [random_values((7 * (r + 2) % 11, 3), torch.bfloat16, r) for r in range(num_ranks)]
    mine = [shards[v] for v in group.virtual_ranks]
    lengths = [s.shape[0] for s in shards]
    outs = [group.all_reduce(mine, lengths, size=11), group.all_reduce(mine, None, size=11, op="mean")]
    return bits.digest(*outs, group.all_gather(group.reduce_scatter(mine, lengths, size=11)))


@pytest.mark.parametrize("num_ranks, world_sizes", [(8, (2, 4, 8)), (5, (2,)), (6, (4,))])
def test_any_number_of_processes_has_the_bits_of_the_emulation(num_ranks: int, world_sizes: tuple) -> None:
    expected = integer_hash(0, 1, num_ranks)
    for world_size in world_sizes:
        assert run_processes(integer_hash, world_size, num_ranks) == [expected] * world_size


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


def seed_case(rank: int, world_size: int) -> list:
    group = ShardGroup(4)
    x = torch.arange(80.0).view(4, 20) + 1
    lengths = [8, 12, 10, 18]
    out = group.all_reduce([x[v] for v in group.virtual_ranks], lengths, size=20)
    for j in range(20):
        assert out[j] == sum(x[r, j] for r in range(4) if j < lengths[r])
    return out.tolist()


def test_seed_case_for_every_process_count() -> None:
    expected = seed_case(0, 1)
    for world_size in (2, 4):
        assert run_processes(seed_case, world_size) == [expected] * world_size


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
        assert all(x.grad.item() == 1.0 for x in sums)  # one valid token in all: whatever R
    group = ShardGroup(4)

    def mean(sums: list, counts: list) -> tuple:
        losses = [torch.tensor(float(sums[v]), requires_grad=True) for v in group.virtual_ranks]
        value, count = group.token_mean(losses, [torch.tensor(counts[v]) for v in group.virtual_ranks])
        value.backward()
        return value.item(), count.item(), [x.grad.item() for x in losses]

    k = len(group.virtual_ranks)
    assert mean([4, 3, 0, 0], [1, 3, 0, 0]) == (1.75, 4, [0.25] * k)
    assert mean([2, 0, 0, 0], [1, 0, 0, 0]) == (2.0, 1, [1.0] * k)
    assert mean([0] * 4, [0] * 4) == (0.0, 0, [0.0] * k)
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
    (lambda g: g.positions(True), "virtual_rank: True is none"),
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
    membership.refuse_shared_gpu([["host", "gpu 0"], ["other", "gpu 0"], None, None])
    with pytest.raises(ValueError, match=r"processes 0 and 2 use the same GPU gpu 0 of host.*several virtual ranks"):
        membership.refuse_shared_gpu([["host", "gpu 0"], ["host", "gpu 1"], ["host", "gpu 0"]])


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
