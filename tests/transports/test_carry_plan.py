"""Which way accumulators go, on random problems: no tensors, no processes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsum.core.layout import ExchangePlan, intervals_of, length, owners_of, split_evenly
from shardsum.transports.carry_plan import ACCUMULATORS, RESULTS, ROWS, CarryPlan


@st.composite
def plans(draw: st.DrawFn) -> CarryPlan:
    world = draw(st.integers(1, 6))
    size = draw(st.integers(1, 40))

    def interval() -> tuple[int, int]:
        begin = draw(st.integers(0, size))
        return begin, draw(st.integers(begin, size))

    def side() -> tuple[tuple, tuple]:
        count = draw(st.integers(1, 9))
        owners = tuple(draw(st.integers(0, world - 1)) for _ in range(count))
        same = interval() if draw(st.booleans()) else None
        return tuple(same or interval() for _ in range(count)), owners

    domains = tuple(draw(st.integers(0, 3)) for _ in range(world))
    return CarryPlan(
        ExchangePlan(*side(), *side(), world), domains, draw(st.integers(1, 4)), draw(st.integers(1, 2)),
        draw(st.booleans()),
    )  # fmt: skip


def positions(interval: tuple[int, int]) -> set[int]:
    return set(range(*interval))


@settings(max_examples=300, deadline=None)
@given(plans())
def test_every_position_visits_who_holds_it_in_order(plan: CarryPlan) -> None:
    sources, wanted = plan.plan.sources, set().union(*map(positions, plan.plan.sinks))
    seen: Counter[int] = Counter()
    for piece in plan.pieces:
        assert length(piece.interval) > 0 and 0 <= piece.chunk < plan.chunks
        for j in positions(piece.interval):
            seen[j] += 1
            holders = [r for r, i in enumerate(sources) if i[0] <= j < i[1]]
            visits = [[r for r in stage.sources if r in holders] for stage in piece.stages]
            assert [r for visit in visits for r in visit] == holders and all(visits)
            if plan.counted:
                assert [s.carried for s in piece.stages] == [sum(map(len, visits[:s])) for s in range(len(visits))]
            assert set(piece.wanted) == {
                o for (lo, hi), o in zip(plan.plan.sinks, plan.plan.sink_owners) if lo <= j < hi
            }
        for stage, after in zip(piece.stages, piece.stages[1:]):
            assert plan.domains[stage.process] != plan.domains[after.process]
        for stage in piece.stages:
            assert {plan.domains[plan.plan.source_owners[r]] for r in stage.sources} == {plan.domains[stage.process]}
    held = set().union(*map(positions, sources)) & wanted
    assert set(seen) == held and set(seen.values()) <= {1}
    empty = [j for interval in plan.empty for j in range(*interval)]
    assert sorted(empty) == sorted(wanted - held)


@settings(max_examples=300, deadline=None)
@given(plans())
def test_results_reach_all_who_want_them_and_enter_a_domain_once(plan: CarryPlan) -> None:
    for piece in plan.pieces:
        have, entries, sends = {piece.stages[-1].process: 0}, Counter(), Counter()
        for hops, sender, receiver in piece.deliveries:
            assert sender in have and receiver not in have and hops == have[sender] + 1
            have[receiver] = hops
            if plan.domains[sender] != plan.domains[receiver]:
                entries[plan.domains[receiver]] += 1
                sends[plan.domains[sender]] += 1
        assert set(piece.wanted) <= set(have)
        assert set(have) - {piece.stages[-1].process} <= set(piece.wanted)
        assert all(n == 1 for n in (*entries.values(), *sends.values()))


@settings(max_examples=300, deadline=None)
@given(plans())
def test_what_a_process_sends_is_what_the_other_one_expects_and_has_by_then(plan: CarryPlan) -> None:
    world = plan.plan.world_size
    messages = [plan.messages_of(p) for p in range(world)]
    listed = [{(m.step, m.kind, m.sender, m.receiver, m.items) for m in messages[p]} for p in range(world)]
    for p in range(world):
        for message in messages[p]:
            said = message.step, message.kind, message.sender, message.receiver, message.items
            assert said in listed[message.receiver] and said in listed[message.sender]
            assert message.sender != message.receiver and message.positions > 0
    table: Counter[tuple] = Counter()
    for p in range(world):
        for m in messages[p]:
            if m.sender == p:
                table[m.kind, m.sender, m.receiver] += m.positions
                same = [o for o in messages[p] if (o.step, o.kind, o.receiver) == (m.step, m.kind, m.receiver)]
                assert [o for o in same if o.sender == p] == [m]
    assert dict(table) == plan.traffic
    folded = {(i, s): step for p in range(world) for step, i, s in plan.folds_of(p)}
    assert len(folded) == sum(len(piece.stages) for piece in plan.pieces)
    arrived: dict[tuple, int] = {}
    for message in sorted((m for p in range(world) for m in messages[p] if m.sender == p), key=lambda m: m.step):
        for item in message.items:
            piece = plan.pieces[item.piece]
            if message.kind == ACCUMULATORS:  # left by a stage at least `lag` steps before, read in the step it arrives
                assert message.step == folded[item.piece, item.number + 1]
                assert message.step >= folded[item.piece, item.number] + plan.lag
            if message.kind == ROWS:
                (stage,) = [s for s, stage in enumerate(piece.stages) if item.number in stage.sources]
                assert message.step == folded[item.piece, stage]
            if message.kind == RESULTS:
                last = folded[item.piece, len(piece.stages) - 1]
                known = arrived.get((item.piece, message.sender), last)
                assert message.step >= known + plan.lag
                arrived[item.piece, message.receiver] = message.step


def full(ranks: int, world: int, size: int, scatter: bool = False, causal: bool = False) -> ExchangePlan:
    sources = tuple((0, size * (r + 1) // ranks if causal else size) for r in range(ranks))
    owners = owners_of(ranks, world, "contiguous")
    if scatter:
        return ExchangePlan(sources, owners, tuple(intervals_of(split_evenly(size, ranks))), owners, world)
    return ExchangePlan(sources, owners, ((0, size),) * world, tuple(range(world)), world)


def between(plan: CarryPlan, sizes: dict[str, int]) -> int:
    return sum(n * sizes[kind] for (kind, a, b), n in plan.traffic.items() if plan.domains[a] != plan.domains[b])


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("hosts", [2, 4])
def test_bytes_between_hosts_do_not_grow_with_the_ranks(ranks: int, hosts: int) -> None:
    """bf16 sums over hosts of two processes: an fp32 accumulator there and a bf16 result back, an element and hop."""
    size, sizes = 4800, {ROWS: 2, ACCUMULATORS: 4, RESULTS: 2}
    world, domains = 2 * hosts, tuple(p // 2 for p in range(2 * hosts))
    if ranks < world:
        return
    plan = CarryPlan(full(ranks, world, size), domains, chunks=3)
    assert between(plan, sizes) == (hosts - 1) * size * (4 + 2)
    for kind in (ACCUMULATORS, RESULTS):  # both processes of a host carry the same
        for a in range(world):
            out = sum(n for (k, u, v), n in plan.traffic.items() if k == kind and u == a and domains[v] != domains[a])
            assert out in (0, size // 2)
    scattered = CarryPlan(full(ranks, world, size, scatter=True), domains)
    wanted_before_the_last = size * (hosts - 1) // hosts
    results = sum(n for (k, *_), n in scattered.traffic.items() if k == RESULTS)
    assert between(scattered, sizes) <= (hosts - 1) * size * 4 + wanted_before_the_last * 2
    assert results >= wanted_before_the_last


def test_zigzag_has_two_runs_a_domain() -> None:
    owners = owners_of(8, 4, "zigzag")
    plan = ExchangePlan(((0, 8),) * 8, owners, ((0, 8),) * 4, (0, 1, 2, 3), 4)
    carry_plan = CarryPlan(plan, (0, 0, 1, 1))
    assert [(r.domain, r.first, r.last) for r in carry_plan.runs] == [(0, 0, 2), (1, 2, 6), (0, 6, 8)]
    assert all(len(piece.stages) == 3 for piece in carry_plan.pieces)
    causal = ExchangePlan(((0, 8),) * 2 + ((0, 2),) * 4 + ((0, 8),) * 2, owners, ((0, 8),) * 4, (0, 1, 2, 3), 4)
    alone = [p for p in CarryPlan(causal, (0, 0, 1, 1)).pieces if p.interval[0] >= 2]
    assert alone and all(len(piece.stages) == 1 for piece in alone)  # the run in between does not hold them


def test_domains_of_one_process_each_are_a_chain() -> None:
    chain = CarryPlan(full(8, 4, 12), (0, 1, 2, 3))
    assert chain.traffic == {
        **{(ACCUMULATORS, p, p + 1): 12 for p in range(3)},
        **{(RESULTS, p + 1, p): 12 for p in range(3)},
    }
    (piece,) = chain.pieces
    assert len(piece.stages) == 4 and max(hops for hops, _, _ in piece.deliveries) == 3
