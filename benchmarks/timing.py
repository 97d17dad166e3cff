"""Timing of several variants of one job in one run, and what to write beside the figures.

Variants take turns call by call, so that a slow moment of the machine hits all of them alike.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardsum import native


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


def take_turns(
    variants: Mapping[str, Callable[[], Any]], *, samples: int = 25, least_seconds: float = 2e-4
) -> dict[str, Timing]:
    """Time the variants in turns on the CPU.

    Args:
        variants: functions without arguments; each is called twice before anything is measured.
        samples: measurements of each variant.
        least_seconds: shorter calls are repeated within one measurement until they take about so long.
    """
    repeats = {}
    for name, call in variants.items():
        call()
        seconds = _seconds(call, 1)
        repeats[name] = max(1, round(least_seconds / max(seconds, 1e-7)))
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(samples):
        for name, call in variants.items():
            measured[name].append(_seconds(call, repeats[name]) / repeats[name])
    return {name: _summary(values) for name, values in measured.items()}


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - begin


def _summary(values: list[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[0], ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered)
    )


def environment() -> dict[str, Any]:
    """Hardware, versions, date and command: what a figure means nothing without."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": native.status().backend,
        "cpu_isa": native.status().cpu_isa,
    }


def cpu_name() -> str:
    """The processor's name with family, model and largest cache, as Linux knows them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = dict(line.split("\t", 1) for line in info.read_text().split("\n\n")[0].splitlines() if "\t" in line)
    fields = {k.strip(): v.strip(" \t:") for k, v in fields.items()}
    name = (
        f"{fields.get('model name', platform.machine())} family {fields.get('cpu family')} model {fields.get('model')}"
    )
    return f"{name}, cache {fields.get('cache size', 'unknown')}"
