"""Runs an exchange: picks the transport, cuts large messages into chunks, sums or copies the rows each sink receives.

One-shot: every sink's process gets the rows it needs and reduces them itself. Two-shot, for a result that every
process wants (all_reduce over all_to_all): process p reduces the p-th part of each chunk, then one all_gather shares
the reduced parts. Both add the same rows in the same order with the same kernel, so their bits are equal.
While a chunk is summed, the next one travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval, length
from ..local import kernels
from ..local.ops import readable
from ..native import loader as native
from ..transports import TRANSPORTS, Rows, Stamp, Wire, stamp
from ..transports.costs import Costs
from ..transports.peer.peers import Peers

#: Bytes of one chunk on the busiest process; a smaller message travels whole.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Reduce:
    """What happens to the rows of a sink. ``op`` "copy" moves bits (disjoint sources); "sum" and "mean" add."""

    op: str
    scale: float | None
    dtype: torch.dtype

    @property
    def empty(self) -> float:
        """The sum of nothing: +0.0, multiplied like any other (a negative scale makes it -0.0)."""
        return 0.0 if self.scale is None else 0.0 * self.scale


@dataclass(frozen=True)
class Route:
    """How one exchange travels: a prediction that every process computes alike. Bytes by process."""

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


class Job:
    """An exchange under way; the first transfers have started. ``result()`` completes it; called again after an error
    it raises that error.

    Args:
        outs: the results, once it is complete.
        steps: what is left to do; stops once after the first transfers have started.
        more: whether ``steps`` will start further transfers.
        wire: what they travel on.
    """

    def __init__(self, outs: list[Tensor], steps: Iterator[None], more: bool = False, wire: Wire | None = None) -> None:
        self.more = more
        self._wire = wire
        self._outs, self._steps = outs, steps
        self._error: BaseException | None = None
        next(steps, None)

    def result(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        try:
            for _ in self._steps:
                pass
        except BaseException as error:
            self._error = error
            if self.more and self._wire is not None:
                self._wire.fail(error)
            raise
        self.more = False
        return self._outs


class Engine:
    """Executes exchanges between the processes of a group.

    Args:
        owners: the process of every virtual rank.
        rank: this process.
        wire: how bytes travel; None for a lone process.
        transport: "auto" or the name of one.
        costs: constants of the "auto" choice by device type.
        peers: the peer transport, where processes could map each other's memory; "auto" takes it whenever it can.
    """

    def __init__(
        self,
        owners: Sequence[int],
        rank: int,
        wire: Wire | None,
        transport: str,
        costs: Mapping[str, Costs],
        peers: Peers | None = None,
    ) -> None:
        self.owners, self.rank, self.wire = tuple(owners), rank, wire
        self.world_size = 1 if wire is None else wire.world_size
        self.transport, self.costs = transport, costs
        self.peers = peers if peers is not None and peers.reason is None else None
        self.no_peers = "" if peers is None or peers.reason is None else f"; peer memory cannot be used: {peers.reason}"
        self.last: Route | None = None
        self.call: Callable[[], int] = lambda: 0  # the number of the call that an exchange belongs to
        self.plan = lru_cache(maxsize=256)(self._plan)
        self.route = lru_cache(maxsize=256)(self._route)
        self.two_shot_chunks = lru_cache(maxsize=64)(self._two_shot_chunks)
        self.stamp = lru_cache(maxsize=256)(self._stamp)

    def _plan(self, sources: tuple[Interval, ...], sinks: tuple[Interval, ...], kinds: str) -> ExchangePlan:
        """``kinds``: "v" virtual rank or "p" process, of sources and of sinks (all_reduce is "vp")."""
        owners = {"v": self.owners, "p": tuple(range(self.world_size))}
        return ExchangePlan(sources, owners[kinds[0]], sinks, owners[kinds[1]], self.world_size)

    def start(
        self, name: str, plan: ExchangePlan, shards: Sequence[Tensor], reduce: Reduce, out: Tensor | None = None
    ) -> Job:
        """Begin an exchange of contiguous shards ``(|I_r|, *F)``; results are one tensor per hosted sink.

        ``name`` is the collective. ``out`` may be written in place of a new tensor where there is one sink, where it is
        contiguous, without lazy signs (the result says whether it was).
        """
        native.load()
        first = shards[0]
        trailing = first.shape[1:]
        route = self.route(plan, trailing.numel(), first.dtype, reduce, first.device.type)
        self.begin(route)
        if self.wire is not None and route.transport != "peer":
            self.wire.begin(self.stamp(name, plan, tuple(trailing), first.dtype, reduce, route), self.call())
        if route.two_shot and route.transport != "peer":
            rows = self._rows_per_chunk(plan, route.chunks)
            buffer = first.new_empty((rows * route.chunks, *trailing), dtype=reduce.dtype)
            outs = [buffer[: length(plan.sinks[0])]]
            return Job(outs, self._two_shot(plan, shards, reduce, buffer, route.chunks), True, self.wire)
        if out is not None and out.is_contiguous() and not (out.is_neg() or out.is_conj()):
            outs = [out]
        else:
            outs = [first.new_empty((length(plan.sinks[q]), *trailing), dtype=reduce.dtype) for q in self._hosted(plan)]
        if route.transport == "peer":
            self._by_peers(plan, shards, reduce, outs)
            return Job(outs, iter(()))
        return Job(outs, self._one_shot(plan, shards, reduce, outs, route), route.chunks > 1, self.wire)

    def _by_peers(
        self, plan: ExchangePlan, shards: Sequence[Tensor], reduce: Reduce, outs: list[Tensor], *lengths: Tensor
    ) -> None:
        assert self.peers is not None
        if shards[0].shape[1:].numel() and any(length(i) for i in plan.sinks):
            self.peers.exchange(plan, shards, outs, reduce.op, reduce.scale, *lengths)

    def padded_by_peers(self, plan: ExchangePlan, x: Tensor, lengths: Tensor, reduce: Reduce) -> list[Tensor]:
        """Sums of padded shards ``(k, S_MAX, *F)`` with lengths on the device, then all R lengths.

        Lengths ride with the peers' flags. All of them are needed, and gathered, for the divisor of a mean's gradient
        only; else they are 0.
        """
        assert self.peers is not None
        native.load()
        self.begin(self._peer_route(plan, x.shape[2:].numel(), x.dtype, reduce))
        outs = [x.new_empty((length(plan.sinks[q]), *x.shape[2:]), dtype=reduce.dtype) for q in self._hosted(plan)]
        self._by_peers(plan, list(x.contiguous().unbind(0)), reduce, outs, lengths)
        if reduce.op == "mean":
            return [*outs, self.peers.gather_lengths(plan, lengths)]
        return [*outs, lengths.new_zeros(len(self.owners))]

    def begin(self, route: Route) -> None:
        """Note the route of a new call and count its bytes from 0. All transfers of earlier calls start before it."""
        self.last = route
        if self.wire is not None:
            self.wire.close()
            self.wire.traffic.sent = self.wire.traffic.received = 0

    def _hosted(self, plan: ExchangePlan) -> list[int]:
        return plan.hosted_sinks(self.rank)

    def _one_shot(
        self, plan: ExchangePlan, shards: Sequence[Tensor], reduce: Reduce, outs: list[Tensor], route: Route
    ) -> Iterator[None]:
        transport, n = TRANSPORTS[route.transport], route.chunks
        cuts = [plan.cut(i / n, (i + 1) / n) for i in range(n)] if n > 1 else [plan]
        pending = transport.start(cuts[0], shards, self.rank, self.wire)
        yield
        for i, cut in enumerate(cuts):
            ahead = transport.start(cuts[i + 1], shards, self.rank, self.wire) if i + 1 < n else None
            for q, out, rows in zip(self._hosted(plan), outs, pending.wait(self.wire)):
                begin, end = (position - plan.sinks[q][0] for position in cut.sinks[q])
                fill(out if n == 1 else out[begin:end], rows, reduce)
            if ahead is not None:
                pending = ahead

    def _two_shot(
        self, plan: ExchangePlan, shards: Sequence[Tensor], reduce: Reduce, buffer: Tensor, chunks: int
    ) -> Iterator[None]:
        transport, wire = TRANSPORTS["all_to_all"], self.wire
        assert wire is not None
        cuts, rows_per_chunk = self.two_shot_chunks(plan, chunks), buffer.shape[0] // chunks
        part = rows_per_chunk // self.world_size
        pending = transport.start(cuts[0], shards, self.rank, wire)
        yield
        gathers = []
        for i, cut in enumerate(cuts):
            ahead = transport.start(cuts[i + 1], shards, self.rank, wire) if i + 1 < len(cuts) else None
            chunk = buffer[i * rows_per_chunk : (i + 1) * rows_per_chunk]
            mine = chunk[self.rank * part : (self.rank + 1) * part]
            (rows,) = pending.wait(wire)
            fill(mine[: length(cut.sinks[self.rank])], rows, reduce)
            if chunk.numel():
                gathers.append(wire.all_gather(chunk, mine))
            if ahead is not None:
                pending = ahead
        for work in gathers:
            wire.wait(work, buffer.device)

    def _two_shot_chunks(self, plan: ExchangePlan, chunks: int) -> list[ExchangePlan]:
        """One plan a chunk, whose p-th sink is the part of process p. They keep the segments that they work out."""
        lo, hi = plan.sinks[0]
        rows = self._rows_per_chunk(plan, chunks)
        cuts = []
        for begin in range(lo, lo + rows * chunks, rows):
            bounds = [min(begin + rows // self.world_size * p, hi) for p in range(self.world_size + 1)]
            cuts.append(replace(plan, sinks=tuple(pairwise(bounds))))
        return cuts

    def _rows_per_chunk(self, plan: ExchangePlan, chunks: int) -> int:
        """Rows of a two-shot chunk: a multiple of the process count."""
        per_process = -(-length(plan.sinks[0]) // (chunks * self.world_size))
        return per_process * self.world_size

    def _stamp(
        self, name: str, plan: ExchangePlan, trailing: tuple[int, ...], dtype: torch.dtype, reduce: Reduce, route: Route
    ) -> Stamp:
        """What an exchange is: all that determines what travels and what is made of it."""
        said = {"dtype": str(dtype), "trailing shape": trailing, "op": reduce.op, "scale": repr(reduce.scale)}
        said |= {"out_dtype": str(reduce.dtype), "sources": plan.sources, "sinks": plan.sinks}
        exact = {**said, "kinds": [plan.source_owners, plan.sink_owners], "route": [route.transport, route.chunks]}
        return stamp(name, exact, ", ".join(f"{key}={value}" for key, value in said.items()))

    # Choosing and predicting

    def _route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce, device_type: str) -> Route:
        """The route of an exchange with ``width`` elements a position, from values that all processes share."""
        if self.world_size == 1:
            return LOCAL_ROUTE
        if self.peers is not None and self.transport in ("auto", "peer"):
            return self._peer_route(plan, width, dtype, reduce)
        candidates = {name: self._predict(name, plan, width, dtype, reduce) for name in ("gather", "all_to_all")}
        if self.transport != "auto":
            return candidates[self.transport]
        costs = self.costs.get(device_type) or self.costs["cuda"]
        times = {name: self._microseconds(costs, plan, route, width, dtype) for name, route in candidates.items()}
        best = min(times, key=lambda name: (times[name], sum(candidates[name].egress)))
        reason = ", ".join(f"{name} {t:.0f} us" for name, t in times.items())
        chosen = candidates[best]
        return Route(
            best, chosen.two_shot, chosen.chunks, chosen.egress, chosen.ingress, f"predicted {reason}{self.no_peers}"
        )

    def _peer_route(self, plan: ExchangePlan, width: int, dtype: torch.dtype, reduce: Reduce) -> Route:
        assert self.peers is not None
        sizes = (width, dtype.itemsize, reduce.dtype.itemsize)
        two_shot, egress, ingress = self.peers.predict(plan, *sizes, reduce.op == "copy")
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
        part = self._rows_per_chunk(plan, chunks) // self.world_size
        cuts = self.two_shot_chunks(plan, chunks)
        shared = part * chunks * (self.world_size - 1) * out_bytes
        egress = tuple(sum(c.egress(p) for c in cuts) * in_bytes + shared for p in range(self.world_size))
        ingress = tuple(sum(c.ingress(p) for c in cuts) * in_bytes + shared for p in range(self.world_size))
        return Route(name, True, chunks, egress, ingress, reason)

    def _microseconds(self, costs: Costs, plan: ExchangePlan, route: Route, width: int, dtype: torch.dtype) -> float:
        read = sum(length(i) for i in plan.sources) * width * dtype.itemsize
        collectives = route.chunks * (2 if route.two_shot else 1)
        return costs.microseconds(collectives, route.busiest, read // self.world_size if route.two_shot else read)


def fill(out: Tensor, rows: Rows, reduce: Reduce) -> None:
    """Reduce the rows of one sink into ``out`` (contiguous ``(size, *F)``)."""
    if out.numel() == 0:
        return
    if reduce.op == "copy":
        for row, start in zip(rows.rows, rows.starts):
            begin, end = max(start, 0), min(start + row.shape[0], out.shape[0])
            out[begin:end] = row[begin - start : end - start]
    elif not rows.rows:
        out.fill_(reduce.empty)
    else:
        kernels.sum_rows(out, [readable(r) for r in rows.rows], rows.starts, reduce.op == "mean", reduce.scale, False)
