"""Carried sums have the bits of the definition, in processes that each belong to a declared domain."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardsum.core import bits, reference
from shardsum.core.layout import ExchangePlan, length, owners_of
from shardsum.core.numerics import accumulator_dtype, resolve_out_dtype
from shardsum.group.executor import Reduce
from shardsum.native import loader as native
from shardsum.transports import TaggedWire, carry, stamp
from shardsum.transports.carry_plan import ACCUMULATORS, RESULTS, ROWS, CarryPlan
from tests.processes import run_processes
from tests.values import FLOATS, INTEGERS, random_values


def problem(seed: int, world: int) -> tuple[CarryPlan, torch.dtype, Reduce, tuple[int, ...]]:
    rng = random.Random(seed)
    ranks, size = rng.choice([world, 5, 8, 16]), rng.choice([1, 7, 40])
    ranks = max(ranks, world)

    def interval() -> tuple[int, int]:
        begin = rng.randint(0, size)
        return begin, rng.randint(begin, size)

    placement = rng.choice(["contiguous", "zigzag", None])
    owners = owners_of(
        ranks, world, placement or rng.sample([*range(world), *rng.choices(range(world), k=ranks - world)], ranks)
    )
    sources = tuple((0, size) if rng.random() < 0.3 else interval() for _ in range(ranks))
    shape = rng.choice(["all", "scatter", "any"])
    if shape == "all":
        sinks, sink_owners = ((0, size),) * world, tuple(range(world))
    else:
        parts = [rng.randint(0, size) for _ in range(ranks - 1)]
        bounds = sorted([0, *parts, size])
        sinks = tuple(zip(bounds, bounds[1:])) if shape == "scatter" else tuple(interval() for _ in range(ranks))
        sink_owners = owners
    count = rng.randint(2, 3)
    domains = (
        tuple(p * count // world for p in range(world))
        if rng.random() < 0.7
        else tuple(rng.randrange(count) for _ in range(world))
    )
    dtype = rng.choice(FLOATS + INTEGERS)
    floating = dtype.is_floating_point
    op = rng.choice(["sum", "mean"]) if floating else "sum"
    scale = rng.choice([None, 0.1, -3.0]) if floating else None
    out_dtype = torch.int64
    if floating:
        out_dtype = torch.float64 if dtype == torch.float64 else rng.choice([dtype, torch.float32])
    assert resolve_out_dtype(dtype, out_dtype) == out_dtype
    plan = CarryPlan(
        ExchangePlan(sources, owners, sinks, sink_owners, world), domains, rng.randint(1, 4), rng.randint(1, 2),
        op == "mean",
    )  # fmt: skip
    return plan, dtype, Reduce(op, scale, out_dtype), rng.choice([(), (3,), (2, 5), (0,), (70,)])


def sums(rank: int, world: int, seeds: list[int]) -> list[str]:
    """The problems whose results differ from the definition."""
    native.load()
    store, limit = dist.PrefixStore("carry", _get_default_store()), timedelta(seconds=30)
    wire, wrong = TaggedWire(dist.ProcessGroupGloo(store, rank, world, limit), limit), []
    for seed in seeds:
        plan, dtype, reduce, features = problem(seed, world)
        exchange = plan.plan
        shards = [random_values((length(i), *features), dtype, seed + r) for r, i in enumerate(exchange.sources)]
        want = reference.exchange(
            shards, exchange.sources, exchange.sinks, op=reduce.op, scale=reduce.scale, out_dtype=reduce.dtype
        )
        mine = [shards[r] for r in exchange.hosted_sources(rank)]
        hosted = exchange.hosted_sinks(rank)
        outs = [torch.full_like(want[q], 77) for q in hosted]
        wire.begin(stamp("sum", {"problem": seed}), seed)
        wire.traffic.sent = wire.traffic.received = 0
        batched = plan.lag == 2 and seed % 2 == 1  # as on NCCL
        for _ in carry.run(carry.Schedule(plan, rank), mine or [shards[0][:0]], outs, reduce, wire, batched):
            pass
        for q, out in zip(hosted, outs):
            if not bits.equal(out, want[q]):
                wrong.append(f"problem {seed}, sink {q}: {bits.first_difference(out, want[q])}")
        width = shards[0].shape[1:].numel()
        sizes = {ROWS: dtype.itemsize, ACCUMULATORS: accumulator_dtype(dtype).itemsize, RESULTS: reduce.dtype.itemsize}
        sent = sum(n * sizes[k] * width for (k, a, _), n in plan.traffic.items() if a == rank)
        if wire.traffic.sent != sent:
            wrong.append(f"problem {seed}: sent {wire.traffic.sent} bytes, predicted {sent}")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_carried_sums_have_the_bits_of_the_definition(world: int) -> None:
    for wrong in run_processes(sums, world, list(range(1000 * world, 1000 * world + 60)), timeout=100):
        assert not wrong, wrong[:5]
