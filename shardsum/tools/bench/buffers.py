"""Buffers that take turns, so that calls in a row do not find their data in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MOST_COPIES = 32
_CACHES = {"cpu": 1, "cuda": 4}  # a few cores hardly have all of their processor's cache
_MEMORY = {"cpu": 1.6e9, "cuda": 24e9}  # bytes of all shards together


@dataclass
class Buffers:
    """What one call of a local sum reads and writes.

    Attributes:
        x: ``(R, S, H)``, zeros where it is not valid.
        out, wide: ``(S, H)`` of x's dtype and in fp32.
        source, target: the two ends of a copy that moves as many bytes.
    """

    x: Tensor
    out: Tensor
    wide: Tensor
    source: Tensor
    target: Tensor


BufferCall = Callable[[Buffers], Tensor]


def make_buffers(x: Tensor, useful_bytes: int) -> tuple[list[Buffers], bool]:
    """Copies of ``x`` and what belongs to them, as many as :func:`rotation` says, and whether they are cold."""
    most = min(_MOST_COPIES, int(_MEMORY[x.device.type] / max(1, x.nbytes)))
    count, cold = rotation(x.device.type, useful_bytes, most)
    half = max(4, useful_bytes // 8)  # fp32 elements
    buffers = [
        Buffers(
            x if i == 0 else x.clone(),
            torch.empty_like(x[0]),
            torch.empty_like(x[0], dtype=torch.float32),
            torch.rand(half, device=x.device),
            torch.rand(half, device=x.device),  # not empty: first touches of memory are not a copy's
        )
        for i in range(count)
    ]
    return buffers, cold


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
