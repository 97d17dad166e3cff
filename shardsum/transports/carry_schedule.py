"""What one process does of a :class:`.carry_plan.CarryPlan`, step by step, with all places known beforehand.

A call then allocates, launches and moves: it looks for nothing. Pieces that lie side by side, wherever they come from
and go to, are folded in one launch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..core.layout import Interval, intersect, length
from .carry_items import ACCUMULATORS, RESULTS, ROWS, Message
from .carry_plan import CarryPlan


class Place(NamedTuple):
    """Positions from ``first`` on, of a message, of a hosted sink (its index), or of what is kept of a piece (None)."""

    where: Message | int | None
    first: int


@dataclass
class Fold:
    """One launch.

    Attributes:
        interval: its positions: of one piece, or of several side by side.
        piece: the first of them.
        run: sources of the stage.
        sources, starts: those that hold any of it, hosted or come, and where their rows begin in the interval.
        came: the accumulators to go on from; None at the first stage.
        carried: as in :class:`.carry_items.Stage`.
        ends: whether the sums are complete then.
        to: where they go.
    """

    interval: Interval
    piece: int
    run: tuple[int, ...]
    sources: list[int]
    starts: list[int]
    came: Place | None
    carried: int
    ends: bool
    to: Place

    def goes_on_in(self, other: Fold) -> bool:
        """Whether the positions of another fold lie behind these in all that both read and write."""
        n = length(self.interval)
        places = [(self.to, other.to), (self.came, other.came)]
        return (
            self.interval[1] == other.interval[0]
            and (self.run, self.carried, self.ends) == (other.run, other.carried, other.ends)
            and all(a == b is None or (a and b and _follows(a, b, n)) for a, b in places)
        )


def _follows(a: Place, b: Place, n: int) -> bool:
    return a.where is b.where and a.where is not None and a.first + n == b.first


class Schedule:
    """What one process does, step by step.

    Args:
        carry: what all processes do.
        process: this one.
        rows: whether rows are sent inside domains; else they go over peer memory.

    Attributes:
        sources, sinks: the hosted ones; of sinks the intervals.
        places: where items of messages lie, by piece and number: accumulators that come or go, results that are filled.
        receives, sends: messages by step.
        folds: by step. Of what goes over peer memory there are launches instead (:mod:`.carry_peers`).
        steps: how many there are.
        gaps: wanted positions that no source holds: (sink, begin, end in it).
        shared: positions that several hosted sinks want: (sink, begin in it, first of them, begin in it, positions).
    """

    def __init__(self, carry: CarryPlan, process: int, rows: bool = True) -> None:
        self.carry, self.process = carry, process
        self.sources = carry.plan.hosted_sources(process)
        self.sinks = [carry.plan.sinks[q] for q in carry.plan.hosted_sinks(process)]
        self.sends: dict[int, list[Message]] = defaultdict(list)
        self.receives: dict[int, list[Message]] = defaultdict(list)
        self.places: dict[tuple[int, int], Place] = {}
        self._results: dict[int, Place] = {}
        for message in carry.messages_of(process):
            if message.kind == ROWS and not rows:
                continue
            mine = message.sender == process
            (self.sends if mine else self.receives)[message.step].append(message)
            if message.kind == ACCUMULATORS or (mine and self._can_fill(message)):
                message.is_filled = mine
                for item, first in zip(message.items, accumulate(message.sizes, initial=0)):
                    self.places[item.piece, item.number] = Place(message, first)
        self.steps = 1 + max((*self.sends, *self.receives, *(step for step, _, _ in self._stages)), default=-1)
        self.gaps = [
            (q, begin - lo, end - lo)
            for gap in carry.empty
            for q, (lo, hi) in enumerate(self.sinks)
            for begin, end in [intersect(gap, (lo, hi))]
            if begin < end
        ]
        self.shared: list[tuple[int, int, int, int, int]] = []
        for piece in carry.pieces if len(self.sinks) > 1 else ():
            targets = self.targets(piece.interval)
            self.shared += [(*target, *targets[0], length(piece.interval)) for target in targets[1:]]

    @cached_property
    def _stages(self) -> list[tuple[int, int, int]]:
        return self.carry.folds_of(self.process)

    def _can_fill(self, message: Message) -> bool:
        """Whether all of a message are results that are made here, wanted elsewhere alone, and in no other message."""
        return message.kind == RESULTS and all(
            not self.targets(item.interval)
            and (item.piece, item.number) not in self.places
            and self.carry.pieces[item.piece].stages[-1].process == self.process
            for item in message.items
        )

    def targets(self, interval: Interval) -> list[tuple[int, int]]:
        """The hosted sinks that hold the positions, and where in them they begin."""
        begin, end = interval
        return [(q, begin - lo) for q, (lo, hi) in enumerate(self.sinks) if lo <= begin and end <= hi]

    def result(self, index: int) -> Place:
        """Where the result of a piece is put: into the first sink that wants it, the message that it leaves in, or
        aside."""
        if index not in self._results:
            targets = self.targets(self.carry.pieces[index].interval)
            self._results[index] = Place(*targets[0]) if targets else self.places.get((index, -1), Place(None, 0))
        return self._results[index]

    def written(self, index: int, number: int) -> Place:
        """Where the fold of a piece at a stage writes."""
        goes_on = number + 1 < len(self.carry.pieces[index].stages)
        return self.places[index, number] if goes_on else self.result(index)

    @cached_property
    def folds(self) -> dict[int, list[Fold]]:
        folds: dict[int, list[Fold]] = defaultdict(list)
        for step, index, number in self._stages:
            fold, here = self._fold(index, number), folds[step]
            if here and here[-1].goes_on_in(fold) and self._hosts_rows(here[-1]) and self._hosts_rows(fold):
                here[-1].interval = here[-1].interval[0], fold.interval[1]
            else:
                here.append(fold)
        for several in folds.values():
            for fold in several:
                self._place_rows(fold)
        return dict(folds)

    def _fold(self, index: int, number: int) -> Fold:
        piece = self.carry.pieces[index]
        stage, ends = piece.stages[number], number + 1 == len(piece.stages)
        came = self.places[index, number - 1] if number else None
        carried = stage.carried if ends else 0
        return Fold(piece.interval, index, stage.sources, [], [], came, carried, ends, self.written(index, number))

    def _hosts_rows(self, fold: Fold) -> bool:
        others = [r for r in fold.run if r not in self.sources]
        return not any(length(intersect(self.carry.plan.sources[r], fold.interval)) for r in others)

    def _place_rows(self, fold: Fold) -> None:
        for r in fold.run:
            held = intersect(self.carry.plan.sources[r], fold.interval)
            if length(held):
                fold.sources.append(r)
                begin = self.carry.plan.sources[r][0] if r in self.sources else held[0]
                fold.starts.append(begin - fold.interval[0])
