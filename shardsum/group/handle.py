"""A collective under way, and how one is started on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from .job import Job

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


def start_on_cpu(planner: Planner, name: str, job: Job, deliver: Callable[[list[Tensor]], Any]) -> Handle[Any]:
    """The handle of a job whose first transfers have started."""

    def complete() -> list[Tensor]:  # perhaps in a later call of the group
        try:
            return job.result()
        except BaseException as error:
            planner.fail(name, error)
            raise

    if job.more and planner.executor.wire is not None:
        planner.executor.wire.leave_open(complete)

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
