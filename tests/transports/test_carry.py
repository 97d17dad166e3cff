"""Carried sums have the bits of the definition, in processes that each belong to a declared domain."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardsum.core import bits, reference
from shardsum.core.layout import ExchangePlan, length, owners_of
from shardsum.core.numerics import Reduce, accumulator_dtype, resolve_out_dtype
from shardsum.native import loader as native
from shardsum.transports import TaggedWire, carry, carry_peers, stamp, watch
from shardsum.transports.carry_plan import ACCUMULATORS, RESULTS, ROWS, CarryPlan
from shardsum.transports.peer.members import gather_in
from shardsum.transports.store import BoundedStore
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


class SlowPeers:
    """What the peer transport of a domain does, by loops over rows that its processes send each other as objects."""

    def __init__(self, members: tuple[int, ...], rank: int) -> None:
        self.rank = members.index(rank)
        store = BoundedStore.clone(_get_default_store(), 30).under(f"inside/{members}")
        self.gather = gather_in(store, self.rank, len(members), 30)

    def prepare(
        self, plan: ExchangePlan, width: int, dtype: torch.dtype, out_dtype: torch.dtype, op: str, scale: float | None,
        signature: int, goes_on: bool,
    ) -> Any:  # fmt: skip
        hosted = plan.hosted_sources(self.rank)

        def call(
            outs: list[torch.Tensor], rows: list[torch.Tensor], bounds: list[int], lengths: None,
            number: int, accumulators: torch.Tensor | None, carried: int, headers: list[torch.Tensor],
        ) -> None:  # fmt: skip
            assert bounds == [0] * (2 * len(hosted)) and number == 77 and lengths is None
            assert [tuple(x.shape) for x in rows] == [(length(plan.sources[r]), width) for r in hosted]
            assert (accumulators is not None) == (goes_on and len(outs) > 0) and all(x.is_contiguous() for x in rows)
            everyone = self.gather((plan.sinks, dict(zip(hosted, rows))))
            assert {sinks for sinks, _ in everyone} == {plan.sinks}
            held = {r: x for _, given in everyone for r, x in given.items()}
            done = 0
            for q, out in zip(plan.hosted_sinks(self.rank), outs, strict=True):
                begin, end = plan.sinks[q]
                starts_here = [plan.sources[r][0] - begin for r in sorted(held)]
                carry = None if accumulators is None else accumulators[done : done + end - begin]
                done += end - begin
                total = reference.ragged_sum(
                    [held[r] for r in sorted(held)], starts_here, end - begin, op=op, scale=scale, out_dtype=out_dtype,
                    carry=carry, carried=carried,
                )  # fmt: skip
                out.copy_(total)
            assert accumulators is None or done == accumulators.shape[0]

        return call

    def bounds(self, plan: ExchangePlan) -> list[int]:
        return [0] * (2 * len(plan.hosted_sources(self.rank)))


def sums(rank: int, world: int, seeds: list[int], together: bool) -> list[str]:
    """The problems whose results differ from the definition. ``together``: domains fold over (slow) peer memory."""
    domains: dict[tuple[int, ...], SlowPeers] = {}
    native.load()
    store, limit = dist.PrefixStore("carry", _get_default_store()), timedelta(seconds=30)
    board = watch.Board(BoundedStore.clone(store, 30), range(world), rank)
    group, wrong = dist.ProcessGroupGloo(store, rank, world, limit), []
    wire = TaggedWire(group, limit, "carry", board, lambda step: None, lambda step, verdict: None)
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
        wire.sent = wire.received = 0
        shared, launches = plan.members[plan.domains[rank]], None
        if together and len(shared) > 1 and shards[0].shape[1:].numel():
            if shared not in domains:
                domains[shared] = SlowPeers(shared, rank)
            width = shards[0].shape[1:].numel()
            launches = carry_peers.launches_of(plan, rank, domains[shared], width, dtype, reduce, seed)
        schedule = carry.Schedule(plan, rank, rows=not together)
        call = carry.CarriedCall(schedule, mine or [shards[0][:0]], outs, reduce, wire, launches, 77)
        for _ in call.steps():
            pass
        for q, out in zip(hosted, outs):
            if not bits.equal(out, want[q]):
                wrong.append(f"problem {seed}, sink {q}: {bits.first_difference(out, want[q])}")
        width = shards[0].shape[1:].numel()
        sizes = {ROWS: dtype.itemsize, ACCUMULATORS: accumulator_dtype(dtype).itemsize, RESULTS: reduce.dtype.itemsize}
        kinds = (ACCUMULATORS, RESULTS) if together else (ROWS, ACCUMULATORS, RESULTS)
        sent = sum(n * sizes[k] * width for (k, a, _), n in plan.traffic.items() if a == rank and k in kinds)
        if wire.sent != sent:
            wrong.append(f"problem {seed}: sent {wire.sent} bytes, predicted {sent}")
    return wrong


@pytest.mark.parametrize(("world", "together"), [(2, False), (3, False), (4, False), (4, True)])
def test_carried_sums_have_the_bits_of_the_definition(world: int, together: bool) -> None:
    seeds = list(range(1000 * world, 1000 * world + (20 if together else 60)))
    for wrong in run_processes(sums, world, seeds, together, timeout=100):
        assert not wrong, wrong[:5]
