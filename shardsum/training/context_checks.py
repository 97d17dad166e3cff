"""Checks of what context parallelism is given: a ValueError names argument, virtual rank and both values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..core.checks import as_ints
from ..core.numerics import check_op


class AttentionOptions(TypedDict, total=False):
    """What a batch's attention takes beside q, k, v and ``return_lse``."""

    scale: float | None
    inner: Callable[..., Any] | None


def hosted_tensors(name: str, x: Any, ranks: Sequence[int]) -> tuple[bool, list[Tensor]]:
    """``(x was a single Tensor, one per hosted virtual rank)``."""
    if isinstance(x, Tensor):
        xs = [x]
    elif isinstance(x, (list, tuple)):
        xs = list(x)
    else:
        raise ValueError(f"{name}: expected a list of Tensors, one for each hosted virtual rank, got {x!r}")
    if len(xs) != len(ranks):
        raise ValueError(f"{name}: {len(xs)} tensors for the {len(ranks)} virtual ranks hosted here {tuple(ranks)}")
    return isinstance(x, Tensor), xs


def check_lengths(lengths: Sequence[int], count: int) -> list[int]:
    checked = as_ints("lengths", lengths, count)
    for r, n in enumerate(checked):
        if n < 0:
            raise ValueError(f"lengths: virtual rank {r} has the negative length {n}")
    return checked


def check_shapes(
    ranks: Sequence[int],
    lengths: Sequence[int],
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    scale: float | None,
) -> None:
    """q, k and v of :meth:`shardsum.training.context.ContextBatch.attention`, of all hosted virtual ranks."""
    for name, xs in (("q", qs), ("k", ks), ("v", vs)):
        for rank, x in zip(ranks, xs):
            if not isinstance(x, Tensor) or x.dim() != 3:
                what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: virtual rank {rank} has {what}, expected a Tensor (length, heads, dim)")
            if x.dtype != qs[0].dtype or not x.dtype.is_floating_point:
                raise ValueError(f"{name}: virtual rank {rank} has {x.dtype}, the first q has {qs[0].dtype}")
            if x.device != qs[0].device:
                raise ValueError(f"{name}: virtual rank {rank} is on {x.device}, the first q on {qs[0].device}")
            if x.shape[1:] != xs[0].shape[1:]:
                shapes = f"{tuple(x.shape[1:])}, the first {tuple(xs[0].shape[1:])}"
                raise ValueError(f"{name}: virtual rank {rank} has heads and dim {shapes}")
    for rank, q, k, v in zip(ranks, qs, ks, vs):
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise ValueError(
                f"q, k, v: virtual rank {rank} has {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows; they are equal"
            )
        if q.shape[0] != lengths[rank]:
            raise ValueError(f"q: virtual rank {rank} has {q.shape[0]} rows, but lengths gives it {lengths[rank]}")
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"k: virtual rank {rank} has head dim {k.shape[2]}, but q has {q.shape[2]}")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"v: virtual rank {rank} has {v.shape[1]} heads, but k has {k.shape[1]}")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(f"k: virtual rank {rank} has {k.shape[1]} heads, which do not divide q's {q.shape[1]}")
    check_op("sum", scale, torch.float32)
