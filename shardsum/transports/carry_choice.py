"""What carried accumulators would cost, and how to cut them: a prediction that every process computes alike.

A chunk passes through ``stages`` folds, ``stages - 1`` hops of accumulators and the hops of the result; chunks follow
each other as closely as the slowest of these allows. So the time of C chunks is

    (sum of all their times for the whole call) / C + (C - 1) / C x the slowest one
        + latency between domains x hops + latency inside x C
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..core.layout import ExchangePlan, length
from .carry_plan import ACCUMULATORS, KINDS, RESULTS, CarryPlan
from .costs import Costs, Load
from .domains import Domains

_MOST_CHUNKS = 256
_MOST_STAGES = 300_000  # of all pieces: a plan lists them


@dataclass(frozen=True)
class Choice:
    """How accumulators would be carried.

    Attributes:
        plan: what to run.
        microseconds: the predicted time.
        load: bytes by process and kind of link.
        alone: every process is a domain of its own.
    """

    plan: CarryPlan
    microseconds: float
    load: Load
    alone: bool

    def describe(self) -> str:
        """One line: over what, in how many chunks."""
        over = "processes" if self.alone else "domains"
        return f"{len(self.plan.runs)} runs over {over}, {self.plan.chunks} chunk{'s' * (self.plan.chunks > 1)}"


@lru_cache(maxsize=64)
def outline(plan: ExchangePlan, domains: tuple[int, ...], lag: int, counted: bool) -> CarryPlan:
    """The plan in one chunk, from which bytes are predicted."""
    return CarryPlan(plan, domains, 1, lag, counted)


def choose(
    plan: ExchangePlan, domains: Domains, costs: Costs, sizes: Mapping[str, int], lag: int = 1, counted: bool = False
) -> Choice:
    """The faster way to carry: by domain, or every process as one of its own (rows then stay where they are).

    Args:
        sizes: bytes of one position as a row, an accumulator and a result (:data:`carry_plan.KINDS`).
        lag: 2 where each step's transfers are one batch (NCCL).
        counted: for a mean.
    """
    candidates = [(domains.of, False), (domains.single.of, True)]
    if domains.count in (1, len(domains.of)):  # one domain: nothing but rows would travel; or both are the same
        candidates = candidates[1:]
    choices = [_predict(outline(plan, of, lag, counted), domains.of, costs, sizes, alone) for of, alone in candidates]
    return min(choices, key=lambda choice: choice.microseconds)


def _predict(plan: CarryPlan, domains: tuple[int, ...], costs: Costs, sizes: Mapping[str, int], alone: bool) -> Choice:
    def load_of(*kinds: str) -> Load:
        return Load.of(((a, b, n * sizes[k]) for (k, a, b), n in plan.traffic.items() if k in kinds), domains)

    load, accumulators, results = load_of(*KINDS), load_of(ACCUMULATORS), load_of(RESULTS)
    stages = max((len(piece.stages) for piece in plan.pieces), default=1)
    hops = max((d[0] for piece in plan.pieces for d in piece.deliveries), default=0)
    fold = _folded_bytes(plan, sizes) / costs.memory_gbps / 1e3
    inside, between = costs.inside_us(load), costs.between_us(load)
    one_hop = max(costs.between_us(accumulators), costs.inside_us(accumulators))
    one_result = max(costs.between_us(results), costs.inside_us(results))
    passing = stages * fold + (stages - 1) * one_hop + hops * one_result
    slowest = max(between, inside + fold)
    latency = costs.latency(load)

    def time(chunks: int) -> float:
        waits = latency * plan.lag * (stages - 1 + hops) + costs.latency_us * chunks
        return passing / chunks + slowest * (chunks - 1) / chunks + waits

    most = max((length(piece.interval) for piece in plan.pieces), default=1)
    listed = sum(len(piece.stages) for piece in plan.pieces) or 1
    counts = [c for c in (1 << i for i in range(9)) if c == 1 or (c <= min(most, _MOST_CHUNKS, _MOST_STAGES // listed))]
    chunks = min(counts, key=time)
    return Choice(replace(plan, chunks=chunks), time(chunks), load, alone)


def _folded_bytes(plan: CarryPlan, sizes: Mapping[str, int]) -> int:
    """Bytes that the busiest process's folds read and write."""
    moved = [0] * plan.plan.world_size
    row, acc, result = (sizes[kind] for kind in KINDS)
    for piece in plan.pieces:
        n = length(piece.interval)
        for s, stage in enumerate(piece.stages):
            rows = sum(
                max(0, min(end, piece.interval[1]) - max(begin, piece.interval[0]))
                for begin, end in map(plan.plan.sources.__getitem__, stage.sources)
            )
            ends = acc * (s > 0) + (acc if s + 1 < len(piece.stages) else result)
            moved[stage.process] += rows * row + n * ends
    return max(moved)
