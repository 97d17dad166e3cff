"""Local ragged and masked sums: what users call.

A call looks up the plan of its arguments (:mod:`.plan`) and runs it: one native operator. What that refuses, what needs
a gradient and what is being compiled goes through the checks here, which raise the ValueErrors, and the registered
operators of :mod:`.ops`, whose backward operators are linear maps too (so double backward works). Every backward result
equals the adjoint loops of :mod:`shardsum.core.reference` bit for bit.

Shapes: R virtual ranks, S_MAX padded positions, ``*F`` any trailing shape; dim 0 of a shard is the sequence axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import check_host_lengths, check_shards, check_size, describe, is_strided
from ..core.numerics import accumulator_dtype, resolve_out_dtype
from ..core.words import Op
from . import kernels
from . import ops as operators
from .arguments import check_numerics, check_out, device_bounds, to_host
from .plan import planned

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
# torch.autograd.graph.increment_version without the checks of its argument.
_increment_version = torch._C._increment_version


def ragged_sum(
    shards: Tensor | Sequence[Tensor],
    lengths: Sequence[int] | Tensor | None = None,
    *,
    starts: Sequence[int] | Tensor | None = None,
    size: int | None = None,
    op: Op = "sum",
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Sum R ragged shards in rank order.

    ``y[j]`` is the sum of ``x_r[j - start_r]`` over r = 0, 1, ..., R-1 with ``start_r <= j < start_r + length_r``.
    Differentiable in the shards, any number of times, also under ``torch.func`` and in forward mode. Where the same
    lengths come again and again, :class:`shardsum.MaskedSum` holds what this function looks up.

    Args:
        shards: a padded Tensor ``(R, S_MAX, *F)``, or a sequence of R Tensors ``(length_r, *F)`` read in place. Any
            floating, integer or bool dtype; what lies outside a shard's length never enters the arithmetic.
        lengths: R ints, or an integer Tensor ``(R,)`` on the CPU or on the shards' device (a device tensor is never
            synchronised; out-of-range values are clamped to ``[0, S_MAX]``). Default: whole shards.
        starts: the position of each shard's first row, R ints or like ``lengths`` a Tensor. Default: 0.
        size: positions of the result. Default: without ``starts`` the rows of the largest shard (S_MAX of padded
            shards), with ``starts`` the largest end. (Collectives differ: ``ShardGroup.all_reduce`` without ``size``
            has as many positions as the largest of the *lengths*, for no process knows the others' S_MAX.)
        op: "sum", or "mean": divide by the number of shards that cover a position (0 where there is none).
        scale: multiplies the result (after the mean's division), in the accumulator's dtype.
        out_dtype: see :mod:`shardsum.core.numerics`. Default: the shards' dtype, int64 for integers and bool.
        out: ``(size, *F)`` Tensor that receives the result; not with inputs that require grad, no overlap with shards
            or between its own elements.
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
    if not _is_dynamo_compiling():
        values = _values(lengths) if isinstance(lengths, Tensor) else lengths
        plan = planned(values, starts, size, op, scale, out_dtype, accumulate)
        result = None if plan is None else run(plan, shards, out)
        if result is not None:
            return result
        if plan is not None and out is None and not accumulate and isinstance(shards, Tensor) and values:
            assert not isinstance(starts, Tensor)  # else there is no plan
            try:  # what needs a gradient; a plan's arguments are checked
                return _planned_sum(shards, values, starts, size, op, scale, out_dtype)
            except (RuntimeError, IndexError):  # refused; the checks below name what is wrong
                pass
    if not isinstance(accumulate, bool):
        raise ValueError(f"accumulate: expected a bool, got {accumulate!r}")
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor to add to")
    return _checked(shards, lengths, starts, size, op, scale, out_dtype, out, accumulate)


def masked_sum(
    x: Tensor,
    mask: Tensor,
    *,
    op: Op = "sum",
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

    Example:
        >>> x = torch.tensor([[1.0, float("nan"), 3.0], [10.0, 20.0, 30.0]])
        >>> masked_sum(x, torch.tensor([[True, False, True], [True, True, False]]))
        tensor([11., 20.,  3.])
    """
    if not _is_dynamo_compiling() and isinstance(mask, Tensor) and mask.dtype == torch.bool:
        plan = planned(None, None, None, op, scale, out_dtype, False)
        result = None if plan is None else run(plan, x, out, mask)
        if result is not None:
            return result
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
    scale, out_dtype = check_numerics(op, scale, x.dtype, out_dtype, out)
    check_out(out, [x, mask], (x.shape[1], *x.shape[2:]), out_dtype)
    return deliver(operators.masked_sum(x, mask, op, scale, out_dtype), out)


def run(plan: Tensor, shards: Any, out: Tensor | None, mask: Tensor | None = None) -> Tensor | None:
    """The sum by a plan, with a mask where the plan has no rows; None where the operator refuses the call, or where its
    result would miss a gradient or a tangent."""
    if forward_ad._current_level >= 0:
        return None
    try:
        if isinstance(shards, Tensor):
            if shards.requires_grad and torch.is_grad_enabled():
                return None
            if out is None:
                if mask is None:
                    return kernels.sum_plan_new(shards, plan)
                return kernels.sum_plan_new_masked(shards, mask, plan)
        else:
            if mask is not None or not isinstance(shards, (list, tuple)):
                return None
            if torch.is_grad_enabled():
                for shard in shards:
                    if shard.requires_grad:
                        return None
            if out is None:
                return kernels.sum_plan_new_list(shards, plan)
        if out.requires_grad:
            return None
        if mask is not None:
            kernels.sum_plan_masked(out, shards, mask, plan)
        elif isinstance(shards, Tensor):
            kernels.sum_plan(out, shards, plan)
        else:
            kernels.sum_plan_list(out, shards, plan)
    except (RuntimeError, AttributeError):  # refused, or what should be a tensor is none
        return None
    _increment_version((out,))  # autograd must notice when it has saved the values that the kernel overwrote
    return out


def deliver(value: Tensor, out: Tensor | None, accumulate: bool = False) -> Tensor:
    """``value`` written or added to ``out``; to add, it is in the accumulator's dtype."""
    if out is None:
        return value
    return out.copy_(out.to(value.dtype) + value if accumulate else value)


def _values(lengths: Tensor) -> Any:
    """The ints of a CPU tensor of lengths; itself where it is anything else."""
    try:
        if lengths.is_cpu and lengths.dtype in (torch.int64, torch.int32) and lengths.dim() == 1:
            return lengths.tolist()
    except RuntimeError:  # a fake one, or one of a transform's
        pass
    return lengths


def _planned_sum(
    x: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int] | None,
    size: int | None,
    op: str,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    if size is None:
        size = x.shape[1] if starts is None else max(s + n for s, n in zip(starts, lengths))
    scale = None if scale is None else float(scale)
    dtype = resolve_out_dtype(x.dtype, out_dtype)
    # Copies: the caller may change its lists before backward.
    return operators.padded_sum(x, [*(starts or ())], [], [*lengths], size, op, scale, dtype)


def _checked(
    shards: Tensor | Sequence[Tensor],
    lengths: Any,
    starts: Any,
    size: int | None,
    op: str,
    scale: float | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    padded = isinstance(shards, Tensor)
    if not isinstance(shards, Tensor):
        tensors = check_shards(shards)
        capacities, row_shape = [shard.shape[0] for shard in tensors], tensors[0].shape[1:]
        for name, value in (("lengths", lengths), ("starts", starts)):
            if isinstance(value, Tensor) and not value.is_cpu:
                raise ValueError(f"{name}: a device tensor needs padded shards (R, S_MAX, *F), not a list")
    elif is_strided(shards) and shards.dim() >= 2 and shards.shape[0] > 0:
        tensors, capacities, row_shape = [shards], [shards.shape[1]] * shards.shape[0], shards.shape[2:]
    else:
        raise ValueError(f"shards: expected a padded Tensor (R, S_MAX, *F) with R >= 1, got {describe(shards)}")
    first, compiling = tensors[0], torch.compiler.is_compiling()
    scale, out_dtype = check_numerics(op, scale, first.dtype, out_dtype, out)
    numerics = op, scale, accumulator_dtype(first.dtype) if accumulate else out_dtype
    lengths = capacities if lengths is None else lengths
    if not (padded and compiling):
        lengths, starts = to_host(len(capacities), lengths, starts)
    if isinstance(lengths, Tensor) or isinstance(starts, Tensor):
        lengths, starts = device_bounds(first, lengths, starts)
        if size is None and starts is not None:
            raise ValueError("size: required when starts is a device tensor (it is never read on the host)")
        size = check_size(capacities[0] if size is None else size)
        check_out(out, tensors, (size, *row_shape), out_dtype)
        return deliver(operators.padded_sum_device(first, starts, lengths, size, *numerics), out, accumulate)
    begins = starts
    if not compiling:
        lengths, begins, size = check_host_lengths(lengths, starts, capacities, size)
    elif size is None:  # values are symbols here; the operator checks them when it runs
        size = max(capacities) if starts is None else max(s + n for s, n in zip(starts, lengths))
    assert size is not None
    check_out(out, tensors, (size, *row_shape), out_dtype)
    if padded:
        total = operators.padded_sum(first, [] if starts is None else begins, [], lengths, size, *numerics)
    else:
        rows = [s if n == s.shape[0] else s[:n] for s, n in zip(tensors, lengths)]
        told = lengths if compiling else None  # else checked above
        total = operators.ragged_sum(rows, begins or [0] * len(rows), size, told, *numerics)
    return deliver(total, out, accumulate)
