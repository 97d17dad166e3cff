"""Accumulators travel from domain to domain, not rows: a :class:`.carry_schedule.Schedule` is run by point-to-point
transfers.

Not a transport of rows (:mod:`.base`): it folds by itself, with kernels that go on from a received accumulator in one
pass over memory. On gloo a fold waits for what it needs alone, and transfers of later steps are under way meanwhile;
on NCCL each step's transfers are one batch on its stream, beside which the folds of the step before run. Where the
processes of a domain have peer memory, they fold together (:mod:`.carry_peers`) and send each other no rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.layout import length
from ..core.numerics import Reduce, accumulator_dtype
from ..local import kernels
from ..local.ops import readable
from .carry_items import ACCUMULATORS, KINDS, RESULTS, ROWS, Item, Message
from .carry_peers import Launch, joined
from .carry_schedule import Fold, Place, Schedule
from .wire import Wire

_AHEAD = 2  # steps by which receives are posted, and rows sent, before a fold needs them (gloo)
_MOST_SENDS = 64  # that nobody has waited for (gloo)


class CarriedCall:
    """One call. All tensors are ``(positions, width)`` inside.

    Args:
        schedule: what this process does of the plan that all processes share.
        shards: hosted sources ``(|I_r|, *F)``, contiguous, at least one.
        outs: results ``(|O_q|, *F)`` of the hosted sinks, contiguous, in ``reduce.dtype``; overwritten.
        reduce: what the last stage does. A mean needs a plan that is ``counted``.
        wire: the processes, the timeout, the count of bytes.
        launches: of every step, where the domain folds over peer memory (the schedule has no ``rows`` then).
        number: of the call, for these.
    """

    def __init__(
        self,
        schedule: Schedule,
        shards: Sequence[Tensor],
        outs: Sequence[Tensor],
        reduce: Reduce,
        wire: Wire,
        launches: Mapping[int, Sequence[Launch]] | None,
        number: int,
    ) -> None:
        self.schedule, self.reduce, self.wire = schedule, reduce, wire
        self.batched = schedule.carry.lag == 2  # each step's transfers are one batch, as NCCL needs them
        self.launches, self.number = launches, number
        self.first, self.width = shards[0], shards[0].shape[1:].numel()
        self.dtypes = dict(zip(KINDS, (self.first.dtype, accumulator_dtype(self.first.dtype), reduce.dtype)))
        self.shards = {r: _flat(x, self.width) for r, x in zip(schedule.sources, shards)}
        self.readable = {r: readable(x) for r, x in self.shards.items()}
        self.outs = [_flat(out, self.width) for out in outs]
        self.rows: dict[tuple[int, int], Tensor] = {}  # received, by (piece, source)
        self.folded: dict[Message, Tensor] = {}  # accumulators that have come; what is folded into what is sent
        self.results: dict[int, Tensor] = {}  # by piece, of those that this process has but does not want
        self.arriving: dict[int, list[tuple[Message, Tensor, Any]]] = defaultdict(list)
        self.sent: deque[tuple[Tensor, Any]] = deque()  # with what the wire waits for

    def steps(self) -> Iterator[None]:
        """Sum the shards; stops once after the first transfers have started."""
        if self.width == 0:
            return
        last, batched = max(self.schedule.steps, 1 + max(self.launches or (), default=-1)), self.batched
        if batched:
            self.wire.meet(self.first.device)
        for sink, begin, end in self.schedule.gaps:
            self.outs[sink][begin:end].fill_(self.reduce.empty)
        for step in range(1 if batched else 1 + _AHEAD):
            self.post_early(step)
        self.post_late(0)
        yield
        for step in range(last):
            self.post_early(step + 1 if batched else step + 1 + _AHEAD)
            if batched:
                if self.launches is not None:  # see docs/engineering/peer.md, "Beside NCCL"
                    self.wait(self.batch)
                self.post_late(step + 1)
            self.take(step, ROWS)
            self.take(step, ACCUMULATORS)
            if self.launches is not None:
                for launch in self.launches.get(step, ()):
                    self.fold_over_peers(launch)
            else:
                for fold in self.schedule.folds.get(step, ()):
                    self.fold(fold)
            for message in self.schedule.receives.get(step, ()):
                if message.kind == ACCUMULATORS:
                    del self.folded[message]
            if not batched:
                self.post_late(step + 1)
        for step in range(last):
            self.take(step, RESULTS)
        for _, transfer in self.sent:
            self.wait(transfer)
        for sink, begin, first_sink, first, n in self.schedule.shared:  # they have come to the first of them
            self.outs[sink][begin : begin + n] = self.outs[first_sink][first : first + n]
        self.wire.verify(self.outs)

    # Transfers

    def post_early(self, step: int) -> None:
        """Receive what arrives in a step, and send the rows that do."""
        for message in self.schedule.receives.get(step, ()):
            if message.kind == RESULTS and len(message.items) == 1:
                tensor = self.result(message.items[0])
            else:
                tensor = self.new(message.positions, message.kind)
            transfer = self.wire.recv(tensor, message.sender, message.number)
            self.arriving[step].append((message, tensor, transfer))
        for message in self.schedule.sends.get(step, ()):
            if message.kind == ROWS:
                self.send(message, [self.row(item) for item in message.items])

    def post_late(self, step: int) -> None:
        """Send what has been folded, or received, by now."""
        for message in self.schedule.sends.get(step, ()):
            if message.kind == RESULTS:
                self.take(step - self.schedule.carry.lag, RESULTS)  # which this process may only pass on
            if message.is_filled:
                self.send(message, [self.folded.pop(message) if message.kind == ACCUMULATORS else self.folded[message]])
            elif message.kind == RESULTS:
                self.send(message, [self.result(item) for item in message.items])
        self.batch = self.wire.flush()

    def send(self, message: Message, parts: list[Tensor]) -> None:
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.sent.append((data, self.wire.send(data, message.receiver, message.number)))
        if len(self.sent) > _MOST_SENDS and not self.batched:
            self.wait(self.sent.popleft()[1])

    def wait(self, transfer: Any) -> None:
        """Until it is done: the host on gloo, at most the timeout; the current stream on CUDA."""
        self.wire.wait(transfer, self.first.device)

    def take(self, step: int, kind: str) -> None:
        """Wait for what arrives of a kind in a step, and put it where it is looked for."""
        arriving = self.arriving.get(step)
        if not arriving:
            return
        self.arriving[step] = [entry for entry in arriving if entry[0].kind != kind]
        for message, tensor, transfer in arriving:
            if message.kind != kind:
                continue
            self.wait(transfer)
            if kind == ACCUMULATORS:
                self.folded[message] = tensor
            elif kind == ROWS:
                for item, part in zip(message.items, readable(tensor).split(message.sizes)):
                    self.rows[item.piece, item.number] = part
            elif len(message.items) > 1:
                torch._foreach_copy_([self.result(item) for item in message.items], tensor.split(message.sizes))

    # Where things lie

    def new(self, positions: int, kind: str) -> Tensor:
        return self.first.new_empty((positions, self.width), dtype=self.dtypes[kind])

    def row(self, item: Item) -> Tensor:
        begin = self.schedule.carry.plan.sources[item.number][0]
        return self.shards[item.number][item.interval[0] - begin : item.interval[1] - begin]

    def result(self, item: Item) -> Tensor:
        return self.at(self.schedule.result(item.piece), length(item.interval), item.piece)

    def at(self, place: Place, n: int, piece: int) -> Tensor:
        """So many positions at a place."""
        where, first = place
        if where is None:
            if piece not in self.results:
                self.results[piece] = self.new(n, RESULTS)
            return self.results[piece]
        if isinstance(where, int):
            whole = self.outs[where]
        elif where in self.folded:
            whole = self.folded[where]
        else:
            whole = self.folded[where] = self.new(where.positions, where.kind)
        return whole if n == whole.shape[0] else whole[first : first + n]

    # Arithmetic

    def fold(self, fold: Fold) -> None:
        n, piece = length(fold.interval), fold.piece
        rows = [self.readable[r] if r in self.readable else self.rows.pop((piece, r)) for r in fold.sources]
        carry = None if fold.came is None else self.at(fold.came, n, piece)
        mean, scale = (self.reduce.op == "mean", self.reduce.scale) if fold.ends else (False, None)
        kernels.sum_rows(self.at(fold.to, n, piece), carry, rows, fold.starts, fold.carried, mean, scale)

    def fold_over_peers(self, launch: Launch) -> None:
        pieces, accumulators = self.schedule.carry.pieces, None
        rows = []
        for source, (begin, end) in launch.rows:
            at = self.schedule.carry.plan.sources[source][0]
            rows.append(self.readable[source][begin - at : end - at] if begin < end else self.readable[source][:0])
        sizes = [length(pieces[index].interval) for index, _ in launch.folds]
        if launch.goes_on and launch.folds:
            came = [self.schedule.places[index, number - 1] for index, number in launch.folds]
            accumulators = joined([self.at(p, n, index) for p, n, (index, _) in zip(came, sizes, launch.folds)])
        places = [self.schedule.written(index, number) for index, number in launch.folds]
        outs = [self.at(p, n, index) for p, n, (index, _) in zip(places, sizes, launch.folds)]
        spoils = self.wire.spoils()
        launch.call(outs, rows, launch.bounds, None, self.number, accumulators, launch.carried, spoils)


def _flat(x: Tensor, width: int) -> Tensor:
    return x if x.dim() == 2 else x.view(x.shape[0], width)
