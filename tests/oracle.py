"""Local sums and their gradients once more, in numpy, by another hand: shares no code with the package.

Element for element as the definition says: one accumulator from +0.0, virtual ranks in order, mean, scale, old output,
one rounding. numpy has no bfloat16: its rounding is done on the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """In the accumulator's dtype."""
    if x.dtype == torch.float64:
        return x.numpy().copy()
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return x.float().numpy().copy()
    if x.dtype == torch.bool:
        return (x.numpy().view(np.uint8) != 0).astype(np.int64)
    return x.numpy().astype(np.int64)


def rounded(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """To nearest, ties to even, once."""
    x = np.ascontiguousarray(x)
    if dtype == torch.bfloat16:
        bits = x.view(np.uint32).astype(np.uint64)
        upper = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        upper[np.isnan(x)] = 0x7FC0
        return torch.from_numpy(upper.view(np.int16)).view(torch.bfloat16)
    types: dict[Any, Any] = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
    return torch.from_numpy(x.astype(types.get(dtype, np.int64)))


def _finished(acc: np.ndarray, count: np.ndarray, op: str, scale: float | None) -> np.ndarray:
    acc = acc.copy()
    for j in range(acc.shape[0]):
        if op == "mean":
            acc[j] = acc[j] / acc.dtype.type(count[j]) if count[j] else 0
        if scale is not None:
            acc[j] = acc[j] * acc.dtype.type(scale)
    return acc


def ragged_sum(
    shards: Sequence[torch.Tensor], starts: Sequence[int], size: int, *, op: str = "sum", scale: float | None = None,
    out_dtype: torch.dtype, previous: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    values = [to_numpy(s) for s in shards]
    acc = np.zeros((size, *values[0].shape[1:]), values[0].dtype)
    count = np.zeros(size, np.int64)
    with np.errstate(all="ignore"):
        for value, start in zip(values, starts):
            for i, row in enumerate(value):
                if 0 <= start + i < size:
                    acc[start + i] += row
                    count[start + i] += 1
        acc = _finished(acc, count, op, scale)
        if previous is not None:
            acc = to_numpy(previous) + acc
        return rounded(acc, out_dtype)


def ragged_sum_gradients(
    grad: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], *, op: str = "sum", scale: float | None = None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:  # fmt: skip
    """One per shard, of ``dtype``: what each of its rows gets of ``grad`` ``(size, *F)``."""
    size = grad.shape[0]
    wide = to_numpy(grad if dtype != torch.float64 else grad.double())
    count = np.zeros(size, np.int64)
    for start, n in zip(starts, lengths):
        for j in range(start, start + n):
            if 0 <= j < size:
                count[j] += 1
    out = []
    with np.errstate(all="ignore"):
        spread = _finished(wide, count, op, scale)
        for start, n in zip(starts, lengths):
            rows = np.zeros((n, *grad.shape[1:]), wide.dtype)
            for i in range(n):
                if 0 <= start + i < size:
                    rows[i] = spread[start + i]
            out.append(rounded(rows, dtype))
    return out
