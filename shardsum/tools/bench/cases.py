"""Local sums that are measured: shapes, dtypes and how long each virtual rank's shard is; and packed documents."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...core.layout import Interval, split_evenly
from ...training.context_chunks import plan_chunks

Profile = Literal["full", "random", "causal", "skewed", "seed"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SEED_LENGTHS = [8, 12, 10, 18]  # of 20
SKEWED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sum of R shards padded to ``(size, width)``.

    Attributes:
        operation: "ragged_sum"; "masked_sum" (arbitrary positions instead of lengths); "modes", a ragged sum in every
            output mode; "allocating", a ragged sum into new memory.
        profile: see :func:`lengths_of`.
        fill: the mean share of valid positions that "random" draws and a mask has.
    """

    num_ranks: int
    size: int
    width: int
    dtype: str
    profile: Profile = "random"
    fill: float = 0.5
    operation: Literal["ragged_sum", "masked_sum", "modes", "allocating"] = "ragged_sum"

    def __str__(self) -> str:
        profile = f"random {self.fill:g}" if self.profile == "random" else self.profile
        return f"{self.operation} {profile} {self.dtype} R={self.num_ranks} {self.size}x{self.width}"


def lengths_of(case: Case) -> list[int]:
    """Valid positions of every virtual rank.

    full: all. causal: (r + 1) / R of them. skewed: all of one rank's, 64 of the others'. seed: 8, 12, 10, 18 of 20.
    random: drawn from a distribution over [0, size] with mean ``fill``, one from each R-th part of it, shuffled.
    """
    size, count = case.size, case.num_ranks
    if case.profile in ("full", "causal"):
        return [end for _, end in held_by(case.profile, count, size)]
    if case.profile == "skewed":
        return [size if r == count // 2 else min(size, SKEWED_ROWS) for r in range(count)]
    if case.profile == "seed":
        return list(SEED_LENGTHS)
    draw = random.Random(count)
    power = (1 - case.fill) / case.fill  # the mean of u ** power is 1 / (1 + power)
    lengths = [round(size * ((r + draw.uniform(0.25, 0.75)) / count) ** power) for r in range(count)]
    draw.shuffle(lengths)
    return lengths


SEED = Case(num_ranks=4, size=20, width=1, dtype="fp32", profile="seed")


def quick() -> list[Case]:
    """A few small cases: seconds on two cores."""
    small = Case(num_ranks=4, size=512, width=64, dtype="bf16")
    return [
        SEED,
        small,
        replace(small, dtype="fp32", profile="skewed"),
        replace(small, dtype="fp32", operation="allocating"),
        replace(small, operation="masked_sum"),
        replace(small, operation="modes"),
    ]


def full(device: str) -> list[Case]:
    """All cases, the most telling first; those of one shape stand together (torch.compile then compiles once)."""
    return _full_cuda() if device == "cuda" else _full_cpu()


def _profiles(case: Case, *fills: float) -> list[Case]:
    drawn = [replace(case, fill=fill) for fill in fills or (0.5,)]
    return [*drawn, *(replace(case, profile=p) for p in ("full", "causal", "skewed"))]


def _full_cuda() -> list[Case]:
    bf16 = Case(num_ranks=8, size=8192, width=4096, dtype="bf16")
    fp32 = replace(bf16, dtype="fp32")
    cases = [SEED, *_profiles(bf16, 0.1, 0.3, 0.5, 0.7), *_profiles(fp32, 0.1, 0.3, 0.5, 0.7)]
    cases += [
        replace(bf16, operation="masked_sum", size=32768, width=256),
        replace(fp32, operation="masked_sum", size=1 << 22, width=1),
        replace(bf16, operation="modes"),
    ]
    cases += [replace(bf16, num_ranks=4, size=size, width=256) for size in (2, 32, 512, 2048, 8192)]
    for num_ranks, size in ((2, 8192), (4, 8192), (16, 8192), (64, 4096)):
        for case in (bf16, fp32):
            cases += _profiles(replace(case, num_ranks=num_ranks, size=size))
    return cases


def _full_cpu() -> list[Case]:
    fp32 = Case(num_ranks=8, size=4096, width=1024, dtype="fp32")
    bf16 = replace(fp32, dtype="bf16")
    cases = [SEED, *_profiles(fp32, 0.1, 0.3, 0.5, 0.7), *_profiles(bf16)]
    cases += [
        replace(fp32, width=256),
        replace(fp32, operation="allocating"),
        replace(fp32, operation="masked_sum"),
        replace(fp32, operation="masked_sum", size=1 << 22, width=1),
        replace(bf16, operation="modes"),
    ]
    cases += [replace(fp32, num_ranks=4, size=size, width=256) for size in (16, 128, 1024, 8192, 65536)]
    return cases + [replace(fp32, num_ranks=n, size=size) for n, size in ((2, 4096), (4, 4096), (64, 1024))]


def packed_borders(size: int, mean: int, seed: int = 0) -> list[int]:
    """Documents of exponentially distributed lengths, the last one cut; one document where ``mean`` is ``size``."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < size and mean < size:
        borders.append(min(size, borders[-1] + max(1, round(draw.expovariate(1 / mean)))))
    return borders if mean < size else [0, size]


def packed_documents(count: int, size: int, mean: int, seed: int = 0) -> list[Interval]:
    """Per even chunk, the interval from the start of its oldest document to its end."""
    return [chunk.needed for chunk in plan_chunks(split_evenly(size, count), packed_borders(size, mean, seed))]


def held_by(profile: str, count: int, size: int) -> list[Interval]:
    """The rows of a padded buffer that each virtual rank holds: full, even, uneven, causal, zigzag, documents, or
    long documents, where more rows cross the borders of chunks."""
    if profile == "documents":
        return packed_documents(count, size, max(1, size // 16))
    if profile == "long documents":
        return packed_documents(count, size, max(1, size // 8), seed=7)
    if profile in ("causal", "zigzag"):
        return [(0, size * (r + 1) // count) for r in range(count)]
    most, spread = {"full": (1.0, 0.0), "even": (0.5, 0.0), "uneven": (0.7, 0.4)}[profile]
    return [(0, round(size * (most - spread * r / max(1, count - 1)))) for r in range(count)]
