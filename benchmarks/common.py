"""What the programs of this folder share: their options, how they start, and what they measure of a call."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardsum.tools.bench.rows import Report, environment
from shardsum.tools.bench.timing import EagerSampler, Processes, Timing, turns
from shardsum.tools.launcher import launched


def parser(text: str | None, samples: int, **integers: int) -> argparse.ArgumentParser:
    """Options of a program: its device, how often it measures, where its rows go, and others with their defaults."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--samples", type=int, default=samples)
    found.add_argument("--json", type=Path, help="where process 0 writes the rows")
    for name, default in integers.items():
        found.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return found


def start(args: argparse.Namespace, run: Callable[[argparse.Namespace, torch.device], Any]) -> None:
    """``run(args, device)`` on ``args.device``: one thread on a CPU, or a GPU a process, under torchrun together."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells every start and stop otherwise
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with launched(args.device, 120) as device:
        if device.type == "cpu":
            torch.set_num_threads(1)
        run(args, device)


def report_of(args: argparse.Namespace, **facts: Any) -> Report:
    """Where rows go, introduced."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    report = Report(args.json, environment() | {"device": args.device} | facts, first)
    report.introduce()
    return report


def ms(timing: Timing) -> str:
    low, middle, high = (f"{1e3 * t:.4g}" for t in (timing.p20, timing.median, timing.p80))
    return f"{middle} [{low}, {high}]"


class Meter:
    """Every figure is that of the slowest (largest) process.

    Args:
        device: where the work runs.
        samples: how often each way is timed, in turns with the others.
        most_error: a relative error above this is no rounding.
    """

    def __init__(self, device: torch.device, samples: int, most_error: float = 0.0) -> None:
        self.device, self.samples, self.on_gpu, self.most_error = device, samples, device.type == "cuda", most_error
        self.processes = Processes.launched()

    def sampler(self, call: Callable[[], Any], count: int = 1, wait: bool = True) -> EagerSampler:
        """Of ``count`` calls in a row; ``wait``: until a GPU has done them, else until the last returns."""
        return EagerSampler([call], self.processes, self.device.type, count, wait=wait)

    def times(self, calls: Mapping[str, Callable[[], Any]], count: int | None = None) -> dict[str, Timing]:
        """Of calls in a row, as the layers of a model; by default, on a GPU as many as take 50 ms, at most 5."""
        samplers = {name: self.sampler(call, count or 1) for name, call in calls.items()}
        if self.on_gpu and count is None:
            for sample in samplers.values():
                sample.count = min(5, max(1, round(0.05 / sample())))
        return turns(samplers, self.samples)

    def host(self, call: Callable[[], Any]) -> float:
        """Seconds until the call returns, the GPU being idle before."""
        sample = self.sampler(call, wait=False)
        return median(sample() for _ in range(self.samples))

    def peak(self, call: Callable[[], Any], whole: bool = False) -> int:
        """Bytes that torch has allocated at most at a time during the call, beyond those before it; ``whole``: these
        with it (on a GPU)."""
        return int(self.processes.slowest(_peak_gpu(call, whole) if self.on_gpu else _peak_cpu(call)))

    def error(self, found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        """Norm of the difference over the norm, of all processes' parts together."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for a, b in zip(found, exact):
            sums += torch.stack([(a.double() - b).square().sum(), b.double().square().sum()])
        if dist.is_initialized():
            dist.all_reduce(sums)
        error = (sums[0] / sums[1]).sqrt().item()
        assert error < self.most_error, f"a relative error of {error}"
        return error


def _peak_gpu(call: Callable[[], Any], whole: bool) -> int:
    torch.cuda.synchronize()
    before = 0 if whole else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def _peak_cpu(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
