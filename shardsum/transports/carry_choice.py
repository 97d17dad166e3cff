"""What carried accumulators would cost, and how to cut them: a prediction that every process computes alike.

A plan says what travels and what is folded in each step, of one chunk. The next chunk does the same one step later. So
in a step of C chunks come together the loads of up to C steps of one chunk, a C-th of each; it takes as long as the
busiest link, or the busiest process that receives rows and folds, or the CPUs that move the bytes. The time of a call
is the sum over its steps, and

    latency between domains x steps of one chunk + latency inside x C
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .carry_items import KINDS
from .carry_plan import CarryPlan
from .costs import Costs, Load
from .domains import Domains

_FIELDS = tuple(field.name for field in fields(Load))
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
    choices = [_predict(outline(plan, of, lag, counted), domains, costs, sizes, alone) for of, alone in candidates]
    return min(choices, key=lambda choice: choice.microseconds)


def _predict(plan: CarryPlan, domains: Domains, costs: Costs, sizes: Mapping[str, int], alone: bool) -> Choice:
    load = Load.of(((a, b, n * sizes[k]) for (k, a, b), n in plan.traffic.items()), domains)
    steps = _Steps(plan, domains, sizes)
    latency = costs.latency(load)

    def time(chunks: int) -> float:
        return steps.microseconds(costs, chunks) + latency * (len(steps.loads) - 1) + costs.latency_us * chunks

    most = max((length(piece.interval) for piece in plan.pieces), default=1)
    listed = sum(len(piece.stages) for piece in plan.pieces) or 1
    counts = [c for c in (1 << i for i in range(9)) if c == 1 or (c <= min(most, _MOST_CHUNKS, _MOST_STAGES // listed))]
    times = {c: time(c) for c in counts}
    chunks = min(counts, key=times.__getitem__)
    return Choice(replace(plan, chunks=chunks), times[chunks], load, alone)


class _Steps:
    """Bytes by step of a plan in one chunk.

    Attributes:
        loads: what travels, of every step.
    """

    def __init__(self, plan: CarryPlan, domains: Domains, sizes: Mapping[str, int]) -> None:
        folded = _folded_bytes(plan, sizes)
        last = max((*(step for step, *_ in plan.traffic_by_step), *folded), default=0)
        moved: list[list[tuple[int, int, int]]] = [[] for _ in range(last + 1)]
        for (step, kind, a, b), n in plan.traffic_by_step.items():
            moved[step].append((a, b, n * sizes[kind]))
        self.loads = [Load.of(transfers, domains) for transfers in moved]
        none = [0] * len(domains.of)
        # Sums over the steps before each: (steps + 1, one a process or domain). Integers, so the same everywhere.
        self._before = {
            name: torch.tensor(rows, dtype=torch.int64, device="cpu").cumsum(0)
            for name, rows in {
                "folded": [none, *(folded.get(step, none) for step in range(last + 1))],
                **{f: [[0] * len(getattr(self.loads[0], f)), *(getattr(x, f) for x in self.loads)] for f in _FIELDS},
            }.items()
        }

    def microseconds(self, costs: Costs, chunks: int) -> float:
        """The time of all steps of so many chunks, without latency."""
        end = torch.arange(1, len(self.loads) + chunks)
        begin = (end - chunks).clamp(min=0)
        end = end.clamp(max=len(self.loads))

        def most(name: str, gbps: float) -> Tensor:
            return ((self._before[name][end] - self._before[name][begin]) / (gbps * 1e3)).amax(1)

        def busiest(gbps: float, *names: str) -> Tensor:
            return torch.stack([most(name, gbps) for name in names]).amax(0)

        fold = most("folded", costs.memory_gbps)
        ways = [
            busiest(costs.wire_gbps, "inside_out", "inside_in") + fold,
            busiest(costs.between_gbps or costs.wire_gbps, "between_out", "between_in"),
        ]
        if costs.domain_gbps:
            ways.append(busiest(costs.domain_gbps, "domain_out", "domain_in"))
        if costs.host_gbps:
            ways.append(most("host_out", costs.host_gbps) + fold)
        return sum(torch.stack(ways).amax(0).tolist()) / chunks


def _folded_bytes(plan: CarryPlan, sizes: Mapping[str, int]) -> dict[int, list[int]]:
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
