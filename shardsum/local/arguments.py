"""The arguments of local sums: checks that name what is wrong, and bounds brought to where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import checks
from ..core.checks import as_ints, check_index_tensor, describe, is_strided
from ..core.numerics import check_op, resolve_out_dtype


def check_numerics(
    op: str, scale: float | None, dtype: torch.dtype, out_dtype: torch.dtype | None, out: Tensor | None
) -> tuple[float | None, torch.dtype]:
    """``(scale, out_dtype)`` of a sum of ``dtype``, or the ValueError."""
    scale = check_op(op, scale, dtype)
    if out is not None:
        if not is_strided(out):
            raise ValueError(f"out: expected a Tensor, got {describe(out)}")
        out_dtype = out_dtype or out.dtype
    return scale, resolve_out_dtype(dtype, out_dtype)


def check_out(out: Tensor | None, shards: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``out`` can receive the result. (Compiled code copies it there.)"""
    if out is not None and not torch.compiler.is_compiling():
        checks.check_out(out, shards, shape, dtype)


def to_host(num_ranks: int, lengths: Any, starts: Any) -> tuple[Any, Any]:
    """CPU tensors become ints, unless the other one is a device tensor (then the pair stays together there)."""
    if any(isinstance(v, Tensor) and not v.is_cpu for v in (lengths, starts)):
        return lengths, starts
    values = []
    for name, value in (("lengths", lengths), ("starts", starts)):
        if isinstance(value, Tensor):
            if torch._C._functorch.is_batchedtensor(value):
                raise ValueError(f"{name}: vmap: shards can be a batch; lengths and starts are the same for all of it")
            value = check_index_tensor(name, value, num_ranks).tolist()
        values.append(value)
    return values[0], values[1]


def device_bounds(x: Tensor, lengths: Any, starts: Any) -> tuple[Tensor, Tensor | None]:
    num_ranks = x.shape[0]
    bounds: list[Tensor | None] = []
    for name, value in (("lengths", lengths), ("starts", starts)):
        if value is not None and not isinstance(value, Tensor):
            value = torch.tensor(as_ints(name, value, num_ranks), dtype=torch.int64, device="cpu").to(
                x.device, non_blocking=True
            )
        if value is not None:
            value = check_index_tensor(name, value, num_ranks)
            if value.device != x.device and not value.is_cpu:
                raise ValueError(f"{name}: on {value.device}, but the shards are on {x.device}")
        bounds.append(value)
    n, s = bounds
    assert n is not None
    if s is not None and s.dtype != n.dtype:
        n, s = n.to(torch.int64), s.to(torch.int64)
    return n, s
