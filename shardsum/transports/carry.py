"""Accumulators travel from domain to domain, not rows: runs a :class:`CarryPlan` with point-to-point transfers.

Not a transport of rows (:mod:`base`): it folds by itself, with kernels that go on from a received accumulator in one
pass over memory. On gloo a fold waits for what it needs alone, and transfers of later steps are under way meanwhile;
on NCCL each step's transfers are one batch on its stream, beside which the folds of the step before run. Where the
processes of a domain have peer memory, they fold together (:mod:`.carry_peers`) and send each other no rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..core.layout import Interval, intersect, length
from ..core.numerics import accumulator_dtype
from ..local import kernels
from ..local.ops import readable
from .carry_items import ACCUMULATORS, KINDS, RESULTS, ROWS, Item, Message
from .carry_peers import Ready, joined
from .carry_plan import CarryPlan
from .links import Links, Transfer
from .wire import Wire

_AHEAD = 2  # steps by which receives are posted, and rows sent, before a fold needs them (gloo)


class Reduce(Protocol):
    """What the last stage does: ``op`` "sum" or "mean", scale, the result's dtype; ``empty`` is the sum of nothing."""

    @property
    def op(self) -> str: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def empty(self) -> float: ...


class Schedule:
    """What one process does, step by step.

    Args:
        carry: what all processes do.
        process: this one.
        rows: whether rows are sent inside domains; else they go over peer memory.

    Attributes:
        receives, sends: messages by step.
        folds: (piece, stage) by step.
        slots: where accumulators that are sent lie in their message, by (piece, stage): the message, first row.
    """

    def __init__(self, carry: CarryPlan, process: int, rows: bool = True) -> None:
        self.carry, self.process = carry, process
        self.sources = carry.plan.hosted_sources(process)
        self.sinks = [carry.plan.sinks[q] for q in carry.plan.hosted_sinks(process)]
        self.sends: dict[int, list[Message]] = defaultdict(list)
        self.receives: dict[int, list[Message]] = defaultdict(list)
        self.slots: dict[tuple[int, int], tuple[Message, int]] = {}
        for message in carry.messages_of(process):
            if message.kind == ROWS and not rows:
                continue
            mine = message.sender == process
            (self.sends if mine else self.receives)[message.step].append(message)
            if mine and message.kind == ACCUMULATORS:
                for item, first in message.placed:
                    self.slots[item.piece, item.number] = message, first
        self.folds: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for step, piece, stage in carry.folds_of(process):
            self.folds[step].append((piece, stage))
        self.steps = 1 + max((*self.sends, *self.receives, *self.folds), default=-1)

    def targets(self, interval: Interval) -> list[tuple[int, int]]:
        """The hosted sinks that hold the positions, and where in them they begin."""
        begin, end = interval
        return [(q, begin - lo) for q, (lo, hi) in enumerate(self.sinks) if lo <= begin and end <= hi]


def run(
    plan: Schedule,
    shards: Sequence[Tensor],
    outs: Sequence[Tensor],
    reduce: Reduce,
    wire: Wire,
    batched: bool = False,
    launches: Mapping[int, Sequence[Ready]] | None = None,
    number: int = 0,
) -> Iterator[None]:
    """Sum ``shards`` into ``outs``; a generator that stops once after the first transfers have started.

    Args:
        plan: this process's part of what is the same :class:`CarryPlan` on all processes.
        shards: hosted sources ``(|I_r|, *F)``, contiguous, at least one.
        outs: results ``(|O_q|, *F)`` of the hosted sinks, contiguous, in ``reduce.dtype``; overwritten.
        reduce: what the last stage does. A mean needs a plan that is ``counted``.
        wire: the processes, the timeout, the count of bytes.
        batched: each step's transfers are one batch, as NCCL needs them; the plan's ``lag`` is 2 then.
        launches: of every step, where the domain folds over peer memory (of a plan without ``rows``).
        number: of the call, for these.
    """
    if shards[0].shape[1:].numel() == 0:
        return
    if batched:
        wire.meet(shards[0].device)
    yield from _Run(plan, shards, outs, reduce, Links(wire, batched), launches, number).steps()


class _Run:
    """One call of :func:`run`. All tensors are ``(positions, width)`` here."""

    def __init__(
        self,
        plan: Schedule,
        shards: Sequence[Tensor],
        outs: Sequence[Tensor],
        reduce: Reduce,
        links: Links,
        launches: Mapping[int, Sequence[Ready]] | None,
        number: int,
    ) -> None:
        self.launches, self.number = launches, number
        self.plan, self.pieces, self.reduce, self.links = plan, plan.carry.pieces, reduce, links
        self.first, self.width = shards[0], shards[0].shape[1:].numel()
        self.dtypes = dict(zip(KINDS, (self.first.dtype, accumulator_dtype(self.first.dtype), reduce.dtype)))
        self.shards = {r: x.view(x.shape[0], self.width) for r, x in zip(plan.sources, shards)}
        self.readable = {r: readable(x) for r, x in self.shards.items()}
        self.outs = [out.view(out.shape[0], self.width) for out in outs]
        self.rows: dict[tuple[int, int], tuple[int, Tensor]] = {}  # received, by (piece, source): position, tensor
        self.accumulators: dict[tuple[int, int], Tensor] = {}  # received, by (piece, stage that left them)
        self.results: dict[int, Tensor] = {}  # by piece, of those that this process has but does not want
        self.buffers: dict[tuple[int, int], Tensor] = {}  # accumulators to be sent, by (step, receiver)
        self.arriving: dict[int, list[tuple[Message, Tensor, Transfer]]] = defaultdict(list)

    def steps(self) -> Iterator[None]:
        last, batched = max(self.plan.steps, 1 + max(self.launches or (), default=-1)), self.links.batched
        self.fill_empty()
        for step in range(1 if batched else 1 + _AHEAD):
            self.post_early(step)
        self.post_late(0)
        yield
        for step in range(last):
            self.post_early(step + 1 if batched else step + 1 + _AHEAD)
            if batched:
                if self.launches is not None:
                    self.links.settle()
                self.post_late(step + 1)
            self.take(step, ROWS)
            self.take(step, ACCUMULATORS)
            if self.launches is not None:
                for ready in self.launches.get(step, ()):
                    self.fold_over_peers(ready)
            else:
                for piece, stage in self.plan.folds.get(step, ()):
                    self.fold(piece, stage)
            if not batched:
                self.post_late(step + 1)
        for step in range(last):
            self.take(step, RESULTS)
        self.links.finish()
        self.copy_shared()
        self.links.wire.verify(self.outs)

    # Transfers

    def post_early(self, step: int) -> None:
        """Receive what arrives in a step, and send the rows that do."""
        for message in self.plan.receives.get(step, ()):
            tensor = self.result(message.items[0]) if message.kind == RESULTS and len(message.items) == 1 else None
            if tensor is None:
                tensor = self.new(message.positions, message.kind)
            self.arriving[step].append((message, tensor, self.links.receive(tensor, message.sender, _tag(message))))
        for message in self.plan.sends.get(step, ()):
            if message.kind == ROWS:
                self.send(message, [self.row(item) for item in message.items])

    def post_late(self, step: int) -> None:
        """Send what has been folded, or received, by now."""
        for message in self.plan.sends.get(step, ()):
            if message.kind == ACCUMULATORS:
                self.send(message, [self.buffers.pop((step, message.receiver))])
            elif message.kind == RESULTS:
                self.take(step - self.plan.carry.lag, RESULTS)  # which this process may only pass on
                self.send(message, [self.result(item) for item in message.items])
        self.links.flush()

    def send(self, message: Message, parts: list[Tensor]) -> None:
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.links.send(data, message.receiver, _tag(message))

    def take(self, step: int, kind: str) -> None:
        """Wait for what arrives of a kind in a step, and put it where it is looked for."""
        for entry in [e for e in self.arriving.get(step, ()) if e[0].kind == kind]:
            self.arriving[step].remove(entry)
            message, tensor, transfer = entry
            self.links.wait(transfer)
            tensor = readable(tensor) if kind == ROWS else tensor
            for item, first in message.placed:
                part = tensor[first : first + length(item.interval)]
                if kind == ROWS:
                    self.rows[item.piece, item.number] = item.interval[0], part
                elif kind == ACCUMULATORS:
                    self.accumulators[item.piece, item.number] = part
                elif len(message.items) > 1:
                    self.result(item).copy_(part)

    # Where things lie

    def new(self, positions: int, kind: str) -> Tensor:
        return self.first.new_empty((positions, self.width), dtype=self.dtypes[kind])

    def row(self, item: Item) -> Tensor:
        begin = self.plan.carry.plan.sources[item.number][0]
        return self.shards[item.number][item.interval[0] - begin : item.interval[1] - begin]

    def result(self, item: Item) -> Tensor:
        """Where the result of a piece is put: into the first sink that wants it, else aside."""
        targets = self.plan.targets(item.interval)
        if targets:
            sink, first = targets[0]
            return self.outs[sink][first : first + length(item.interval)]
        if item.piece not in self.results:
            self.results[item.piece] = self.new(length(item.interval), RESULTS)
        return self.results[item.piece]

    # Arithmetic

    def fold(self, index: int, number: int) -> None:
        piece, (_, sources, carried) = self.pieces[index], self.pieces[index].stages[number]
        begin = piece.interval[0]
        rows, starts = [], []
        for r in sources:
            if not length(intersect(self.plan.carry.plan.sources[r], piece.interval)):
                continue
            if r in self.readable:
                at, row = self.plan.carry.plan.sources[r][0], self.readable[r]
            else:
                at, row = self.rows.pop((index, r))
            rows.append(row)
            starts.append(at - begin)
        carry, out = self.accumulators.pop((index, number - 1)) if number else None, self.folded(index, number)
        if number + 1 < len(piece.stages):
            kernels.sum_rows_carry(out, carry, rows, starts, carried, False, None)
        else:
            kernels.sum_rows_carry(out, carry, rows, starts, carried, self.reduce.op == "mean", self.reduce.scale)

    def folded(self, index: int, number: int) -> Tensor:
        """Where a fold writes: into the message that carries it on, or the result."""
        piece = self.pieces[index]
        if number + 1 == len(piece.stages):
            return self.result(Item(piece.interval, index, -1))
        message, first = self.plan.slots[index, number]
        key = message.step, message.receiver
        if key not in self.buffers:
            self.buffers[key] = self.new(message.positions, ACCUMULATORS)
        return self.buffers[key][first : first + length(piece.interval)]

    def fold_over_peers(self, ready: Ready) -> None:
        launch, accumulators = ready.launch, None
        rows = []
        for source, (begin, end) in launch.rows:
            at = self.plan.carry.plan.sources[source][0]
            rows.append(self.readable[source][begin - at : end - at] if begin < end else self.readable[source][:0])
        if launch.goes_on and launch.folds:
            accumulators = joined([self.accumulators.pop((index, number - 1)) for index, number in launch.folds])
        outs = [self.folded(index, number) for index, number in launch.folds]
        spoils = self.links.wire.spoils()
        ready.call(outs, rows, ready.bounds, None, None, self.number, accumulators, launch.carried, spoils)

    def fill_empty(self) -> None:
        """Fill wanted positions that no source holds."""
        for gap in self.plan.carry.empty:
            for out, (lo, hi) in zip(self.outs, self.plan.sinks):
                begin, end = intersect(gap, (lo, hi))
                if begin < end:
                    out[begin - lo : end - lo].fill_(self.reduce.empty)

    def copy_shared(self) -> None:
        """Positions that several hosted sinks want have come to the first of them."""
        if len(self.outs) < 2:
            return
        for piece in self.pieces:
            targets = self.plan.targets(piece.interval)
            for sink, first in targets[1:]:
                n = length(piece.interval)
                self.outs[sink][first : first + n] = self.result(Item(piece.interval, -1, -1))


def _tag(message: Message) -> int:
    """The number that tells apart the messages of one call between two processes."""
    return message.step * len(KINDS) + KINDS.index(message.kind)
