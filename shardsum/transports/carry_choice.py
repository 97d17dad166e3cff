"""What carried accumulators would cost, and how to cut them: a prediction that every process computes alike.

A plan in one chunk says what travels and what is folded in each step. Of C chunks each does a C-th of that, one step
after the chunk before it. So in one step up to C neighbouring steps of the plan overlap, a C-th of each. How long that
takes: docs/engineering/several-hosts.md, "Predictions".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from ..core.layout import ExchangePlan, length
from .carry_items import KINDS, RESULTS
from .carry_plan import CarryPlan
from .costs import Costs, Load
from .domains import Domains

_CHUNKS = [1 << i for i in range(9)]
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
        sizes: bytes of one position as a row, an accumulator and a result (:data:`.carry_items.KINDS`).
        lag: 2 where each step's transfers are one batch (NCCL).
        counted: for a mean.
    """
    candidates = [(domains.of, False), (domains.single.of, True)]
    if domains.count in (1, len(domains.of)):  # one domain: nothing but rows would travel; or both are the same
        candidates = candidates[1:]
    choices = [_predict(outline(plan, of, lag, counted), domains, costs, sizes, alone) for of, alone in candidates]
    return min(choices, key=lambda choice: choice.microseconds)


def _predict(plan: CarryPlan, domains: Domains, costs: Costs, sizes: Mapping[str, int], alone: bool) -> Choice:
    load = Load.of(((a, b, n * sizes[k]) for (k, a, b), n in plan.traffic.items()), domains)
    steps = _Steps(plan, domains, sizes, costs.launch_us is not None)
    latency = costs.latency(load)

    def time(chunks: int) -> float:
        if costs.launch_us is not None:
            batch = latency if costs.batch_latency_us is None else costs.batch_latency_us
            return steps.microseconds_of_gpus(costs, chunks, batch)
        return steps.microseconds(costs, chunks) + latency * (steps.count - 1) + costs.latency_us * chunks

    most = max((length(piece.interval) for piece in plan.pieces), default=1)
    listed = sum(len(piece.stages) for piece in plan.pieces) or 1
    counts = [c for c in _CHUNKS if c == 1 or c <= min(most, _MOST_STAGES // listed)]
    times = {c: time(c) for c in counts}
    chunks = min(counts, key=times.__getitem__)
    return Choice(replace(plan, chunks=chunks), times[chunks], load, alone)


class _Steps:
    """What travels and is done in each step of a plan in one chunk, by process or domain.

    Attributes:
        count: of steps.
    """

    def __init__(self, plan: CarryPlan, domains: Domains, sizes: Mapping[str, int], on_gpus: bool) -> None:
        folded = folded_bytes(plan, sizes)
        launches, copied = kernels(plan, sizes) if on_gpus else ({}, {})
        self.count = 1 + max((*(step for step, *_ in plan.traffic_by_step), *folded), default=0)
        moved: list[list[tuple[int, int, int]]] = [[] for _ in range(self.count)]
        for (step, kind, a, b), n in plan.traffic_by_step.items():
            moved[step].append((a, b, n * sizes[kind]))
        loads, none = [Load.of(transfers, domains) for transfers in moved], [0] * len(domains.of)
        of_steps: dict[str, list[Sequence[int]]] = {f.name: [getattr(x, f.name) for x in loads] for f in fields(Load)}
        for name, by_step in (("folded", folded), ("copied", copied), ("launches", launches)):
            of_steps[name] = [by_step.get(step, none) for step in range(self.count)]
        # Sums over the steps before each. Integers, so the same everywhere.
        self._before = {name: np.cumsum([[0] * len(rows[0]), *rows], 0) for name, rows in of_steps.items()}

    def _sums(self, name: str, chunks: int) -> np.ndarray:
        """The load of every step with so many chunks: the sum over the steps of the plan that overlap in it."""
        end = np.arange(1, self.count + chunks)
        return self._before[name][np.minimum(end, self.count)] - self._before[name][np.maximum(end - chunks, 0)]

    def _busiest(self, chunks: int, gbps: float, *names: str) -> np.ndarray:
        return np.max([self._sums(name, chunks).max(1) for name in names], 0) / (gbps * 1e3)

    def microseconds_of_gpus(self, costs: Costs, chunks: int, latency: float) -> float:
        """The time of all steps of so many chunks."""
        sides = ("inside_out", "inside_in", "between_out", "between_in")
        ways = [
            self._busiest(chunks, costs.wire_gbps, *sides[:2]),
            self._busiest(chunks, costs.between_gbps or costs.wire_gbps, *sides[2:]),
        ]
        if costs.domain_gbps:
            ways.append(self._busiest(chunks, costs.domain_gbps, "domain_out", "domain_in"))
        if costs.exchange_gbps:
            ways.append(np.sum([self._sums(name, chunks) for name in sides], 0).max(1) / (costs.exchange_gbps * 1e3))
        wire = np.max(ways, 0) / chunks
        wire += latency * (wire > 0)
        touched = self._sums("folded", chunks) + self._sums("copied", chunks)
        launch = costs.launch_us or 0.0
        fold = (touched / (costs.memory_gbps * 1e3 * chunks) + self._sums("launches", chunks) * launch).max(1)
        return float(launch + wire[0] + np.maximum(np.append(wire[1:], 0.0), fold).sum())

    def microseconds(self, costs: Costs, chunks: int) -> float:
        """The time of all steps of so many chunks, without latency."""
        fold = self._busiest(chunks, costs.memory_gbps, "folded")
        ways = [
            self._busiest(chunks, costs.wire_gbps, "inside_out", "inside_in") + fold,
            self._busiest(chunks, costs.between_gbps or costs.wire_gbps, "between_out", "between_in"),
        ]
        if costs.domain_gbps:
            ways.append(self._busiest(chunks, costs.domain_gbps, "domain_out", "domain_in"))
        if costs.host_gbps:
            ways.append(self._busiest(chunks, costs.host_gbps, "host_out") + fold)
        return float(np.max(ways, 0).sum()) / chunks


def folded_bytes(plan: CarryPlan, sizes: Mapping[str, int]) -> dict[int, list[int]]:
    """Bytes that folds read and write, by step and process."""
    moved: dict[int, list[int]] = {}
    row, acc, result = (sizes[kind] for kind in KINDS)
    for piece in plan.pieces:
        n = length(piece.interval)
        for s, stage in enumerate(piece.stages):
            rows = sum(
                max(0, min(end, piece.interval[1]) - max(begin, piece.interval[0]))
                for begin, end in map(plan.plan.sources.__getitem__, stage.sources)
            )
            ends = acc * (s > 0) + (acc if s + 1 < len(piece.stages) else result)
            here = moved.setdefault(piece.chunk + plan.lag * s, [0] * plan.plan.world_size)
            here[stage.process] += rows * row + n * ends
    return moved


def kernels(plan: CarryPlan, sizes: Mapping[str, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Kernels on a GPU, and bytes that those read and write which only copy results, by step and process.

    Folds are one kernel where they lie side by side (:mod:`.carry_schedule`): here, where they add the same sources,
    come from one process and go the same way. What arrives in a step is checked by one, and a message of several
    results is copied by one.
    """
    world = plan.plan.world_size
    launches: dict[int, list[int]] = defaultdict(lambda: [0] * world)
    copied: dict[int, list[int]] = defaultdict(lambda: [0] * world)
    sinks = [
        sorted(begin for begin, _ in map(plan.plan.sinks.__getitem__, plan.plan.hosted_sinks(p))) for p in range(world)
    ]
    folds: set[Hashable] = set()
    items: dict[tuple[int, int, int], int] = defaultdict(int)
    for piece in plan.pieces:
        for s, stage in enumerate(piece.stages):
            to: Hashable = piece.wanted
            if s + 1 < len(piece.stages):
                to = piece.stages[s + 1].process
            elif stage.process in piece.wanted:
                to = ("sink", bisect_right(sinks[stage.process], piece.interval[0]))
            step, came = piece.chunk + plan.lag * s, piece.stages[s - 1].process if s else None
            if (key := (step, stage.process, stage.sources, came, to)) not in folds:
                folds.add(key)
                launches[step][stage.process] += 1
        for hops, sender, receiver in piece.deliveries:
            items[piece.chunk + plan.lag * (len(piece.stages) - 1 + hops), sender, receiver] += 1
    for (step, kind, sender, receiver), positions in plan.traffic_by_step.items():
        if kind == RESULTS and items[step, sender, receiver] > 1:
            launches[step][receiver] += 1
            copied[step][receiver] += 2 * positions * sizes[RESULTS]
    for step, receiver in {(step, receiver) for step, _, _, receiver in plan.traffic_by_step}:
        launches[step][receiver] += 1
    return dict(launches), dict(copied)
