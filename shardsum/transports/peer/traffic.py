"""How many bytes an exchange over peer memory moves, and which way: the prediction that ``explain`` shows."""

from __future__ import annotations

from ...core.layout import ExchangePlan, intersect, length
from .layout import MemoryLayout
from .shapes import Way, choose_way, describe_message, gap_of, needed


def predict(
    plan: ExchangePlan,
    layout: MemoryLayout,
    width: int,
    in_bytes: int,
    out_bytes: int,
    move: bool,
) -> tuple[Way, tuple[int, ...], tuple[int, ...]]:
    """The way, and by process the bytes of rows and results from it to others, and from them to it.

    What is read is what its reader wants. What is pushed or written is the hull of what others want of a row, and
    goes to all of them; between two processes, unless it is small, without the largest gap in what the other wants
    (up to a few KiB at its ends)."""
    way = choose_way(describe_message(plan, width, in_bytes, out_bytes, move), layout)
    if way == "two-shot":
        return way, *_two_shot(plan, width * in_bytes, width * out_bytes)
    if way == "read":
        sent = tuple(plan.egress(p) * width * in_bytes for p in range(plan.world_size))
        return way, sent, tuple(plan.ingress(p) * width * in_bytes for p in range(plan.world_size))
    parts = []
    for r, held in enumerate(plan.sources):
        hull, gap = needed(plan, r, held), gap_of(plan, 1 - plan.source_owners[r]) if way != "push" else (0, 0)
        parts.append((length(hull) - length(intersect(hull, gap))) * width * in_bytes)
    given = [sum(parts[r] for r in plan.hosted_sources(p)) for p in range(plan.world_size)]
    return way, tuple(n * (plan.world_size - 1) for n in given), tuple(sum(given) - n for n in given)


def _two_shot(plan: ExchangePlan, row_bytes: int, result_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``row_bytes``, ``result_bytes``: of one position."""
    world_size = plan.world_size
    shared = length(plan.sinks[0]) / world_size * (world_size - 1) * result_bytes
    held = [sum(length(plan.sources[r]) for r in plan.hosted_sources(p)) * row_bytes for p in range(world_size)]
    egress = tuple(int(h * (world_size - 1) / world_size + shared) for h in held)
    return egress, tuple(int((sum(held) - h) / world_size + shared) for h in held)
