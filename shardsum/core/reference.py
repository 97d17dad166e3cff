"""The definition of every result in this package: loops over virtual ranks in plain torch.

Shapes: R virtual ranks; shard r is ``(length_r, *F)`` and covers the positions ``[start_r, start_r + length_r)``.
One accumulator per output element starts at +0.0 and receives ranks 0, 1, ..., R-1 in that order, in the
accumulator's dtype (:mod:`shardsum.core.numerics`). Then, each step rounded once: divide by the number of contributions
(mean; 0 where there is none), multiply by ``scale``, add to the old output (``accumulate``), round to the output dtype.

Tests compare every path with these functions bit for bit. They are also the operators themselves where no native
library can be built. The adjoints are loops of their own: autograd of the forward loop would add in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import Interval, intersect
from .numerics import accumulator_dtype


def finish(
    acc: Tensor, count: Tensor | None, scale: float | None, out_dtype: torch.dtype, previous: Tensor | None = None
) -> Tensor:
    """Turn the accumulated sum ``(size, *F)`` into the result. ``count`` ``(size,)`` int64 selects the mean."""
    if count is not None:
        divisor = count.to(acc.dtype).reshape(-1, *[1] * (acc.dim() - 1))
        acc = torch.where(divisor > 0, acc / divisor, torch.zeros_like(acc))
    if scale is not None:
        acc = acc * torch.tensor(scale, dtype=acc.dtype, device=acc.device)
    if previous is not None:
        acc = previous.to(acc.dtype) + acc
    return acc.to(out_dtype)


def ragged_sum(
    shards: Sequence[Tensor],
    starts: Sequence[int],
    size: int,
    *,
    op: str = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype,
    previous: Tensor | None = None,
    carry: Tensor | None = None,
    carried: int = 0,
) -> Tensor:
    """``(size, *F)``: the sum of shards ``(length_r, *F)`` placed at ``starts``; outside ``[0, size)`` is dropped.

    ``carry`` ``(size, *F)``, in the accumulator's dtype, is the unrounded sum of earlier shards, ``carried`` of them at
    every position: the sum goes on from it.

    Example:
        >>> shards = [torch.tensor([1., 2.]), torch.tensor([10.])]
        >>> ragged_sum(shards, [0, 1], 3, out_dtype=torch.float32)
        tensor([ 1., 12.,  0.])
    """
    first = shards[0]
    if carry is None:
        acc = first.new_zeros((size, *first.shape[1:]), dtype=accumulator_dtype(first.dtype))
    else:
        acc = carry.clone()
    count = torch.full((size,), carried, dtype=torch.int64, device=first.device) if op == "mean" else None
    for shard, start in zip(shards, starts):
        begin, end = intersect((start, start + shard.shape[0]), (0, size))
        if begin < end:
            acc[begin:end] += shard[begin - start : end - start].to(acc.dtype)
            if count is not None:
                count[begin:end] += 1
    return finish(acc, count, scale, out_dtype, previous)


def ragged_sum_adjoint(
    grad: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    op: str = "sum",
    scale: float | None = None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradient of :func:`ragged_sum` for each shard: R tensors ``(length_r, *F)`` of ``dtype``.

    ``grad`` ``(size, *F)`` is divided by the count (mean) and multiplied by scale in the accumulator's dtype, then
    rounded once.
    """
    size = grad.shape[0]
    acc = grad.to(accumulator_dtype(dtype))
    count = None
    if op == "mean":
        count = contributions([(s, s + n) for s, n in zip(starts, lengths)], size, grad.device)
    spread = finish(acc, count, scale, dtype)
    grads = []
    for start, length in zip(starts, lengths):
        row = spread.new_zeros((length, *grad.shape[1:]))
        begin, end = intersect((start, start + length), (0, size))
        if begin < end:
            row[begin - start : end - start] = spread[begin:end]
        grads.append(row)
    return grads


def masked_sum(
    x: Tensor,
    mask: Tensor,
    *,
    op: str = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype,
    previous: Tensor | None = None,
) -> Tensor:
    """``(S_MAX, *F)``: the sum over r of ``x[r, j]`` where ``mask[r, j]``.

    ``x`` is ``(R, S_MAX, *F)``, ``mask`` ``(R, S_MAX)`` bool.
    """
    acc = x.new_zeros(x.shape[1:], dtype=accumulator_dtype(x.dtype))
    select = mask.reshape(*mask.shape, *[1] * (x.dim() - 2))
    for r in range(x.shape[0]):
        acc = torch.where(select[r], acc + x[r].to(acc.dtype), acc)
    count = mask.sum(0) if op == "mean" else None
    return finish(acc, count, scale, out_dtype, previous)


def masked_sum_adjoint(
    grad: Tensor, mask: Tensor, *, op: str = "sum", scale: float | None = None, dtype: torch.dtype
) -> Tensor:
    """The gradient of :func:`masked_sum`: ``(R, S_MAX, *F)`` of ``dtype``, exactly 0 where the mask is False."""
    acc = grad.to(accumulator_dtype(dtype))
    spread = finish(acc, mask.sum(0) if op == "mean" else None, scale, dtype)
    select = mask.reshape(*mask.shape, *[1] * (grad.dim() - 1))
    return torch.where(select, spread, torch.zeros_like(spread))


def contributions(intervals: Sequence[Interval], size: int, device: torch.device | str = "cpu") -> Tensor:
    """``(size,)`` int64: how many of the intervals cover each position."""
    count = torch.zeros(size, dtype=torch.int64, device=device)
    for begin, end in intervals:
        count[max(begin, 0) : max(end, 0)] += 1
    return count


def exchange(
    shards: Sequence[Tensor],
    in_intervals: Sequence[Interval],
    out_intervals: Sequence[Interval],
    *,
    op: str = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """``y_q[j] = sum over r with j in I_r of x_r[j]`` for j in O_q: one tensor ``(|O_q|, *F)`` per output interval."""
    starts = [begin for begin, _ in in_intervals]
    return [
        ragged_sum(shards, [s - begin for s in starts], end - begin, op=op, scale=scale, out_dtype=out_dtype)
        for begin, end in out_intervals
    ]


def exchange_adjoint(
    grads: Sequence[Tensor],
    in_intervals: Sequence[Interval],
    out_intervals: Sequence[Interval],
    *,
    op: str = "sum",
    scale: float | None = None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradient of :func:`exchange` for each shard: sum over q in order, divided by the forward's count, scaled."""
    acc = accumulator_dtype(dtype)
    sums = exchange([g.to(acc) for g in grads], out_intervals, in_intervals, out_dtype=acc)
    counts: list[Tensor | None] = [None] * len(sums)
    if op == "mean":
        counts = [
            contributions([(b - begin, e - begin) for b, e in in_intervals], end - begin, grads[0].device)
            for begin, end in in_intervals
        ]
    return [finish(total, count, scale, dtype) for total, count in zip(sums, counts)]
