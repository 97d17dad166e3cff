"""What a plan of carried accumulators is made of (:mod:`.carry_plan`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..core.layout import Interval, length

ROWS, ACCUMULATORS, RESULTS = "rows", "accumulators", "results"
KINDS = (ROWS, ACCUMULATORS, RESULTS)


class Run(NamedTuple):
    """Consecutive sources ``[first, last)`` of one domain."""

    domain: int
    first: int
    last: int


class Stage(NamedTuple):
    """One visit of an accumulator: ``process`` folds the rows of ``sources`` (in order; those that hold the position).

    ``carried``: contributions of earlier stages at every position of the piece, where the plan counts them.
    """

    process: int
    sources: tuple[int, ...]
    carried: int


class Piece(NamedTuple):
    """Positions that go the same way.

    ``deliveries``: who passes the result to whom, as (hops from the last stage, sender, receiver).
    """

    interval: Interval
    chunk: int
    stages: tuple[Stage, ...]
    wanted: tuple[int, ...]
    deliveries: tuple[tuple[int, int, int], ...]


class Item(NamedTuple):
    """Positions ``interval`` of a piece in a message. ``number``: of a row its source, of accumulators the stage that
    left them, of results -1."""

    interval: Interval
    piece: int
    number: int


@dataclass(eq=False)
class Message:
    """What ``sender`` gives to ``receiver`` in one step, one item behind the other.

    Attributes:
        is_filled: whether its items are folded into it where they are sent from, so that nothing is copied.
        sizes: positions of each item.
    """

    step: int
    kind: str
    sender: int
    receiver: int
    items: tuple[Item, ...]
    is_filled: bool = False

    def __post_init__(self) -> None:
        self.sizes = [length(item.interval) for item in self.items]
        self.positions = sum(self.sizes)

    @property
    def number(self) -> int:
        """It tells apart the messages of one call between two processes."""
        return self.step * len(KINDS) + KINDS.index(self.kind)
