"""What a collective moved, and what one would move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.checks import as_ints, check_size
from ..core.layout import Interval, intervals_of
from .arguments import check_lengths, check_reduce, check_splits
from .executor import Engine, Reduce, Route


@dataclass(frozen=True)
class Stats:
    """Bytes of the last collective.

    Attributes:
        route: the transport taken, and the bytes that every process sends and receives by its plan.
        sent, received: bytes this process handed to and took from the backend; 0 for peer, whose kernels move rows.
    """

    route: Route
    sent: int
    received: int

    @property
    def total(self) -> int:
        """Bytes on all wires together."""
        return sum(self.route.egress)


@dataclass(frozen=True)
class Explanation:
    """What a call would do; ``print`` it."""

    collective: str
    route: Route
    virtual_ranks_per_process: float

    def __str__(self) -> str:
        r = self.route
        shots = "two-shot" if r.two_shot else "one-shot"
        return (
            f"{self.collective} by {r.transport} ({shots}, {r.chunks} chunk{'s' * (r.chunks > 1)}): {r.reason}\n"
            f"bytes: {sum(r.egress)} in total; busiest process sends {max(r.egress)}, receives {max(r.ingress)}\n"
            f"each process hosts {self.virtual_ranks_per_process:g} virtual ranks and sends that many rows an element "
            f"(nothing is summed before it travels: the order of additions is the ranks')"
        )


def explain(
    engine: Engine,
    collective: str,
    lengths: Sequence[int],
    size: int | None,
    row_shape: Sequence[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    device_type: str,
) -> Explanation:
    """What :meth:`shardsum.ShardGroup.explain` returns."""
    num_ranks, world_size = len(engine.owners), engine.world_size
    lengths = as_ints("lengths", lengths, num_ranks)
    end = max(lengths) if size is None else check_size(size)
    check_lengths(lengths, (), (), end)
    sources = tuple((0, n) for n in lengths)
    sinks: tuple[Interval, ...] = ((0, end),) * world_size
    kinds, reduce = "vp", Reduce("copy", None, dtype)
    if collective == "all_gather":
        sources, sinks = tuple(intervals_of(lengths)), ((0, sum(lengths)),) * world_size
    elif collective in ("all_reduce", "reduce_scatter"):
        reduce = check_reduce("sum", None, dtype, out_dtype)
    else:
        raise ValueError(f"collective: expected all_reduce, reduce_scatter or all_gather, got {collective!r}")
    if collective == "reduce_scatter":
        sinks, kinds = tuple(intervals_of(check_splits(None, num_ranks, end))), "vv"
    route = engine.route(engine.plan(sources, sinks, kinds), torch.Size(row_shape).numel(), dtype, reduce, device_type)
    return Explanation(collective, route, num_ranks / world_size)
