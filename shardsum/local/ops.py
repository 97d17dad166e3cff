"""Functional registered operators over the raw kernels, with fake implementations and autograd.

Every forward operator F is linear in its shards; its backward B is the adjoint, an operator whose backward is F again.
B: the gradient ``(size, *F)`` is divided by the count of contributions (mean) and multiplied by scale in the
accumulator's dtype, rounded once to the shards' dtype, and copied to every shard that covers the position.

    ragged_sum         Tensor[] (length_r, *F), starts                 <-> ragged_sum_adjoint
    padded_sum         Tensor (R, S_MAX, *F), starts, lengths          <-> padded_sum_adjoint
    padded_sum_device  the same, lengths and starts as tensors         <-> padded_sum_device_adjoint
    masked_sum         Tensor (R, S_MAX, *F), mask (R, S_MAX)          <-> masked_sum_adjoint

Lengths are ``SymInt[]``: ``int[]`` would compile anew for every set of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_host_lengths
from ..core.numerics import NATIVE_DTYPES, accumulator_dtype
from ..core.reference import contributions, finish
from ..native import loader as native
from . import kernels
from .registry import Operator, define

_TAIL = "str op, float? scale, ScalarType dtype) -> "


def row_contiguous(x: Tensor) -> Tensor:
    """x itself when every ``x[r]`` is contiguous (rows may lie apart), else a contiguous copy."""
    return x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def is_readable(x: Tensor) -> bool:
    """Whether the kernels read x's dtype."""
    return x.dtype in NATIVE_DTYPES


def readable(x: Tensor) -> Tensor:
    """x in a dtype that the kernels read (the wide unsigned integers become int64, which wraps alike)."""
    return x if x.dtype in NATIVE_DTYPES else x.to(torch.int64)


def finish_gradient(grad: Tensor, count: Tensor | None, scale: float | None, dtype: torch.dtype) -> Tensor:
    if count is None and scale is None:
        return grad.to(dtype)
    return finish(grad.to(accumulator_dtype(dtype)), count, scale, dtype)


def select(valid: Tensor, rows: Tensor) -> Tensor:
    """``rows`` where ``valid`` ``(R, S)``, exactly 0 elsewhere."""
    return torch.where(valid.reshape(*valid.shape, *[1] * (rows.dim() - 2)), rows, rows.new_zeros(()))


# ragged_sum


def _ragged_sum(
    shards: list[Tensor],
    starts: Sequence[int],
    size: int,
    lengths: Sequence[int] | None,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
) -> Tensor:
    native.load()
    if lengths is not None:
        check_host_lengths(lengths, starts, [s.shape[0] for s in shards], size)
    out = shards[0].new_empty((size, *shards[0].shape[1:]), dtype=dtype)
    rows = [readable(s.contiguous()) for s in shards]
    kernels.sum_rows(out, rows, starts, op == "mean", scale, False)
    return out


def _ragged_sum_fake(
    shards: list[Tensor],
    starts: Sequence[int],
    size: int,
    lengths: Sequence[int] | None,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
) -> Tensor:
    return shards[0].new_empty((size, *shards[0].shape[1:]), dtype=dtype)


def _ragged_sum_adjoint(
    grad: Tensor, starts: Sequence[int], lengths: Sequence[int], op: str, scale: float | None, dtype: torch.dtype
) -> list[Tensor]:
    size = grad.shape[0]
    ends = [s + n for s, n in zip(starts, lengths)]
    count = contributions(list(zip(starts, ends)), size, grad.device) if op == "mean" else None
    spread = finish_gradient(grad, count, scale, dtype)
    rows = []
    for start, n in zip(starts, lengths):
        begin, end = min(max(start, 0), size), min(max(start + n, 0), size)
        if (begin, end) == (start, start + n):
            rows.append(spread[begin:end].clone(memory_format=torch.contiguous_format))
        else:
            row = spread.new_zeros((n, *grad.shape[1:]))
            if begin < end:
                row[begin - start : end - start] = spread[begin:end]
            rows.append(row)
    return rows


def _ragged_sum_adjoint_fake(
    grad: Tensor, starts: Sequence[int], lengths: Sequence[int], op: str, scale: float | None, dtype: torch.dtype
) -> list[Tensor]:
    return [grad.new_empty((n, *grad.shape[1:]), dtype=dtype) for n in lengths]


# ``lengths`` is what compiled code has cut its shards to, with values that are only known, and checked, when it runs.
ragged_sum = define(
    "ragged_sum(Tensor[] shards, SymInt[] starts, SymInt size, SymInt[]? lengths, " + _TAIL + "Tensor",
    _ragged_sum,
    _ragged_sum_fake,
)
ragged_sum_adjoint = define(
    "ragged_sum_adjoint(Tensor grad, SymInt[] starts, SymInt[] lengths, " + _TAIL + "Tensor[]",
    _ragged_sum_adjoint,
    _ragged_sum_adjoint_fake,
)


# padded_sum


def _padded_sum(
    x: Tensor, starts: list[int], lengths: list[int], size: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    native.load()
    check_host_lengths(lengths, starts or None, [x.shape[1]] * x.shape[0], size)
    out = x.new_empty((size, *x.shape[2:]), dtype=dtype)
    kernels.sum_padded(out, readable(row_contiguous(x)), starts, lengths, op == "mean", scale, False)
    return out


def _padded_sum_fake(
    x: Tensor, starts: list[int], lengths: list[int], size: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((size, *x.shape[2:]), dtype=dtype)


def _padded_sum_adjoint(
    grad: Tensor, starts: list[int], lengths: list[int], capacity: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    begins = starts or [0] * len(lengths)
    intervals = [(s, s + n) for s, n in zip(begins, lengths)]
    count = contributions(intervals, grad.shape[0], grad.device) if op == "mean" else None
    spread = finish_gradient(grad, count, scale, dtype)
    rows = spread.new_zeros((len(lengths), capacity, *grad.shape[1:]))
    for row, (begin, end) in zip(rows, intervals):
        row[: end - begin] = spread[begin:end]
    return rows


def _padded_sum_adjoint_fake(
    grad: Tensor, starts: list[int], lengths: list[int], capacity: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    return grad.new_empty((len(lengths), capacity, *grad.shape[1:]), dtype=dtype)


padded_sum = define(
    "padded_sum(Tensor x, SymInt[] starts, SymInt[] lengths, SymInt size, " + _TAIL + "Tensor",
    _padded_sum,
    _padded_sum_fake,
)
padded_sum_adjoint = define(
    "padded_sum_adjoint(Tensor grad, SymInt[] starts, SymInt[] lengths, SymInt capacity, " + _TAIL + "Tensor",
    _padded_sum_adjoint,
    _padded_sum_adjoint_fake,
)


# padded_sum_device


def _padded_sum_device(
    x: Tensor, starts: Tensor | None, lengths: Tensor, size: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    if lengths.is_cpu and (starts is None or starts.is_cpu):
        begins = [] if starts is None else starts.tolist()
        return _padded_sum(x, begins, lengths.tolist(), size, op, scale, dtype)
    native.load()
    out = x.new_empty((size, *x.shape[2:]), dtype=dtype)
    kernels.sum_padded_device(out, readable(row_contiguous(x)), starts, lengths, op == "mean", scale, False)
    return out


def _padded_sum_device_fake(
    x: Tensor, starts: Tensor | None, lengths: Tensor, size: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((size, *x.shape[2:]), dtype=dtype)


def _device_positions(
    starts: Tensor | None, lengths: Tensor, capacity: int, size: int, device: Any
) -> tuple[Tensor, Tensor]:
    """For each padded row ``(R, capacity)``: the position it contributes to, and whether it does."""
    n = lengths.to(device).clamp(0, capacity)[:, None]
    begin = torch.zeros_like(n) if starts is None else starts.to(device).clamp(0, size)[:, None]
    row = torch.arange(capacity, device=device)
    position = begin + row
    return position, (row < n) & (position < size)


def _padded_sum_device_adjoint(
    grad: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    capacity: int,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
) -> Tensor:
    size = grad.shape[0]
    if size == 0 or capacity == 0:
        return grad.new_zeros((lengths.shape[0], capacity, *grad.shape[1:]), dtype=dtype)
    position, valid = _device_positions(starts, lengths, capacity, size, grad.device)
    count = None
    if op == "mean":
        count = torch.zeros(size, dtype=torch.int64, device=grad.device)
        count.index_put_((position.clamp(max=size - 1).flatten(),), valid.flatten().to(torch.int64), accumulate=True)
    spread = finish_gradient(grad, count, scale, dtype)
    return select(valid, spread[position.clamp(max=size - 1)])


padded_sum_device = define(
    "padded_sum_device(Tensor x, Tensor? starts, Tensor lengths, SymInt size, " + _TAIL + "Tensor",
    _padded_sum_device,
    _padded_sum_device_fake,
)
padded_sum_device_adjoint = define(
    "padded_sum_device_adjoint(Tensor grad, Tensor? starts, Tensor lengths, SymInt capacity, " + _TAIL + "Tensor",
    _padded_sum_device_adjoint,
    lambda grad, starts, lengths, capacity, op, scale, dtype: grad.new_empty(
        (lengths.shape[0], capacity, *grad.shape[1:]), dtype=dtype
    ),
)


# masked_sum


def _masked_sum(x: Tensor, mask: Tensor, op: str, scale: float | None, dtype: torch.dtype) -> Tensor:
    native.load()
    out = x.new_empty(x.shape[1:], dtype=dtype)
    kernels.sum_masked(out, readable(row_contiguous(x)), mask.contiguous(), op == "mean", scale, False)
    return out


def _masked_sum_adjoint(grad: Tensor, mask: Tensor, op: str, scale: float | None, dtype: torch.dtype) -> Tensor:
    spread = finish_gradient(grad, mask.sum(0) if op == "mean" else None, scale, dtype)
    return select(mask, spread.unsqueeze(0))


masked_sum = define(
    "masked_sum(Tensor x, Tensor mask, " + _TAIL + "Tensor",
    _masked_sum,
    lambda x, mask, op, scale, dtype: x.new_empty(x.shape[1:], dtype=dtype),
)
masked_sum_adjoint = define(
    "masked_sum_adjoint(Tensor grad, Tensor mask, " + _TAIL + "Tensor",
    _masked_sum_adjoint,
    lambda grad, mask, op, scale, dtype: grad.new_empty((mask.shape[0], *grad.shape), dtype=dtype),
)


# Autograd


def _link(operator: Operator, partner: Operator, arguments: Callable[[Any, list], list]) -> None:
    """Make ``partner`` the backward of ``operator``. All take ``(first, *middle, op, scale, dtype)``;
    ``arguments(first, middle)`` gives the partner's middle arguments, its dtype is the first argument's."""

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        first, *middle, ctx.op, ctx.scale, _ = inputs
        middle = arguments(first, middle)
        ctx.middle = [None if isinstance(m, Tensor) else m for m in middle]
        # Index tensors are cloned: the caller may write the next step's lengths before this step's backward.
        kept = [m.clone() if isinstance(m, Tensor) and m.dtype != torch.bool else m for m in middle]
        ctx.save_for_backward(*[m if isinstance(m, Tensor) else None for m in kept])
        ctx.dtype, ctx.rest = (first[0] if isinstance(first, list) else first).dtype, [None] * (len(inputs) - 1)

    def backward(ctx: Any, grad: Any) -> tuple:
        # An expanded gradient (stride 0, from a following sum) becomes memory that the kernels can read.
        grad = [g.contiguous() for g in grad] if isinstance(grad, (list, tuple)) else grad.contiguous()
        middle = [m if t is None else t for m, t in zip(ctx.middle, ctx.saved_tensors)]
        return partner(grad, *middle, ctx.op, ctx.scale, ctx.dtype), *ctx.rest

    operator.differentiate(setup, backward)


_link(ragged_sum, ragged_sum_adjoint, lambda shards, m: [m[0], [s.shape[0] for s in shards]])
_link(ragged_sum_adjoint, ragged_sum, lambda grad, m: [m[0], grad.shape[0], None])
_link(padded_sum, padded_sum_adjoint, lambda x, m: [*m[:2], x.shape[1]])
_link(padded_sum_adjoint, padded_sum, lambda grad, m: [*m[:2], grad.shape[0]])
_link(padded_sum_device, padded_sum_device_adjoint, lambda x, m: [*m[:2], x.shape[1]])
_link(padded_sum_device_adjoint, padded_sum_device, lambda grad, m: [*m[:2], grad.shape[0]])
_link(masked_sum, masked_sum_adjoint, lambda x, m: m)
_link(masked_sum_adjoint, masked_sum, lambda grad, m: m)
