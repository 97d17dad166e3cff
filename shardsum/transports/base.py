"""What a transport is: it yields rows, for each hosted sink one tensor and start per contributing source, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval
from .wire import Wire


@dataclass
class Rows:
    """What one sink sums: tensors ``(n_r, *F)`` in source order and their start relative to the sink's begin. What
    lies before or behind the sink does not count."""

    rows: list[Tensor]
    starts: list[int]


class Picked(NamedTuple):
    """The rows of one sink among the pieces of a process: which, and their starts."""

    pieces: list[int]
    starts: list[int]

    def of(self, tensors: Sequence[Tensor]) -> Rows:
        return Rows([tensors[i] for i in self.pieces], self.starts)


@dataclass
class Pending:
    """Transfers under way; ``sinks`` holds the rows of every hosted sink, readable after :meth:`wait`."""

    sinks: list[Rows]
    works: list[Any] = field(default_factory=list)  # transfers of the wire
    keep: Sequence[Tensor] = ()  # buffers that must live until the transfers end

    def wait(self, wire: Wire | None) -> list[Rows]:
        for work in self.works:
            assert wire is not None
            wire.wait(work, self.keep[0].device)
        self.works = []
        return self.sinks


class Mover(Protocol):
    """The exchange of one plan on one process, with everything decided that does not depend on tensors.

    ``start`` takes the hosted sources (contiguous, ``(|I_r|, *F)``). It moves bytes and never reads a tensor's values
    on the host.
    """

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending: ...


@dataclass(frozen=True)
class Layout:
    """What a :class:`Mover` is made for.

    Attributes:
        plan: the same on all processes, which start their movers in the same order.
        rank: this process.
        row_shape, dtype: of what the sources hold.
        header_bytes: of the wire (:attr:`.wire.Wire.header_bytes`).
    """

    plan: ExchangePlan
    rank: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    header_bytes: int

    @property
    def width(self) -> int:
        """Elements of a position."""
        return torch.Size(self.row_shape).numel()

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pick(self, pieces: Sequence[tuple[Interval, int]]) -> list[Picked]:
        """The rows of every hosted sink among pieces in source order: of each its interval, and which tensor it is."""
        found = []
        for q in self.plan.hosted_sinks(self.rank):
            lo, hi = self.plan.sinks[q]
            held = [(begin - lo, i) for (begin, end), i in pieces if max(begin, lo) < min(end, hi)]
            found.append(Picked([i for _, i in held], [start for start, _ in held]))
        return found


class Transport(Protocol):
    """Brings rows to the process that sums them.

    ``transfers`` predicts how many positions travel from which process to which: (sender, receiver, positions).
    ``ring``: an all_gather passes them on around a ring (NCCL), else every process sends its own to all (gloo).
    """

    name: str

    def prepare(self, layout: Layout) -> Mover: ...

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]: ...


def all_gather_transfers(world_size: int, positions: int, ring: bool) -> Iterator[tuple[int, int, int]]:
    """What travels in an all_gather of so many positions of each process, as :meth:`Transport.transfers`."""
    for a in range(world_size):
        if ring:
            yield a, (a + 1) % world_size, positions * (world_size - 1)
        else:
            yield from ((a, b, positions) for b in range(world_size) if b != a)
