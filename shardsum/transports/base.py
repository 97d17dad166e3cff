"""What a transport is: it yields rows, for each hosted sink one tensor and start per contributing source, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval
from .wire import Wire


class Rows(NamedTuple):
    """What one sink sums: tensors ``(n_r, *F)`` in source order and their start relative to the sink's begin. What
    lies before or behind the sink does not count."""

    rows: list[Tensor]
    starts: list[int]


@dataclass
class Pending:
    """Transfers under way; ``sinks`` holds the rows of every hosted sink, readable after :meth:`wait`."""

    sinks: list[Rows]
    transfer: Any = None  # of the wire; None: there is nothing to wait for
    keep: Sequence[Tensor] = ()  # buffers that must live until it ends

    def wait(self, wire: Wire | None) -> list[Rows]:
        if self.transfer is not None:
            assert wire is not None
            wire.wait(self.transfer, self.keep[0].device)
            self.transfer = None
        return self.sinks


class Transport:
    """The exchange of one plan on one process, with everything decided that does not depend on tensors.

    Args:
        plan: the same on all processes, which start their transfers in the same order.
        rank: this process.
        row_shape, dtype: of what the sources hold.
        header_bytes: of the wire (:attr:`.wire.Wire.header_bytes`).
    """

    def __init__(
        self, plan: ExchangePlan, rank: int, row_shape: tuple[int, ...], dtype: torch.dtype, header_bytes: int
    ) -> None:
        self.plan, self.rank, self.row_shape, self.dtype = plan, rank, row_shape, dtype
        self.header_bytes, self.width = header_bytes, torch.Size(row_shape).numel()
        self._decide()

    def _decide(self) -> None:
        """Decide the rest, and :meth:`_place` what comes of it."""
        raise NotImplementedError

    def _place(self, pieces: Sequence[tuple[Interval, int]]) -> None:
        """Note the rows of every hosted sink among pieces in source order: of each its interval, and which of the
        tensors of :meth:`_rows` it is."""
        self._sinks: list[tuple[list[int], list[int]]] = []
        for q in self.plan.hosted_sinks(self.rank):
            lo, hi = self.plan.sinks[q]
            held = [(begin - lo, i) for (begin, end), i in pieces if max(begin, lo) < min(end, hi)]
            self._sinks.append(([i for _, i in held], [start for start, _ in held]))

    def _rows(self, tensors: Sequence[Tensor]) -> list[Rows]:
        return [Rows([tensors[i] for i in pieces], starts) for pieces, starts in self._sinks]

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        """Begin to move the hosted sources (contiguous, ``(|I_r|, *F)``): bytes, whose values the host never reads."""
        raise NotImplementedError

    @staticmethod
    def transfers(plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        """What is predicted to travel: (sender, receiver, positions). ``ring``: an all_gather passes positions on
        around a ring (NCCL), else every process sends its own to all (gloo)."""
        raise NotImplementedError


def all_gather_transfers(world_size: int, positions: int, ring: bool) -> Iterator[tuple[int, int, int]]:
    """What travels in an all_gather of so many positions of each process, as :meth:`Transport.transfers`."""
    for a in range(world_size):
        if ring:
            yield a, (a + 1) % world_size, positions * (world_size - 1)
        else:
            yield from ((a, b, positions) for b in range(world_size) if b != a)
