"""How an exchange travels: which transport, one- or two-shot, in how many chunks, with how many bytes on which links.

Every process computes the same answer, from values that all share. One-shot: every sink's process gets the rows that it
needs and reduces them itself. Two-shot, for a sum that every process wants over all_to_all: process p reduces the p-th
part of each chunk, then one all_gather shares the reduced parts. Carried: accumulators go from domain to domain
(:mod:`shardsum.transports.carry_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch

from ..core.layout import ExchangePlan, length
from ..core.numerics import accumulator_dtype
from ..transports import TRANSPORTS, Stamp, share, stamp
from ..transports.base import all_gather_transfers
from ..transports.carry_choice import choose
from ..transports.carry_items import KINDS
from ..transports.carry_plan import CarryPlan
from ..transports.costs import Costs, Load, of_rows
from ..transports.domains import Domains
from ..transports.peer.transport import PeerTransport
from .terms import Reduce, Terms

#: Bytes of one chunk on the busiest process; a smaller message travels whole.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Route:
    """How one exchange travels.

    Attributes:
        egress, ingress: bytes that every process sends and receives.
        load: the same by kind of link, where it is predicted.
        microseconds: the predicted time, where there is one.
        carry: what accumulators do, where they travel.
    """

    transport: str
    two_shot: bool
    chunks: int
    egress: tuple[int, ...]
    ingress: tuple[int, ...]
    reason: str
    load: Load | None = None
    microseconds: float | None = None
    carry: CarryPlan | None = None

    @property
    def busiest(self) -> int:
        return max(*self.egress, *self.ingress)


LOCAL_ROUTE = Route("local", False, 1, (0,), (0,), "one process: the shards are summed where they lie")


class Router:
    """Chooses routes.

    Args:
        costs: constants of the "auto" choice by device type.
        peers: the peer transport, where processes can map each other's memory; "auto" takes it whenever it can.
        inside: whether processes can do so inside each domain; then accumulators are folded over peer memory.
        not_inside: why they cannot.
    """

    def __init__(
        self,
        domains: Domains,
        transport: str,
        costs: Mapping[str, Costs],
        peers: PeerTransport | None = None,
        inside: bool = False,
        not_inside: str | None = None,
    ) -> None:
        self.world_size, self.domains = len(domains.of), domains
        self.transport, self._costs = transport, costs
        self.peers = peers if peers is not None and peers.reason is None else None
        self._no_peers = "" if peers is None or peers.reason is None else f"; no peer memory: {peers.reason}"
        self._inside = inside
        self._not_inside = "" if not_inside is None else f"; no peer memory inside domains: {not_inside}"

    def takes_peers(self) -> bool:
        """Whether exchanges go over peer memory."""
        return self.peers is not None and self.transport in ("auto", "peer")

    def route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str) -> Route:
        """The route of an exchange with ``width`` elements a position."""
        if self.world_size == 1:
            return LOCAL_ROUTE
        if self.takes_peers():
            return self._peer_route(plan, width, dtype, reduce)
        names = ("gather", "all_to_all", "carry") if self.transport == "auto" else (self.transport,)
        candidates = self.candidates(plan, width, dtype, reduce, device_type, names)
        if not candidates:  # "carry" was asked for, and nothing is summed
            candidates = self.candidates(plan, width, dtype, reduce, device_type, ("gather", "all_to_all"))
            return replace(best_of(candidates), reason='transport="carry" was asked for, but what is moved has no sums')
        if self.transport != "auto":
            return candidates[self.transport]
        times = ", ".join(f"{name} {route.microseconds:.0f} us" for name, route in candidates.items())
        best = best_of(candidates)
        over = "; folds over peer memory inside domains" if self.folds_over_peers(best) else ""
        return replace(best, reason=f"predicted {times}{self._no_peers}{over}{self._not_inside}")

    def folds_over_peers(self, route: Route) -> bool:
        """Whether accumulators travel between domains, whose processes fold over peer memory (where there are two)."""
        return self._inside and route.carry is not None and route.carry.domains == self.domains.of

    def candidates(
        self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str,
        names: tuple[str, ...],
    ) -> dict[str, Route]:  # fmt: skip
        """The routes of the named transports, with predicted times; without those that cannot be taken. "auto" leaves
        "carry" out where no process hosts several sources and all are in one domain: it cannot be the faster one."""
        costs = self._costs.get(device_type) or self._costs["cuda"]
        worthwhile = self.domains.count > 1 or len(plan.sources) > self.world_size or len(names) == 1
        routes = {}
        for name in names:
            if name != "carry":
                routes[name] = self._rows(name, plan, width, dtype, reduce, device_type, costs)
            elif reduce.op != "copy" and worthwhile:
                routes[name] = self._carried(plan, width, dtype, reduce, device_type, costs)
        return routes

    def _peer_route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce) -> Route:
        assert self.peers is not None
        sizes = (width, dtype.itemsize, reduce.dtype.itemsize)
        two_shot, egress, ingress = self.peers.predict(plan, *sizes, reduce.op == "copy")
        return Route("peer", two_shot, 1, egress, ingress, "one launch over memory that the GPUs map from each other")

    def _carried(
        self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str, costs: Costs
    ) -> Route:
        itemsizes = (dtype.itemsize, accumulator_dtype(dtype).itemsize, reduce.dtype.itemsize)
        sizes = dict(zip(KINDS, (width * size for size in itemsizes)))
        lag = 1 if device_type == "cpu" else 2
        found = choose(plan, self.domains, costs, sizes, lag, reduce.op == "mean")
        chunks, load, time = found.plan.chunks, found.load, found.microseconds
        route = Route("carry", False, chunks, load.egress, load.ingress, "", load, time, found.plan)
        folds = ", folded over peer memory" if self.folds_over_peers(route) else ""
        return replace(route, reason=f'transport="carry" was asked for ({found.describe()}{folds}){self._not_inside}')

    def _rows(
        self, name: str, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str,
        costs: Costs,
    ) -> Route:  # fmt: skip
        transport, ring = TRANSPORTS[name], device_type != "cpu"
        in_bytes, out_bytes = width * dtype.itemsize, width * reduce.dtype.itemsize
        everywhere = len(set(plan.sinks)) == 1 and plan.sink_owners == tuple(range(self.world_size))
        two_shot = name == "all_to_all" and reduce.op != "copy" and everywhere and length(plan.sinks[0]) > 0
        read = sum(length(i) for i in plan.sources) * in_bytes
        second: list[tuple[int, int, int]] = []  # the sums of a two-shot, in bytes
        if two_shot:
            chunks = max(1, -(-length(plan.sinks[0]) * in_bytes // CHUNK_BYTES))
            part = rows_per_chunk(plan, chunks) // self.world_size * chunks
            rows = chain.from_iterable(transport.transfers(cut, ring) for cut in two_shot_chunks(plan, chunks))
            by_domain = share.pays(self.domains, ring)
            shared = (
                share.transfers(self.domains, part) if by_domain else all_gather_transfers(self.world_size, part, ring)
            )
            first = [(a, b, n * in_bytes) for a, b, n in rows]
            second = [(a, b, n * out_bytes) for a, b, n in shared]
            load = Load.of([*first, *second], self.domains)
            time = costs.flat_us((2 + by_domain) * chunks, load, read // self.world_size)
        else:
            first = [(a, b, n * in_bytes) for a, b, n in transport.transfers(plan, ring)]
            load = Load.of(first, self.domains)
            chunks = 1 if name == "gather" else max(1, -(-max(*load.egress, *load.ingress) // CHUNK_BYTES))
            time = costs.flat_us(chunks, load, read)
        if costs.launch_us is not None:
            gathered = name == "gather"
            summed = two_shot_chunks(plan, 1)[0] if two_shot else plan
            work = of_rows(summed, gathered, chunks, in_bytes, out_bytes, reduce.op == "copy", two_shot)
            moved, sums = Load.of(first, self.domains), Load.of(second, self.domains) if second else None
            time = costs.gpu_us(chunks, None if gathered else moved, moved if gathered else sums, work)
        reason = f'transport="{name}" was asked for'
        return Route(name, two_shot, chunks, load.egress, load.ingress, reason, load, time)


def best_of(candidates: Mapping[str, Route]) -> Route:
    """The fastest, by prediction; of equally fast ones that with the fewest bytes."""
    return min(candidates.values(), key=lambda route: (route.microseconds, sum(route.egress)))


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


def stamp_of(terms: Terms, plan: ExchangePlan, route: Route) -> Stamp | None:
    """The stamp of an exchange on the wire; None where nothing travels there."""
    return None if route.transport in ("local", "peer") else fingerprint(terms, plan, route)


def fingerprint(terms: Terms, plan: ExchangePlan, route: Route) -> Stamp:
    """What an exchange is: all that determines what travels and what is made of it."""
    said = {**terms.signature(), "sources": terms.sources, "sinks": terms.sinks}
    owners = [plan.source_owners, plan.sink_owners]
    way = [route.transport, route.two_shot, route.chunks, route.carry and route.carry.domains]
    return stamp(terms.name, {**said, "owners": owners, "route": way})
