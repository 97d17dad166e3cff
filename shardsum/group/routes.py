"""How an exchange travels: which transport, one- or two-shot, in how many chunks, with how many bytes.

Every process computes the same answer, from values that all share. One-shot: every sink's process gets the rows that it
needs and reduces them itself. Two-shot, for a sum that every process wants over all_to_all: process p reduces the p-th
part of each chunk, then one all_gather shares the reduced parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..core.layout import ExchangePlan, length
from ..transports import TRANSPORTS
from ..transports.costs import Costs
from ..transports.peer.peers import Peers
from .terms import Reduce

#: Bytes of one chunk on the busiest process; a smaller message travels whole.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Route:
    """How one exchange travels. Bytes by process."""

    transport: str
    two_shot: bool
    chunks: int
    egress: tuple[int, ...]
    ingress: tuple[int, ...]
    reason: str

    @property
    def busiest(self) -> int:
        return max(*self.egress, *self.ingress)


LOCAL_ROUTE = Route("local", False, 1, (0,), (0,), "one process: the shards are summed where they lie")


class Router:
    """Chooses routes.

    Args:
        world_size: the number of processes.
        transport: "auto" or the name of one.
        costs: constants of the "auto" choice by device type.
        peers: the peer transport, where processes can map each other's memory; "auto" takes it whenever it can.
    """

    def __init__(self, world_size: int, transport: str, costs: Mapping[str, Costs], peers: Peers | None) -> None:
        self.world_size, self.transport, self._costs = world_size, transport, costs
        self._peers = peers if peers is not None and peers.reason is None else None
        self._no_peers = "" if peers is None or peers.reason is None else f"; no peer memory: {peers.reason}"

    def takes_peers(self) -> bool:
        """Whether exchanges go over peer memory."""
        return self._peers is not None and self.transport in ("auto", "peer")

    def route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str) -> Route:
        """The route of an exchange with ``width`` elements a position."""
        if self.world_size == 1:
            return LOCAL_ROUTE
        if self.takes_peers():
            return self._peer_route(plan, width, dtype, reduce)
        candidates = {name: self._predict(name, plan, width, dtype, reduce) for name in ("gather", "all_to_all")}
        if self.transport != "auto":
            return candidates[self.transport]
        costs = self._costs.get(device_type) or self._costs["cuda"]
        times = {name: _microseconds(costs, plan, route, width, dtype) for name, route in candidates.items()}
        best = min(times, key=lambda name: (times[name], sum(candidates[name].egress)))
        reason = ", ".join(f"{name} {t:.0f} us" for name, t in times.items())
        return replace(candidates[best], reason=f"predicted {reason}{self._no_peers}")

    def _peer_route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce) -> Route:
        assert self._peers is not None
        sizes = (width, dtype.itemsize, reduce.dtype.itemsize)
        two_shot, egress, ingress = self._peers.predict(plan, *sizes, reduce.op == "copy")
        return Route("peer", two_shot, 1, egress, ingress, "one launch over memory that the GPUs map from each other")

    def _predict(self, name: str, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce) -> Route:
        transport = TRANSPORTS[name]
        in_bytes, out_bytes = width * dtype.itemsize, width * reduce.dtype.itemsize
        everywhere = len(set(plan.sinks)) == 1 and plan.sink_owners == tuple(range(self.world_size))
        replicated = reduce.op != "copy" and everywhere and length(plan.sinks[0]) > 0
        reason = f'transport="{name}" was asked for'
        if not (name == "all_to_all" and replicated):
            egress = tuple(n * in_bytes for n in transport.egress(plan))
            ingress = tuple(n * in_bytes for n in transport.ingress(plan))
            chunks = 1 if name == "gather" else max(1, -(-max(*egress, *ingress) // CHUNK_BYTES))
            return Route(name, False, chunks, egress, ingress, reason)
        chunks = max(1, -(-length(plan.sinks[0]) * in_bytes // CHUNK_BYTES))
        part = rows_per_chunk(plan, chunks) // self.world_size
        cuts = two_shot_chunks(plan, chunks)
        shared = part * chunks * (self.world_size - 1) * out_bytes
        egress = tuple(sum(c.egress(p) for c in cuts) * in_bytes + shared for p in range(self.world_size))
        ingress = tuple(sum(c.ingress(p) for c in cuts) * in_bytes + shared for p in range(self.world_size))
        return Route(name, True, chunks, egress, ingress, reason)


def _microseconds(costs: Costs, plan: ExchangePlan, route: Route, width: int, dtype: torch.dtype) -> float:
    read = sum(length(i) for i in plan.sources) * width * dtype.itemsize
    collectives = route.chunks * (2 if route.two_shot else 1)
    return costs.microseconds(collectives, route.busiest, read // plan.world_size if route.two_shot else read)


def two_shot_chunks(plan: ExchangePlan, chunks: int) -> list[ExchangePlan]:
    """One plan a chunk, whose p-th sink is the part that process p reduces."""
    lo, hi = plan.sinks[0]
    rows = rows_per_chunk(plan, chunks)
    cuts = []
    for begin in range(lo, lo + rows * chunks, rows):
        bounds = [min(begin + rows // plan.world_size * p, hi) for p in range(plan.world_size + 1)]
        cuts.append(replace(plan, sinks=tuple(pairwise(bounds))))
    return cuts


def rows_per_chunk(plan: ExchangePlan, chunks: int) -> int:
    """Rows of a two-shot chunk: a multiple of the process count."""
    per_process = -(-length(plan.sinks[0]) // (chunks * plan.world_size))
    return per_process * plan.world_size
