"""Rows are the shards themselves, in place: one process, nothing moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..core.layout import ExchangePlan
from .base import Layout, Mover, Pending
from .wire import Wire


class Local:
    name = "local"

    def prepare(self, layout: Layout) -> Mover:
        return _Local(layout)

    def transfers(self, plan: ExchangePlan, ring: bool) -> Iterable[tuple[int, int, int]]:
        return ()


class _Local:
    def __init__(self, layout: Layout) -> None:
        self._picked = layout.pick([(interval, r) for r, interval in enumerate(layout.plan.sources)])

    def start(self, shards: Sequence[Tensor], wire: Wire | None) -> Pending:
        return Pending([sink.of(shards) for sink in self._picked])
