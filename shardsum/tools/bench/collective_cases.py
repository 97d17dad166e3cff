"""Collectives that are measured: message sizes, and what each process holds of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from ...core.layout import Interval, intervals_of, split_evenly


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collective on ``bytes`` of bf16 a process, padded."""

    bytes: int
    profile: Literal["full", "even", "uneven", "documents"]

    def __str__(self) -> str:
        return f"{self.operation} {self.profile} bf16 {self.bytes} bytes"

    @property
    def operation(self) -> str:
        return "reduce_scatter" if self.profile == "documents" else "all_reduce"

    @property
    def width(self) -> int:
        return 512 if self.bytes >= 64 << 10 else 64


def quick() -> list[Case]:
    return [Case(bytes=n, profile=p) for n in (16 << 10, 256 << 10) for p in ("full", "uneven", "documents")]


def full(device: str) -> list[Case]:
    sizes = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] if device == "cuda" else [64 << 10, 1 << 20, 8 << 20]
    cases = []
    for n in sizes:
        cases.append(Case(bytes=n, profile="full"))
        if n >= 1 << 20:
            cases += [Case(bytes=n, profile=p) for p in ("even", "uneven", "documents")]
    return cases


def lengths_of(profile: str, count: int, size: int) -> list[int]:
    """Valid rows of every process's padded buffer."""
    if profile == "full":
        return [size] * count
    if profile == "even":
        return [size // 2] * count
    return [round(size * (0.7 - 0.4 * r / max(1, count - 1))) for r in range(count)]


def packed_documents(count: int, size: int, mean: int) -> list[Interval]:
    """Per even chunk, the interval from the start of its oldest document to its end."""
    draw, starts = random.Random(0), [0]
    while starts[-1] < size:
        starts.append(starts[-1] + max(1, round(draw.expovariate(1 / mean))))
    return [(max(s for s in starts if s <= begin), end) for begin, end in intervals_of(split_evenly(size, count))]
