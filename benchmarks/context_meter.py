"""Measures a call on all processes of a benchmark together: time, the host's part of it, memory, error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardsum.tools.bench.timing import Processes, Timing, turns


class Meter:
    """Every figure is that of the slowest (largest) process.

    Args:
        device: where the work runs.
        samples: how often each way is timed, in turns with the others.
        most_error: a relative error above this is no rounding.
    """

    def __init__(self, device: torch.device, samples: int, most_error: float) -> None:
        self.device, self.samples, self.on_gpu, self.most_error = device, samples, device.type == "cuda", most_error
        self.together = dist.is_initialized()
        self.processes = Processes(dist.new_group(backend="gloo") if self.together else None)

    def times(self, calls: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Of calls in a row, as the layers of a model: on a GPU as many as take 50 ms, at most 5."""
        samplers = {}
        for name, call in calls.items():
            once = self.seconds(call)
            samplers[name] = partial(self.seconds, call, min(5, max(1, round(0.05 / once))) if self.on_gpu else 1)
        return turns(samplers, self.samples)

    def seconds(self, call: Callable[[], Any], passes: int = 1) -> float:
        self.processes.slowest(0)
        self._sync()
        begin = time.perf_counter()
        for _ in range(passes):
            call()
        self._sync()
        return self.processes.slowest((time.perf_counter() - begin) / passes)

    def host(self, call: Callable[[], Any]) -> float:
        """Seconds until the call returns, the GPU being idle before."""
        measured = []
        for _ in range(3):
            self.processes.slowest(0)
            self._sync()
            begin = time.perf_counter()
            call()
            measured.append(time.perf_counter() - begin)
        self._sync()
        return self.processes.slowest(median(measured))

    def _sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak(self, call: Callable[[], Any], whole: bool = False) -> int:
        """Bytes that torch has allocated at most at a time during the call, beyond those before it; ``whole``: these
        with it (on a GPU)."""
        return int(self.processes.slowest(self._peak_gpu(call, whole) if self.on_gpu else _peak_cpu(call)))

    def _peak_gpu(self, call: Callable[[], Any], whole: bool) -> int:
        self._sync()
        before = 0 if whole else torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    def error(self, found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        """Norm of the difference over the norm, of all processes' parts together."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for a, b in zip(found, exact):
            sums += torch.stack([(a.double() - b).square().sum(), b.double().square().sum()])
        if self.together:
            dist.all_reduce(sums)
        error = (sums[0] / sums[1]).sqrt().item()
        assert error < self.most_error, f"a relative error of {error}"
        return error


def _peak_cpu(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
