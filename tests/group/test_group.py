"""ShardGroup against the loops of reference.py: the same bits for every number of processes, placement and transport.

Layer 1: R virtual ranks in one process. Layer 2: gloo processes, forked; each child compares with the reference itself.
"""

from __future__ import annotations

import random

import pytest
import torch

import shardsum
from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.core.layout import intervals_of
from shardsum.core.numerics import resolve_out_dtype
from tests.processes import run_processes
from tests.values import B0_LENGTHS, B0_SUM, FLOATS, INTEGERS, assert_same, b0, random_values

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
        if group.world_size > 1 and group.transport == "all_to_all":
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
    if group.world_size > 1 and group.transport == "all_to_all":
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


def chunked(rank: int, world_size: int, transport: str) -> None:
    from shardsum.group import routes

    routes.CHUNK_BYTES = 256
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
        assert "all_to_all" in text and "4 virtual ranks and sends that many rows" in text and "bytes" in text
    assert "rows" not in str(ShardGroup(8).explain([1] * 8)).splitlines()[-1]  # one process sends none


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
