"""Local ragged and masked sums: checks for users, registered operators for autograd and torch.compile.

``ragged_sum`` and ``masked_sum`` check their arguments and call a raw operator of :mod:`.kernels` directly when no
gradient is needed (:mod:`.usual` the fastest way, for what is called most). With a gradient, or while compiling, they
go through the functional operators of :mod:`.ops`, which have fake implementations and an autograd whose backward
operators are linear maps too (so double backward works). Every backward result equals the adjoint loops of
:mod:`shardsum.core.reference` bit for bit.

Shapes: R virtual ranks, S_MAX padded positions, ``*F`` any trailing shape; dim 0 of a shard is the sequence axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import (
    as_ints,
    check_host_lengths,
    check_index_tensor,
    check_shards,
    check_size,
    check_writable,
    describe,
    is_strided,
    needs_grad,
    overlap,
)
from ..core.numerics import accumulator_dtype, check_op, resolve_out_dtype
from ..native import loader as native
from . import kernels, usual
from . import ops as operators

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def ragged_sum(
    shards: Tensor | Sequence[Tensor],
    lengths: Sequence[int] | Tensor | None = None,
    *,
    starts: Sequence[int] | Tensor | None = None,
    size: int | None = None,
    op: str = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Sum R ragged shards in rank order.

    ``y[j]`` is the sum of ``x_r[j - start_r]`` over r = 0, 1, ..., R-1 with ``start_r <= j < start_r + length_r``.

    Args:
        shards: a padded Tensor ``(R, S_MAX, *F)``, or a sequence of R Tensors ``(length_r, *F)`` read in place. Any
            floating, integer or bool dtype; what lies outside a shard's length never enters the arithmetic.
        lengths: R ints, or an integer Tensor ``(R,)`` on the CPU or on the shards' device (a device tensor is never
            synchronised; out-of-range values are clamped to ``[0, S_MAX]``). Default: whole shards.
        starts: the position of each shard's first row, R ints or like ``lengths`` a Tensor. Default: 0.
        size: positions of the result. Default: S_MAX without ``starts``, else the largest end.
        op: "sum", or "mean": divide by the number of shards that cover a position (0 where there is none).
        scale: multiplies the result (after the mean's division), in the accumulator's dtype.
        out_dtype: see :mod:`shardsum.core.numerics`. Default: the shards' dtype, int64 for integers and bool.
        out: ``(size, *F)`` Tensor that receives the result; not with inputs that require grad, no overlap with shards.
        accumulate: ``out = out + sum`` with one addition and one rounding.

    Returns:
        ``(size, *F)``.

    Raises:
        ValueError: an argument is malformed; the message names it, the virtual rank and both values.

    Example:
        >>> x = torch.tensor([[10, 11, 12], [20, 21, 22]])
        >>> ragged_sum(x, [1, 3])
        tensor([30, 21, 22])
    """
    if starts is None and accumulate is False and type(shards) is Tensor and not _is_dynamo_compiling():
        if out is None and out_dtype is not None:
            result = usual.usual_sum_as(shards, lengths, size, op, scale, out_dtype)
        else:
            result = usual.usual_sum(shards, lengths, size, op, scale, out_dtype, out)
        if result is not None:
            return result
    if not isinstance(accumulate, bool):
        raise ValueError(f"accumulate: expected a bool, got {accumulate!r}")
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor to add to")
    if isinstance(shards, Tensor):
        return _padded(shards, lengths, starts, size, op, scale, out_dtype, out, accumulate)
    if lengths is None and starts is None and not accumulate:
        result = usual.usual_list_sum(shards, size, op, scale, out_dtype, out)
        if result is not None:
            return result
    return _listed(shards, lengths, starts, size, op, scale, out_dtype, out, accumulate)


def masked_sum(
    x: Tensor,
    mask: Tensor,
    *,
    op: str = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``(x * mask).sum(0)`` in rank order, selecting instead of multiplying: what is masked out may be NaN.

    Args:
        x: ``(R, S_MAX, *F)``.
        mask: bool ``(R, S_MAX)`` on x's device; True contributes.
        op, scale, out_dtype, out: as in :func:`ragged_sum`.

    Returns:
        ``(S_MAX, *F)``.

    Raises:
        ValueError: an argument is malformed; the message names it and both values.
    """
    if not is_strided(x) or x.dim() < 2:
        raise ValueError(f"x: expected a Tensor (R, S_MAX, *F), got {describe(x)}")
    if not is_strided(mask) or mask.dtype != torch.bool:
        raise ValueError(f"mask: expected a bool Tensor {tuple(x.shape[:2])}, got {describe(mask)}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask: shape {tuple(mask.shape)} does not match the shards' {tuple(x.shape[:2])}")
    if mask.device != x.device:
        raise ValueError(f"mask: on {mask.device}, but x is on {x.device}")
    if x.shape[0] == 0:
        raise ValueError("x: no virtual ranks (dim 0 is empty)")
    scale, out_dtype = _check_numerics(op, scale, x.dtype, out_dtype, out)
    if torch.compiler.is_compiling() or needs_grad([x]):
        _refuse_out_with_grad(out)
        return _copy_out(operators.masked_sum(x, mask, op, scale, out_dtype), out)
    native.load()
    x, result = operators.row_contiguous(x), _result(x, x.shape[1], x.shape[2:], out_dtype, out, (x,))
    kernels.sum_masked(result, operators.readable(x), mask.contiguous(), op == "mean", scale, False)
    return _deliver(result, out)


# The checks


def _check_numerics(
    op: str, scale: float | None, dtype: torch.dtype, out_dtype: torch.dtype | None, out: Tensor | None
) -> tuple[float | None, torch.dtype]:
    scale = check_op(op, scale, dtype)
    if out is not None:
        if not is_strided(out):
            raise ValueError(f"out: expected a Tensor, got {describe(out)}")
        out_dtype = out_dtype or out.dtype
    return scale, resolve_out_dtype(dtype, out_dtype)


def _refuse_out_with_grad(out: Tensor | None) -> None:
    if out is not None and not torch.compiler.is_compiling():
        raise ValueError("out: not possible with shards that require grad; use the returned tensor")


def _copy_out(value: Tensor, out: Tensor | None, accumulate: bool = False) -> Tensor:
    """``value`` written or added to ``out``; to add, it is in the accumulator's dtype."""
    if out is None:
        return value
    return out.copy_(out.to(value.dtype) + value if accumulate else value)


# The two forms of shards


def _padded(
    x: Tensor,
    lengths: Sequence[int] | Tensor | None,
    starts: Sequence[int] | Tensor | None,
    size: int | None,
    op: str,
    scale: float | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    if not is_strided(x) or x.dim() < 2 or x.shape[0] == 0:
        raise ValueError(f"shards: expected a padded Tensor (R, S_MAX, *F) with R >= 1, got {describe(x)}")
    num_ranks, capacity = x.shape[0], x.shape[1]
    compiling = torch.compiler.is_compiling()
    grads = needs_grad([x])
    scale, out_dtype = _check_numerics(op, scale, x.dtype, out_dtype, out)
    if lengths is None:
        lengths = [capacity] * num_ranks
    if not compiling:
        lengths, starts = _tensors_to_host(num_ranks, lengths, starts)
    if isinstance(lengths, Tensor) or isinstance(starts, Tensor):
        lengths, starts = _device_bounds(x, lengths, starts)
        if size is None:
            if starts is not None:
                raise ValueError("size: required when starts is a device tensor (it is never read on the host)")
            size = capacity
        size = size if compiling else check_size(size)
        if compiling or grads:
            _refuse_out_with_grad(out)
            dtype = accumulator_dtype(x.dtype) if accumulate else out_dtype
            return _copy_out(operators.padded_sum_device(x, starts, lengths, size, op, scale, dtype), out, accumulate)
        native.load()
        x, result = operators.row_contiguous(x), _result(x, size, x.shape[2:], out_dtype, out, (x,))
        kernels.sum_padded_device(result, operators.readable(x), starts, lengths, op == "mean", scale, accumulate)
        return _deliver(result, out)
    if compiling:
        if size is None:
            size = capacity if starts is None else max(s + n for s, n in zip(starts, lengths))
        dtype = accumulator_dtype(x.dtype) if accumulate else out_dtype
        return _copy_out(operators.padded_sum(x, starts or [], lengths, size, op, scale, dtype), out, accumulate)
    lengths, begins, size = check_host_lengths(lengths, starts, [capacity] * num_ranks, size)
    if grads:
        _refuse_out_with_grad(out)
        return operators.padded_sum(x, begins, lengths, size, op, scale, out_dtype)
    native.load()
    x, result = operators.row_contiguous(x), _result(x, size, x.shape[2:], out_dtype, out, (x,))
    kernels.sum_padded(
        result, operators.readable(x), [] if starts is None else begins, lengths, op == "mean", scale, accumulate
    )
    return _deliver(result, out)


def _listed(
    shards: Sequence[Tensor],
    lengths: Sequence[int] | Tensor | None,
    starts: Sequence[int] | Tensor | None,
    size: int | None,
    op: str,
    scale: float | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    shards = check_shards(shards)
    first = shards[0]
    compiling = torch.compiler.is_compiling()
    scale, out_dtype = _check_numerics(op, scale, first.dtype, out_dtype, out)
    for name, value in (("lengths", lengths), ("starts", starts)):
        if isinstance(value, Tensor) and not value.is_cpu:
            raise ValueError(f"{name}: a device tensor needs padded shards (R, S_MAX, *F), not a list")
    lengths, starts = _tensors_to_host(len(shards), lengths, starts)
    assert not isinstance(lengths, Tensor) and not isinstance(starts, Tensor)
    capacities = [shard.shape[0] for shard in shards]
    if compiling:  # values are symbols here; the operator checks them when it runs
        lengths, begins = lengths or capacities, starts or [0] * len(shards)
        size = max(s + n for s, n in zip(begins, lengths)) if size is None else size
    else:
        lengths, begins, size = check_host_lengths(capacities if lengths is None else lengths, starts, capacities, size)
    rows = [s if n == s.shape[0] else s[:n] for s, n in zip(shards, lengths)]
    if compiling or needs_grad(rows):
        _refuse_out_with_grad(out)
        dtype = accumulator_dtype(first.dtype) if accumulate else out_dtype
        told = lengths if compiling else None  # else checked above
        return _copy_out(operators.ragged_sum(rows, begins, size, told, op, scale, dtype), out, accumulate)
    native.load()
    result = _result(first, size, first.shape[1:], out_dtype, out, shards)
    kernels.sum_rows(
        result, [operators.readable(r.contiguous()) for r in rows], begins, op == "mean", scale, accumulate
    )
    return _deliver(result, out)


def _tensors_to_host(num_ranks: int, lengths: Any, starts: Any) -> tuple[Any, Any]:
    """CPU tensors become ints, unless the other one is a device tensor (then the pair stays together there)."""
    if any(isinstance(v, Tensor) and not v.is_cpu for v in (lengths, starts)):
        return lengths, starts
    values = []
    for name, value in (("lengths", lengths), ("starts", starts)):
        if isinstance(value, Tensor):
            value = check_index_tensor(name, value, num_ranks).tolist()
        values.append(value)
    return values[0], values[1]


def _device_bounds(x: Tensor, lengths: Any, starts: Any) -> tuple[Tensor, Tensor | None]:
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


# Memory


def _result(
    x: Tensor,
    size: int,
    trailing: torch.Size,
    out_dtype: torch.dtype,
    out: Tensor | None,
    shards: Sequence[Tensor],
) -> Tensor:
    """The contiguous tensor that the kernel writes: a new one, ``out`` itself, or a stand-in for a strided ``out``."""
    if out is None:
        return x.new_empty((size, *trailing), dtype=out_dtype)
    if out.shape != (size, *trailing):
        raise ValueError(f"out: shape {tuple(out.shape)}, but the result has {(size, *trailing)}")
    if out.dtype != out_dtype or out.device != x.device:
        raise ValueError(f"out: {out.dtype} on {out.device}, but the result is {out_dtype} on {x.device}")
    check_writable(out)
    if needs_grad([out]):
        raise ValueError("out: requires grad; the result is written in place without autograd")
    for r, shard in enumerate(shards):
        if overlap(out, shard):
            raise ValueError(f"out: shares memory with the shards (tensor {r}); rows would change while they are read")
    return out.resolve_neg().contiguous()  # a kernel writes bytes, not lazy signs


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result
    if out is not result and (out.data_ptr() != result.data_ptr() or not out.is_contiguous()):
        return out.copy_(result)
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that the kernel overwrote
    return out
