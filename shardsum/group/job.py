"""An exchange under way."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

from torch import Tensor

from ..transports import Wire


class Job:
    """An exchange under way; the first transfers have started. ``result()`` completes it; called again after an error
    it raises that error. A thread of another group may complete it: who comes then waits.

    Args:
        outs: the results, once it is complete.
        steps: what is left to do; stops once after the first transfers have started.
        more: whether ``steps`` will start further transfers.
        wire: what they travel on.
    """

    def __init__(self, outs: list[Tensor], steps: Iterator[None], more: bool = False, wire: Wire | None = None) -> None:
        self.more = more
        self._wire = wire
        self._outs, self._steps = outs, steps
        self._error: BaseException | None = None
        self._lock = Lock()
        next(steps, None)

    def result(self) -> list[Tensor]:
        with self._lock:
            return self._completed()

    def _completed(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        try:
            for _ in self._steps:
                pass
        except BaseException as error:
            self._error = error
            if self.more and self._wire is not None:
                self._wire.fail(error)
            raise
        self.more = False
        return self._outs
