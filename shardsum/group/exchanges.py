"""Exchanges between the processes of a group, with everything decided that can be decided once.

There is one class for each way that rows travel. All add the same rows in the same order with the same kernels, so
their bits are equal. The fast path of a plan over peer memory is one operator that looks at its tensors itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.layout import ExchangePlan, length
from ..core.numerics import NATIVE_DTYPES, Reduce
from ..local import kernels
from ..local.ops import readable
from ..native import loader as native
from ..transports import TRANSPORTS, Rows, carry, carry_peers, share
from ..transports.peer.operators import MAX_ROW_DIMS, peer_call, peer_call_new, peer_call_new_list
from ..transports.peer.prepared import PreparedCall
from .handle import Job
from .routes import Route, fingerprint, rows_per_chunk, stamp_of, two_shot_chunks
from .terms import Terms

if TYPE_CHECKING:
    from .planner import Planner


def prepare(planner: Planner, terms: Terms, device_type: str) -> Prepared:
    """Decide how such an exchange runs. Not collective; all processes decide alike."""
    native.load()
    plan, router = planner.layout(terms), planner.router
    route = router.route(plan, torch.Size(terms.row_shape).numel(), terms.dtype, terms.reduce, device_type)
    if route.transport == "peer":
        return OverPeers(planner, terms, plan, route)
    if route.carry is not None:
        return Carried(planner, terms, plan, route)
    if route.two_shot:
        return TwoShot(planner, terms, plan, route, share.pays(router.domains, ring=device_type != "cpu"))
    return OneShot(planner, terms, plan, route)


class Prepared:
    """One exchange with everything decided that does not depend on the tensors of a call.

    Attributes:
        route: how it travels.
        shapes: of every hosted sink's result.
    """

    def __init__(self, planner: Planner, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        self.route, self._planner, self._plan, self._reduce = route, planner, plan, terms.reduce
        self._sinks = plan.hosted_sinks(planner.rank)
        self.shapes = [(length(plan.sinks[q]), *terms.row_shape) for q in self._sinks]
        self._width = torch.Size(terms.row_shape).numel()
        self._is_empty = not self._width or not any(length(sink) for sink in plan.sinks)
        self._stamp, self._terms = stamp_of(terms, plan, route), terms

    def _cut_to(self, transport: str, cuts: Sequence[ExchangePlan]) -> None:
        """Let rows travel in these chunks."""
        terms, rank, wire = self._terms, self._planner.rank, self._planner.wire
        head = 0 if wire is None else wire.header_bytes
        made, shape = TRANSPORTS[transport], tuple(terms.row_shape)
        self._chunks = [(cut, made(cut, rank, shape, terms.dtype, head)) for cut in cuts]

    def _arriving(self, shards: Sequence[Tensor]) -> Iterator[Any]:
        """None, once the first transfers have started. Then every chunk with the rows of the hosted sinks; while they
        are summed, those of the next chunk travel."""
        wire, ((cut, transport), *later) = self._planner.wire, self._chunks
        pending = transport.start(shards, wire)
        yield None
        for next_cut, transport in later:
            ahead = transport.start(shards, wire)
            yield cut, pending.wait(wire)
            cut, pending = next_cut, ahead
        yield cut, pending.wait(wire)

    def _begin(self, beside: bool = False) -> None:
        """Note the route, count the bytes from 0, and stamp the transfers. ``beside``: these go on while something else
        is done."""
        planner, wire = self._planner, self._planner.wire
        planner.last = self.route
        if wire is not None:
            wire.sent = wire.received = 0
            if self._stamp is not None:
                wire.begin(self._stamp, planner.agreement.call, planner.agreement.origin, beside)

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        """Begin the exchange of contiguous shards ``(|I_r|, *F)``. With lengths on the device it is that of
        ``[x (k, S_MAX, *F), lengths (k,)]``, and all lengths ``(R',)`` follow the results.

        ``outs``, contiguous and without lazy signs, may be filled in place of new tensors: the result says whether
        they were.
        """
        raise NotImplementedError

    def bind(self) -> tuple[Tensor, bool] | None:
        """The plan tensor of :mod:`shardsum.transports.peer.operators`, and whether it has one row and one result; None
        where there is none. To be made after the first call."""
        return None

    def _results(self, first: Tensor, outs: Sequence[Tensor] | None) -> list[Tensor]:
        if outs is not None:
            return list(outs)
        return [first.new_empty(shape, dtype=self._reduce.dtype) for shape in self.shapes]


class OneShot(Prepared):
    """Every process gets the rows that its sinks need and reduces them: every transport that yields rows."""

    def __init__(self, planner: Planner, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        super().__init__(planner, terms, plan, route)
        n = route.chunks
        self._cut_to(route.transport, [plan.cut(i / n, (i + 1) / n) for i in range(n)] if n > 1 else [plan])

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._begin(self.route.chunks > 1)
        results = self._results(shards[0], outs)
        return Job(results, self._steps(shards, results), self.route.chunks > 1, self._planner.wire)

    def _steps(self, shards: Sequence[Tensor], outs: list[Tensor]) -> Iterator[None]:
        wire, plan, arriving = self._planner.wire, self._plan, self._arriving(shards)
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

    def __init__(self, planner: Planner, terms: Terms, plan: ExchangePlan, route: Route, by_domain: bool) -> None:
        super().__init__(planner, terms, plan, route)
        self._by_domain = by_domain
        self._cut_to("all_to_all", two_shot_chunks(plan, route.chunks))
        self._chunk_rows = rows_per_chunk(plan, route.chunks)

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._begin(self.route.chunks > 1)
        (shape,) = self.shapes
        padded = (self._chunk_rows * self.route.chunks, *shape[1:])
        buffer = (
            outs[0] if outs is not None and padded == shape else shards[0].new_empty(padded, dtype=self._reduce.dtype)
        )
        return Job([buffer[: shape[0]] if buffer.shape != shape else buffer], self._steps(shards, buffer), True,
                   self._planner.wire)  # fmt: skip

    def _steps(self, shards: Sequence[Tensor], buffer: Tensor) -> Iterator[None]:
        wire, rank, arriving = self._planner.wire, self._planner.rank, self._arriving(shards)
        assert wire is not None
        rows_per_process = self._chunk_rows // self._planner.world_size
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
                shared.append(share.Sharing(wire, self._planner.router.domains, chunk, len(shared)))
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
        peers, terms = self._planner.peers, self._terms
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
        self._begin()
        results = self._results(shards[0], outs)
        if not self._is_empty:
            call, bounds = self._launch
            rows = [readable(s) for s in shards] if self._converts else list(shards)
            call(results, rows, bounds, number=self._planner.peer_number())
        return Job(results, iter(()))

    def bind(self) -> tuple[Tensor, bool] | None:
        call, bounds = self._launch if not self._is_empty else (None, [])
        if call is None or self._converts or len(self._terms.row_shape) > MAX_ROW_DIMS:
            return None
        return call.bind(bounds, self._terms.row_shape, self._planner.state), len(bounds) == 2 and len(self.shapes) == 1


class Carried(Prepared):
    """Accumulators go from domain to domain and are folded where the rows are."""

    def __init__(self, planner: Planner, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        super().__init__(planner, terms, plan, route)
        assert route.carry is not None
        self._together = planner.inside is not None and planner.router.folds_over_peers(route)
        self._schedule = carry.Schedule(route.carry, planner.rank, rows=not self._together)

    @cached_property
    def _launches(self) -> dict[int, list[carry_peers.Launch]] | None:
        """Folds over peer memory, which is set up at the first call that needs it: collective in the domain."""
        inside, terms, schedule = self._planner.inside, self._terms, self._schedule
        if inside is None or not self._together or not self._width:
            return None
        said = fingerprint(terms, self._plan, self.route).hash
        return carry_peers.launches_of(
            schedule.carry, self._planner.rank, inside, self._width, terms.dtype, terms.reduce, said
        )

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        self._begin()
        results, wire = self._results(shards[0], outs), self._planner.wire
        assert wire is not None
        number = self._planner.peer_number()
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


def launch(planner: Planner, bound: Tensor, single: bool, shards: Any, out: Any) -> Tensor | list[Tensor] | None:
    """The fast path: a call by the operator of a bound plan. None where anything about the call is unusual; nothing has
    happened then.

    Args:
        bound, single: of :meth:`Prepared.bind`.
        shards, out: as the user passed them.

    Returns:
        One Tensor; for a list of shards a list with one Tensor for each hosted sink.
    """
    several = type(shards) is list
    if planner.always_agrees or forward_ad._current_level >= 0 or (out is not None if several else not single):
        return None
    for shard in shards if several else (shards,):
        if type(shard) is not Tensor or not shard.is_contiguous():
            return None
        if shard.requires_grad and torch.is_grad_enabled():
            return None
    planner.announce_call()
    try:
        if out is None:
            return peer_call_new_list(shards, bound) if several else peer_call_new(shards, bound)
        if type(out) is not Tensor or out.requires_grad:
            return None
        peer_call(out, shards, bound)
    except RuntimeError:
        planner.check_peers()
        return None
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that are gone
    return out
