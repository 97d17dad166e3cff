"""What the adjoints of sums are made of. Shares no code with the definition in :mod:`shardsum.core.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.numerics import accumulator_dtype


def finish_gradient(grad: Tensor, count: Tensor | None, scale: float | None, dtype: torch.dtype) -> Tensor:
    """The cotangent that each contribution gets, in ``dtype``: of ``grad`` ``(size, *F)``, with ``count`` ``(size,)``
    contributions to a mean (0 where there are none)."""
    if count is None and scale is None:
        return grad.to(dtype)
    spread = grad.to(accumulator_dtype(dtype))
    if count is not None:
        count = count.reshape(-1, *[1] * (grad.dim() - 1))
        spread = (spread / count.clamp(min=1).to(spread.dtype)).masked_fill(count == 0, 0)
    if scale is not None:
        spread = spread * torch.full((), scale, dtype=spread.dtype, device=spread.device)
    return spread.to(dtype)


def coverage(intervals: Sequence[Interval], size: int, device: torch.device) -> Tensor:
    """``(size,)`` int64: how many intervals cover each position."""
    edges = [(min(max(at, 0), size), step) for begin, end in intervals for at, step in ((begin, 1), (end, -1))]
    at, step = (torch.tensor(values, dtype=torch.int64, device="cpu") for values in zip(*edges))
    steps = torch.zeros(size + 1, dtype=torch.int64, device="cpu").index_add_(0, at, step)
    return steps[:size].cumsum(0).to(device)


def select(valid: Tensor, rows: Tensor) -> Tensor:
    """``rows`` where ``valid`` ``(R, S)``, exactly 0 elsewhere."""
    return torch.where(valid.reshape(*valid.shape, *[1] * (rows.dim() - 2)), rows, rows.new_zeros(()))
