"""What carried accumulators would cost, and how to cut them: a prediction that every process computes alike.

A plan says what travels and what is folded in each step, of one chunk. The next chunk does the same one step later. So
in a step of C chunks come together the loads of up to C steps of one chunk, a C-th of each; it takes as long as the
busiest link, or the busiest process that receives rows and folds, or the CPUs that move the bytes. The time of a call
is the sum over its steps, and

    latency between domains x steps of one chunk + latency inside x C

On GPUs (``launch_us``) each step's transfers are one batch, beside which the folds of the step before run; kernels take
time beyond what they read and write, and steps in which nothing travels have no latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from .carry_plan import CarryPlan
from .carry_work import folded_bytes, kernels
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

    def __init__(self, plan: CarryPlan, domains: Domains, sizes: Mapping[str, int], on_gpus: bool) -> None:
        folded = folded_bytes(plan, sizes)
        launches, copied = kernels(plan, sizes) if on_gpus else ({}, {})
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
                "copied": [none, *(copied.get(step, none) for step in range(last + 1))],
                "launches": [none, *(launches.get(step, none) for step in range(last + 1))],
                **{f: [[0] * len(getattr(self.loads[0], f)), *(getattr(x, f) for x in self.loads)] for f in _FIELDS},
            }.items()
        }

    def _windows(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Of every step of so many chunks: the steps of one chunk that come together in it, ``[begin, end)``."""
        end = torch.arange(1, len(self.loads) + chunks)
        return (end - chunks).clamp(min=0), end.clamp(max=len(self.loads))

    def _sums(self, name: str, chunks: int) -> Tensor:
        begin, end = self._windows(chunks)
        return self._before[name][end] - self._before[name][begin]

    def microseconds_of_gpus(self, costs: Costs, chunks: int, latency: float) -> float:
        """The time of all steps of so many chunks."""
        ways = [
            (costs.wire_gbps, "inside_out", "inside_in"),
            (costs.between_gbps or costs.wire_gbps, "between_out", "between_in"),
            *([(costs.domain_gbps, "domain_out", "domain_in")] if costs.domain_gbps else []),
        ]
        moved = [self._sums(name, chunks).amax(1) / (gbps * 1e3) for gbps, *names in ways for name in names]
        if costs.exchange_gbps:
            sides = [self._sums(name, chunks) for name in ("inside_out", "inside_in", "between_out", "between_in")]
            moved.append(torch.stack(sides).sum(0).amax(1) / (costs.exchange_gbps * 1e3))
        wire = torch.stack(moved).amax(0) / chunks
        wire += latency * (wire > 0)
        touched = self._sums("folded", chunks) + self._sums("copied", chunks)
        launch = costs.launch_us or 0.0
        fold = (touched / (costs.memory_gbps * 1e3 * chunks) + self._sums("launches", chunks) * launch).amax(1)
        beside = torch.cat([wire[1:], wire.new_zeros(1)]).maximum(fold)
        return launch + float(wire[0]) + sum(beside.tolist())

    def microseconds(self, costs: Costs, chunks: int) -> float:
        """The time of all steps of so many chunks, without latency."""

        def most(name: str, gbps: float) -> Tensor:
            return (self._sums(name, chunks) / (gbps * 1e3)).amax(1)

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
