"""What exchanges are predicted to take on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardsum.core.layout import ExchangePlan, intervals_of, owners_of, split_evenly
from shardsum.transports import domains
from shardsum.transports.carry_choice import choose, kernels
from shardsum.transports.carry_items import ACCUMULATORS, RESULTS, ROWS
from shardsum.transports.carry_plan import CarryPlan
from shardsum.transports.carry_schedule import Schedule
from shardsum.transports.costs import Costs, Load, Work, of_rows

SIZES = {ROWS: 2, ACCUMULATORS: 4, RESULTS: 2}


def sum_of(ranks: int, world: int, size: int, lengths: list[int], scattered: bool) -> ExchangePlan:
    owners, sources = owners_of(ranks, world, "contiguous"), tuple((0, n) for n in lengths)
    if scattered:
        return ExchangePlan(sources, owners, tuple(intervals_of(split_evenly(size, ranks))), owners, world)
    return ExchangePlan(sources, owners, ((0, size),) * world, tuple(range(world)), world)


def test_kernels_and_bytes_of_rows() -> None:
    """Four ranks of 8, 8, 8 and 4 positions on two processes, 3 bytes a row's position and 5 a result's."""
    plan = sum_of(4, 2, 8, [8, 8, 8, 4], scattered=True)
    # Headers, packing, two sums, the check. The first sends two rows of 4 and reads four; the other sends two, and
    # reads three.
    assert of_rows(plan, False, 1, 3, 5, False, False) == [Work((5, 5), ((16 + 16) * 3 + 20, (16 + 12) * 3 + 20))]
    assert of_rows(plan, True, 1, 3, 5, False, False) == [Work((5, 5), ((32 + 16) * 3 + 20, (24 + 12) * 3 + 20))]
    assert of_rows(plan, False, 2, 3, 5, False, False)[0].launches == (9, 9)
    assert of_rows(plan, False, 1, 3, 5, True, False)[0].launches == (3 + 8, 3 + 6)
    before, after = of_rows(sum_of(4, 2, 8, [8, 8, 8, 4], scattered=False), False, 1, 3, 5, False, True)
    assert before.launches == (3, 3) and after.launches == (2, 2)
    lone = ExchangePlan(((0, 8), (0, 8)), (0, 1), ((0, 8),) * 2, (0, 1), 2)
    assert of_rows(lone, True, 1, 3, 5, False, False) == [Work((3, 3), (16 * 3 + 40,) * 2)]  # nothing to pack


def test_the_time_of_rows_is_that_of_the_busiest_process_between_collectives() -> None:
    costs = Costs(10.0, 1.0, 2.0, launch_us=0.5, gather_latency_us=20.0)
    load = Load.of([(0, 1, 3000), (1, 0, 1000)], domains.agree(["a", "a"]))
    work = [Work((4, 2), (0, 8000)), Work((1, 3), (0, 0))]
    assert costs.gpu_us(2, load, None, work) == pytest.approx(2 * 10 + 3 + (2 * 0.5 + 4) + 3 * 0.5)
    assert costs.gpu_us(1, None, load, work[1:]) == pytest.approx(20 + 3 + 1.5)
    assert replace(costs, exchange_gbps=1.0).gpu_us(1, load, None, []) == pytest.approx(10 + 4)
    assert replace(costs, gather_gbps=0.5).gpu_us(1, load, load, []) == pytest.approx(10 + 3 + 20 + 6)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of", [(0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 2)])
def test_predicted_folds_are_those_that_are_made(of: tuple[int, ...], causal: bool, scattered: bool) -> None:
    ranks, size = 8, 64
    lengths = [size * (r + 1) // ranks if causal else size for r in range(ranks)]
    for lag in (1, 2):
        plan = CarryPlan(sum_of(ranks, len(of), size, lengths, scattered), of, 1, lag)
        launches, copied = kernels(plan, SIZES)
        arriving = {(step, receiver) for step, _, _, receiver in plan.traffic_by_step}
        for process in range(len(of)):
            schedule = Schedule(plan, process)
            for step in range(schedule.steps):
                several = [p for p in schedule.receives.get(step, ()) if p.kind == RESULTS and len(p.items) > 1]
                folds = schedule.folds.get(step, [])
                if all(r in schedule.sources for fold in folds for r in fold.sources):
                    made = len(folds) + len(several) + ((step, process) in arriving)
                    assert launches.get(step, [0] * len(of))[process] == made, (step, process)
                assert copied.get(step, [0] * len(of))[process] == sum(4 * p.positions for p in several)


def test_accumulators_on_gpus_wait_for_no_empty_step() -> None:
    """Two GPUs on two hosts: accumulators there, results back, in a batch each; what is folded comes between."""
    plan, hosts = sum_of(4, 2, 1000, [1000] * 4, scattered=False), domains.agree(["a", "b"])
    link = Costs(7.0, 1.0, 1e9, 5.0, 2.0, launch_us=0.25, batch_latency_us=100.0)
    choice = choose(plan, hosts, link, SIZES, lag=2)
    assert choice.plan.chunks == 1
    # The kernels: headers, a fold on each, and one that checks what came, on each.
    assert choice.microseconds == pytest.approx(4 / 2 + 2 / 2 + 200 + 5 * 0.25)
    many = choose(plan, hosts, replace(link, batch_latency_us=0.0, launch_us=0.0), SIZES, lag=2)
    assert many.plan.chunks > 1 and many.microseconds < 2.2
