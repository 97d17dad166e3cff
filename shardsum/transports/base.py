"""What a transport is: it yields rows, for each hosted sink one tensor and start per contributing source, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """How rows come to be.

    ``start`` is called by every process with the same plan and its own hosted source tensors (contiguous,
    ``(|I_r|, *F)``), in the same order of calls. It moves bytes and never reads a tensor's values on the host.
    ``egress`` and ``ingress`` predict the positions that each process sends to and receives from others.
    """

    name: str

    def start(self, plan: ExchangePlan, shards: Sequence[Tensor], rank: int, wire: Wire | None) -> Pending: ...

    def egress(self, plan: ExchangePlan) -> list[int]: ...

    def ingress(self, plan: ExchangePlan) -> list[int]: ...


def rows_of_sink(plan: ExchangePlan, sink: int, pieces: Iterable[tuple[int, Tensor]]) -> Rows:
    """The rows of one sink from pieces ``(begin, tensor)`` in source order."""
    lo, hi = plan.sinks[sink]
    held = [(t, begin - lo) for begin, t in pieces if max(begin, lo) < min(begin + t.shape[0], hi)]
    return Rows([t for t, _ in held], [start for _, start in held])
