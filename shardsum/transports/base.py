"""What a transport is: it yields rows, for each hosted sink one tensor and start per contributing source, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..core.layout import ExchangePlan
from .wire import Wire


@dataclass
class Rows:
    """What one sink sums: tensors ``(n_r, *F)`` in source order and their start relative to the sink's begin. What
    lies before or behind the sink does not count."""

    rows: list[Tensor]
    starts: list[int]


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


class Transport(Protocol):
    """Brings rows to the process that sums them.

    ``start`` is called by every process with the same plan and its own hosted source tensors (contiguous,
    ``(|I_r|, *F)``), in the same order of calls. It moves bytes and never reads a tensor's values on the host.
    ``transfers`` predicts how many positions travel from which process to which: (sender, receiver, positions).
    ``ring``: an all_gather passes them on around a ring (NCCL), else every process sends its own to all (gloo).
    """

    name: str

    def start(self, plan: ExchangePlan, shards: Sequence[Tensor], rank: int, wire: Wire | None) -> Pending: ...

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]: ...


def all_gather_transfers(world_size: int, positions: int, ring: bool) -> Iterator[tuple[int, int, int]]:
    """What travels in an all_gather of so many positions of each process, as :meth:`Transport.transfers`."""
    for a in range(world_size):
        if ring:
            yield a, (a + 1) % world_size, positions * (world_size - 1)
        else:
            yield from ((a, b, positions) for b in range(world_size) if b != a)


def rows_of_sink(plan: ExchangePlan, sink: int, pieces: Iterable[tuple[int, Tensor]]) -> Rows:
    """The rows of one sink from pieces ``(begin, tensor)`` in source order."""
    lo, hi = plan.sinks[sink]
    held = [(t, begin - lo) for begin, t in pieces if max(begin, lo) < min(begin + t.shape[0], hi)]
    return Rows([t for t, _ in held], [start for _, start in held])
