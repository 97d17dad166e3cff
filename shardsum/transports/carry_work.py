"""What processes do with carried accumulators beside moving them, in one chunk; for :mod:`.carry_choice`."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping

from ..core.layout import length
from .carry_items import KINDS, RESULTS
from .carry_plan import CarryPlan


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
