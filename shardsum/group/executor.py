"""Runs exchanges between the processes of a group. What can be decided once is decided in :meth:`Executor.prepare`.

There is one prepared exchange for each way that rows travel. All add the same rows in the same order with the same
kernels, so their bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, length
from ..core.numerics import NATIVE_DTYPES
from ..local import kernels
from ..local.ops import readable
from ..native import loader as native
from ..transports import Rows, Stamp, Wire, carry, carry_peers, share
from ..transports.peer.operators import MAX_ROW_DIMS
from ..transports.peer.prepared import PreparedCall
from ..transports.peer.transport import PeerTransport
from ..transports.peer.workspace import number_of
from .handle import Job
from .prepared import Prepared
from .routes import Route, Router, fingerprint, rows_per_chunk, two_shot_chunks
from .terms import Reduce, Terms

if TYPE_CHECKING:
    from .agreement import Agreement


class Executor:
    """The exchanges of one group on this process.

    Args:
        owners: the process of every virtual rank.
        wire: None for a lone process.
        calls: knows the numbers of the current call.
        inside: the peer transport of this process's domain, where processes can map each other's memory inside each
            domain alone. Its ``reason`` is None.

    Attributes:
        peers: the peer transport, where all processes can do so.
        last: the route of the last exchange.
        state: one int64 that native operators share with Python (:mod:`shardsum.transports.peer.operators`).
    """

    def __init__(
        self,
        owners: Sequence[int],
        rank: int,
        wire: Wire | None,
        router: Router,
        calls: Agreement,
        inside: PeerTransport | None = None,
    ) -> None:
        self.inside = inside
        self.owners, self.rank, self.wire, self.router, self.calls = tuple(owners), rank, wire, router, calls
        self.world_size = router.world_size
        self.virtual_ranks = tuple(v for v, owner in enumerate(self.owners) if owner == rank)
        self.peers = router.peers
        self.last: Route | None = None
        self.state = torch.zeros(1, dtype=torch.int64, device="cpu")

    @property
    def all_peers(self) -> list[PeerTransport]:
        """The peer transports that this process takes part in."""
        return [peers for peers in (self.peers, self.inside) if peers is not None]

    def layout(self, terms: Terms) -> ExchangePlan:
        """Who holds and who wants what, with owners."""
        owners = {"v": self.owners, "p": tuple(range(self.world_size))}
        return ExchangePlan(terms.sources, owners[terms.kinds[0]], terms.sinks, owners[terms.kinds[1]], self.world_size)

    def prepare(self, terms: Terms, device_type: str) -> Prepared:
        """Decide how such an exchange runs. Not collective; all processes decide alike."""
        native.load()
        plan = self.layout(terms)
        route = self.router.route(plan, torch.Size(terms.row_shape).numel(), terms.dtype, terms.reduce, device_type)
        if route.transport == "peer":
            return OverPeers(self, terms, plan, route)
        if route.carry is not None:
            return Carried(self, terms, plan, route)
        if route.two_shot:
            return TwoShot(self, terms, plan, route, share.pays(self.router.domains, ring=device_type != "cpu"))
        return OneShot(self, terms, plan, route)

    def begin(self, route: Route, stamp: Stamp | None, beside: bool = False) -> None:
        """Note the route of a new call, count its bytes from 0, and stamp its transfers. ``beside``: these go on while
        something else is done."""
        self.last = route
        wire, calls = self.wire, self.calls
        if wire is not None:
            wire.sent = wire.received = 0
            if stamp is not None:
                wire.begin(stamp, calls.call, calls.origin, beside)

    def peer_number(self) -> int:
        """What a launch over peer memory carries as the number of its call."""
        return number_of(self.calls.call, self.calls.origin)


class OneShot(Prepared):
    """Every process gets the rows that its sinks need and reduces them: every transport that yields rows."""

    def __init__(self, executor: Executor, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        super().__init__(executor, terms, plan, route)
        n = route.chunks
        self._cut_to(route.transport, [plan.cut(i / n, (i + 1) / n) for i in range(n)] if n > 1 else [plan])

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._executor.begin(self.route, self._stamp, self.route.chunks > 1)
        results = self._results(shards[0], outs)
        return Job(results, self._steps(shards, results), self.route.chunks > 1, self._executor.wire)

    def _steps(self, shards: Sequence[Tensor], outs: list[Tensor]) -> Iterator[None]:
        wire, plan, arriving = self._executor.wire, self._plan, self._arriving(shards)
        yield next(arriving)
        for cut, arrived in arriving:
            parts = outs
            if self.route.chunks > 1:
                bounds = ((plan.sinks[q][0], *cut.sinks[q]) for q in self._sinks)
                parts = [out[begin - first : end - first] for out, (first, begin, end) in zip(outs, bounds)]
            for part, rows in zip(parts, arrived):
                fill(part, rows, self._reduce)
            if wire is not None:
                wire.verify(parts)


class TwoShot(Prepared):
    """A sum that every process wants, over all_to_all: process p reduces the p-th part of every chunk, then one
    all_gather shares the reduced parts; or transfers that cross to every domain once (``by_domain``)."""

    def __init__(self, executor: Executor, terms: Terms, plan: ExchangePlan, route: Route, by_domain: bool) -> None:
        super().__init__(executor, terms, plan, route)
        self._by_domain = by_domain
        self._cut_to("all_to_all", two_shot_chunks(plan, route.chunks))
        self._chunk_rows = rows_per_chunk(plan, route.chunks)

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._executor.begin(self.route, self._stamp, self.route.chunks > 1)
        (shape,) = self.shapes
        padded = (self._chunk_rows * self.route.chunks, *shape[1:])
        buffer = (
            outs[0] if outs is not None and padded == shape else shards[0].new_empty(padded, dtype=self._reduce.dtype)
        )
        return Job([buffer[: shape[0]] if buffer.shape != shape else buffer], self._steps(shards, buffer), True,
                   self._executor.wire)  # fmt: skip

    def _steps(self, shards: Sequence[Tensor], buffer: Tensor) -> Iterator[None]:
        wire, rank, arriving = self._executor.wire, self._executor.rank, self._arriving(shards)
        assert wire is not None
        rows_per_process = self._chunk_rows // self._executor.world_size
        yield next(arriving)
        gathers: list[Any] = []
        shared: list[share.Sharing] = []
        for (cut, (rows,)), chunk in zip(arriving, buffer.split(self._chunk_rows)):
            mine = chunk[rank * rows_per_process : (rank + 1) * rows_per_process]
            fill(mine[: length(cut.sinks[rank])], rows, self._reduce)
            wire.verify([mine])
            if shared:
                shared[-1].pass_on()
            if chunk.numel() and self._by_domain:
                shared.append(share.Sharing(wire, self._executor.router.domains, chunk, len(shared)))
            elif chunk.numel():
                gathers.append(wire.all_gather(chunk, mine))
        for work in gathers:
            wire.wait(work, buffer.device)
        for sharing in shared:
            sharing.finish()
        wire.verify([buffer])


class OverPeers(Prepared):
    """One launch moves and sums. The transport is set up at the first call, which is collective."""

    @cached_property
    def _launch(self) -> tuple[PreparedCall, list[int]]:
        peers, terms = self._executor.peers, self._terms
        assert peers is not None
        dtype = torch.int64 if self._converts else terms.dtype
        reduce, said = terms.reduce, fingerprint(terms, self._plan, self.route)
        call = peers.prepare(self._plan, self._width, dtype, reduce.dtype, reduce.op, reduce.scale, signature=said.hash)
        return call, peers.bounds(self._plan)

    @property
    def _converts(self) -> bool:
        """Whether kernels read the shards in another dtype."""
        return self._reduce.op != "copy" and self._terms.dtype not in NATIVE_DTYPES

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._executor.begin(self.route, None)
        results = self._results(shards[0], outs)
        if not self._is_empty:
            call, bounds = self._launch
            rows = [readable(s) for s in shards] if self._converts else list(shards)
            call(results, rows, bounds, number=self._executor.peer_number())
        return Job(results, iter(()))

    def bind(self) -> tuple[Tensor, bool] | None:
        call, bounds = self._launch if not self._is_empty else (None, [])
        if call is None or self._converts or len(self._terms.row_shape) > MAX_ROW_DIMS:
            return None
        return call.bind(bounds, self._terms.row_shape, self._executor.state), len(bounds) == 2 and len(
            self.shapes
        ) == 1


class Carried(Prepared):
    """Accumulators go from domain to domain and are folded where the rows are."""

    def __init__(self, executor: Executor, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        super().__init__(executor, terms, plan, route)
        assert route.carry is not None
        self._together = executor.inside is not None and executor.router.folds_over_peers(route)
        self._schedule = carry.Schedule(route.carry, executor.rank, rows=not self._together)

    @cached_property
    def _launches(self) -> dict[int, list[carry_peers.Launch]] | None:
        """Folds over peer memory, which is set up at the first call that needs it: collective in the domain."""
        inside, terms, schedule = self._executor.inside, self._terms, self._schedule
        if inside is None or not self._together or not self._width:
            return None
        said = fingerprint(terms, self._plan, self.route).hash
        return carry_peers.launches_of(
            schedule.carry, self._executor.rank, inside, self._width, terms.dtype, terms.reduce, said
        )

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._executor.begin(self.route, self._stamp)
        results, wire = self._results(shards[0], outs), self._executor.wire
        assert wire is not None
        number = self._executor.peer_number()
        call = carry.CarriedCall(self._schedule, shards, results, self._reduce, wire, self._launches, number)
        return Job(results, call.steps(), True, wire)


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
        read = rows.rows if rows.rows[0].dtype in NATIVE_DTYPES else [readable(r) for r in rows.rows]
        kernels.sum_rows(out, None, read, rows.starts, 0, reduce.op == "mean", reduce.scale)
