"""Checks of what context parallelism is given: a ValueError names argument, virtual rank and both values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..core.checks import as_ints
from ..core.numerics import check_op

#: q, k and v, each of all hosted virtual ranks.
QKV = Sequence[Sequence[Tensor]]


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


def check_shapes(ranks: Sequence[int], lengths: Sequence[int], qkv: QKV, scale: float | None) -> None:
    """The arguments of :meth:`shardsum.training.context.ContextBatch.attention`."""
    shapes: list[list[tuple[int, int, int]]] = []  # each is asked for once: that takes a third of a microsecond
    dtype, device = (getattr(qkv[0][0], name, None) for name in ("dtype", "device"))
    for name, xs in zip("qkv", qkv):
        shapes.append([])
        for rank, x in zip(ranks, xs):
            if not isinstance(x, Tensor) or x.dim() != 3:
                what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: virtual rank {rank} has {what}, expected a Tensor (length, heads, dim)")
            if x.dtype is not dtype or not dtype.is_floating_point:
                raise ValueError(f"{name}: virtual rank {rank} has {x.dtype}, the first q has {dtype}")
            if x.device != device:
                raise ValueError(f"{name}: virtual rank {rank} is on {x.device}, the first q on {device}")
            shapes[-1].append(tuple(x.shape))  # type: ignore[arg-type]
    for rank, q, k, v in zip(ranks, *shapes):
        for name, shape, (first, *_) in zip("qkv", (q, k, v), shapes):
            if shape[1:] != first[1:]:
                raise ValueError(f"{name}: virtual rank {rank} has heads and dim {shape[1:]}, the first {first[1:]}")
        if not q[0] == k[0] == v[0]:
            raise ValueError(f"q, k, v: virtual rank {rank} has {q[0]}, {k[0]} and {v[0]} rows; they are equal")
        if q[0] != lengths[rank]:
            raise ValueError(f"q: virtual rank {rank} has {q[0]} rows, but lengths gives it {lengths[rank]}")
        if q[2] != k[2]:
            raise ValueError(f"k: virtual rank {rank} has head dim {k[2]}, but q has {q[2]}")
        if k[1] != v[1]:
            raise ValueError(f"v: virtual rank {rank} has {v[1]} heads, but k has {k[1]}")
        if k[1] == 0 or q[1] % k[1]:
            raise ValueError(f"k: virtual rank {rank} has {k[1]} heads, which do not divide q's {q[1]}")
    check_op("sum", scale, torch.float32)
