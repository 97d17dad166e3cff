"""Timing of several variants of one job in one run: in turns, so that a slow moment of the machine hits all alike.

A variant is one call, or a list of calls on buffers of their own, taken one after another so that none finds its data
in a cache. :class:`EagerSampler` times calls as they run, :class:`GraphSampler` calls captured in a CUDA graph. With
several processes every figure is that of the slowest one; they all time the same variants in the same order.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]

_MOST_NODES = 400  # calls in one CUDA graph
_CACHES = {"cpu": 1, "cuda": 4}  # a few cores hardly have all of their processor's cache


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median, the 20th and 80th percentile as its spread, and the least one."""

    median: float
    least: float
    p20: float
    p80: float
    samples: int

    def __str__(self) -> str:
        return f"{self.median * 1e6:.4g} us [{self.p20 * 1e6:.4g}, {self.p80 * 1e6:.4g}], least {self.least * 1e6:.4g}"


class Processes:
    """Those that measure together.

    Args:
        group: a process group on the host (gloo); None for a lone process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @classmethod
    def launched(cls) -> Processes:
        """All that the launcher started. Collective."""
        return cls(dist.new_group(backend="gloo") if dist.is_initialized() else None)

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.group is None or dist.get_rank() == 0

    def slowest(self, value: float) -> float:
        """The largest value of all processes; returns when all have come."""
        if self.group is None:
            return value
        everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, torch.tensor([value], dtype=torch.float64), group=self.group)
        return max(float(v) for v in everyone)


class Sampler:
    """One variant, ready: calling it measures once and gives seconds a call.

    Attributes:
        output: what the last call returned; its values are those of the last measurement.
    """

    output: Any

    def __call__(self) -> float:
        raise NotImplementedError


class EagerSampler(Sampler):
    """Calls as they run.

    Args:
        device: "cuda": the GPU is idle before, and the time is that until it has done them all.
        count: calls in one measurement; None: as many as take ``least_seconds``.
        wait: False: until the last call returns, as long as it keeps the host busy.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        processes: Processes,
        device: str = "cpu",
        count: int | None = None,
        least_seconds: float = 2e-4,
        wait: bool = True,
    ) -> None:
        self.calls, self.processes, self.count = itertools.cycle(calls), processes, count or 1
        self.on_gpu, self.wait = device == "cuda", wait
        self()
        if count is None:
            self.count = max(1, round(least_seconds / max(self(), 1e-7)))

    def __call__(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        self.processes.slowest(0)
        begin = time.perf_counter()
        for call in itertools.islice(self.calls, self.count):
            self.output = call()
        if self.on_gpu and self.wait:
            torch.cuda.synchronize()
        return self.processes.slowest((time.perf_counter() - begin) / self.count)


class GraphSampler(Sampler):
    """Calls that enqueue work on the current CUDA device, timed as one CUDA graph."""

    def __init__(self, calls: Sequence[Call], least_seconds: float, processes: Processes) -> None:
        self.processes = processes
        for call in calls:  # warm up: compiling, loading and first uses cannot be captured
            call()
        seconds = self.processes.slowest(self._elapsed(lambda: [call() for call in calls])) / len(calls)
        passes = min(round(least_seconds / max(seconds, 1e-7)), _MOST_NODES) // len(calls)
        self.count = max(1, passes) * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for i in range(self.count):
                self.output = calls[i % len(calls)]()

    def __call__(self) -> float:
        self.processes.slowest(0)
        self.graph.replay()  # brings processes together, and hides the launch of what is measured
        return self.processes.slowest(self._elapsed(self.graph.replay) / self.count)

    def _elapsed(self, run: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def sampler(
    calls: Call | Sequence[Call],
    *,
    device: str = "cpu",
    least_seconds: float | None = None,
    processes: Processes | None = None,
) -> Sampler:
    """Prepare a variant: eager calls on the CPU, a CUDA graph on a GPU.

    Args:
        calls: functions without arguments.
        device: "cpu" or "cuda".
        least_seconds: shorter calls are repeated within one measurement until they take about so long (default 0.2 ms
            on the CPU, 2 ms on a GPU).
        processes: those that measure it together.
    """
    calls, processes = [calls] if callable(calls) else list(calls), processes or Processes()
    if device == "cuda":
        return GraphSampler(calls, least_seconds or 2e-3, processes)
    return EagerSampler(calls, processes, least_seconds=least_seconds or 2e-4)


def turns(samplers: Mapping[str, Callable[[], float]], samples: int) -> dict[str, Timing]:
    """``samples`` measurements of each prepared variant, in turns."""
    measured: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(samples):
        for name, sample in samplers.items():
            measured[name].append(sample())
    return {name: summary(values) for name, values in measured.items()}


def host_seconds(calls: Sequence[Call], processes: Processes, device_seconds: float) -> float:
    """Median seconds that the host is busy with an eager call that enqueues ``device_seconds`` of work on a GPU."""
    count = min(32, max(4, round(5e-3 / device_seconds)))  # the queue must not fill
    sample = EagerSampler(calls, processes, "cuda", -(-count // len(calls)) * len(calls), wait=False)
    found = statistics.median(sample() for _ in range(7))
    torch.cuda.synchronize()
    return found


def summary(values: Sequence[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[0], ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered)
    )


def rotation(device: str, useful_bytes: int, most: int) -> tuple[int, bool]:
    """How many sets of buffers take turns, and whether that is too much for the last cache to hold.

    As much as the cache, on a GPU four times, where ``most`` sets suffice for it. Where they do not, one: what is
    small is in the cache in a training step too, and several sets would leave open how much of them is.
    """
    count = math.ceil(_CACHES[device] * cache_bytes(device) / max(1, useful_bytes))
    return (count, True) if count <= most else (1, False)


def cache_bytes(device: str) -> int:
    """The largest cache: a GPU's L2, or what Linux says of the first core."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) << 10 for s in sizes if s.endswith("K")), default=64 << 20)
