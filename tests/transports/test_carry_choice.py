"""What carrying is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardsum.core.layout import ExchangePlan, owners_of
from shardsum.transports import domains
from shardsum.transports.carry_choice import choose
from shardsum.transports.carry_plan import ACCUMULATORS, RESULTS, ROWS
from shardsum.transports.costs import Costs, Load

SIZES = {ROWS: 2, ACCUMULATORS: 4, RESULTS: 2}


def all_reduce(ranks: int, world: int, size: int) -> ExchangePlan:
    owners = owners_of(ranks, world, "contiguous")
    return ExchangePlan(((0, size),) * ranks, owners, ((0, size),) * world, tuple(range(world)), world)


def test_a_load_tells_links_apart() -> None:
    load = Load.of([(0, 1, 5), (1, 2, 7), (2, 0, 1), (3, 3, 100), (0, 3, 2)], domains.agree([0, 0, 1, 1]))
    assert load.inside_out == (5, 0, 0, 0) and load.inside_in == (0, 5, 0, 0)
    assert load.between_out == (2, 7, 1, 0) and load.between_in == (1, 0, 7, 2)
    assert load.domain_out == (9, 1) and load.domain_in == (1, 9)
    assert load.host_out == (14, 1)
    assert Load.of([(0, 1, 5), (2, 0, 1)], domains.agree([0, 0, 1], ["one"] * 3)).host_out == (6,)
    assert load.inside == 5 and load.between == 10
    assert load.egress == (7, 7, 1, 0) and load.ingress == (1, 5, 7, 2)
    costs = Costs(1.0, 1.0, 1.0, between_gbps=0.007, domain_gbps=0.009)
    assert costs.wire_us(load) == pytest.approx(1.0)
    assert replace(costs, wire_gbps=0.001).wire_us(load) == pytest.approx(5.0)
    assert costs.flat_us(3, load, 1000) == pytest.approx(3 + 1 + 1)
    assert replace(costs, host_gbps=0.007).flat_us(3, load, 1000) == pytest.approx(3 + 2 + 1)


def test_a_slow_network_is_crossed_once_and_in_chunks() -> None:
    plan, hosts = all_reduce(8, 4, 1 << 20), domains.agree(["a", "a", "b", "b"])
    slow = Costs(50.0, 1.0, 10.0, between_latency_us=200.0, between_gbps=0.125, domain_gbps=0.125)
    choice = choose(plan, hosts, slow, SIZES)
    assert choice.load.between == (1 << 20) * 6 and choice.plan.chunks > 1
    crossing = (1 << 20) * 4 / 0.125 / 1e3
    assert crossing < choice.microseconds < 1.5 * crossing
    fast = choose(plan, hosts, Costs(50.0, 1.0, 10.0), SIZES)
    assert fast.microseconds < choice.microseconds
    tiny = choose(all_reduce(8, 4, 4), hosts, slow, SIZES)
    assert tiny.plan.chunks == 1


def test_processes_that_host_many_ranks_pass_one_accumulator() -> None:
    """Inside one domain, 16 ranks on two processes: 4 bytes there and 2 back, not 8 rows of 2 for every half."""
    choice = choose(all_reduce(16, 2, 1000), domains.agree(["a", "a"]), Costs(1.0, 1.0, 10.0), SIZES)
    assert choice.alone and choice.load.between == 0 and choice.load.inside == 1000 * 6
    assert choice.describe() == f"2 runs over processes, {choice.plan.chunks} chunks"


def test_steps_add_up_to_what_the_busiest_link_takes() -> None:
    """Two hosts, accumulators of 4 bytes one way and results of 2 the other, at one byte a nanosecond."""
    plan, hosts = all_reduce(8, 4, 1 << 20), domains.agree(["a", "a", "b", "b"])
    link = Costs(0.0, 1e6, 1e6, 0.0, 1e6, 1.0)
    choice = choose(plan, hosts, link, SIZES)
    assert choice.plan.chunks == 256  # nothing but the link takes time
    there, back = (1 << 20) * 4 / 1e3, (1 << 20) * 2 / 1e3
    assert choice.microseconds == pytest.approx(there + back / 256, rel=1e-3)
    slow_cpu = choose(plan, hosts, replace(link, host_gbps=1.0), SIZES)
    assert slow_cpu.microseconds > sum(choice.load.host_out) / 2e3
