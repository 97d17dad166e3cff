"""A collective under way, for its user and for the group, and how one is started on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from ..transports import Wire

if TYPE_CHECKING:
    from .planner import Planner


T = TypeVar("T")


class Handle(Generic[T]):
    """A collective under way. ``wait()`` returns its result; on CUDA it only makes the current stream wait.

    On the CPU a large message travels in several steps. A process takes them in ``wait()``, or in its next call of any
    group: until then, others may wait for it. Where several of its threads make calls, a thread of its own takes them.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Any = None

    def wait(self) -> T:
        """The result; blocks the host on gloo only."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


class Job:
    """An exchange under way; the first transfers have started. ``result()`` completes it; called again after an error
    it raises that error. A call of another group may complete it in its own thread; who asks meanwhile waits for that.

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


def start_on_cpu(planner: Planner, name: str, job: Job, deliver: Callable[[list[Tensor]], Any]) -> Handle[Any]:
    """The handle of a job on the CPU. Where the job has more transfers to start, it is completed by ``wait()`` or by
    the next call of any group, whichever comes first."""

    def complete() -> list[Tensor]:  # perhaps in a later call of the group
        try:
            return job.result()
        except BaseException as error:
            planner.fail(name, error)
            raise

    if job.more and planner.wire is not None:
        planner.wire.leave_open(complete)

    def finish() -> Any:
        with planner.agreement.busy:
            if job.more:
                try:
                    planner.close_open_call()
                except RuntimeError as error:
                    planner.fail(name, error)
            return deliver(complete())

    return Handle(finish)


def start_on_stream(
    stream: torch.cuda.Stream,
    tensors: list[Tensor],
    run: Callable[[], list[Tensor]],
    deliver: Callable[[list[Tensor]], Any],
) -> Handle[Any]:
    """Run on ``stream`` after the current one's work; the handle makes the stream that waits wait for it.

    ``tensors`` are what ``run`` reads and writes.
    """
    device = tensors[0].device
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        results = run()
    for t in tensors:
        t.record_stream(stream)
    done = stream.record_event()

    def join() -> Any:
        waiting = torch.cuda.current_stream(device)
        waiting.wait_event(done)
        for t in results:
            t.record_stream(waiting)
        return deliver(results)

    return Handle(join)
