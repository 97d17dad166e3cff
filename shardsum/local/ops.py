"""The registered operators of local sums, with fake implementations and autograd.

Every operator F is linear in its shards; its backward B is the adjoint, an operator whose backward is F again.
B: the gradient ``(size, *F)`` is divided by the count of contributions (mean) and multiplied by scale in the
accumulator's dtype, rounded once to the shards' dtype, and copied to every shard that covers the position.

    ragged_sum         Tensor[] (length_r, *F), starts                 <-> ragged_sum_adjoint
    padded_sum         Tensor (R, S_MAX, *F), starts, firsts, lengths  <-> padded_sum_adjoint
    padded_sum_device  Tensor (R, S_MAX, *F), starts, lengths: tensors <-> padded_sum_device_adjoint
    masked_sum         Tensor (R, S_MAX, *F), mask                     <-> masked_sum_adjoint

``starts``: position of each shard's first row (() is 0); ``firsts``: the row to begin with (() is 0). A mask is bool
``(R, S_MAX)`` or words (:mod:`.kernels`). Lengths are ``SymInt[]``: ``int[]`` would compile anew for every set of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.checks import check_host_lengths
from ..core.numerics import NATIVE_DTYPES, check_op
from ..native import loader as native
from . import kernels
from .gradients import coverage, finish_gradient, select
from .linear import define, link
from .plan import planned

_TAIL = "str op, float? scale, ScalarType dtype) -> "


def row_contiguous(x: Tensor) -> Tensor:
    """x itself when every ``x[r]`` is contiguous (rows may lie apart), else a contiguous copy."""
    return x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def readable(x: Tensor) -> Tensor:
    """x in a dtype that the kernels read (the wide unsigned integers become int64, which wraps alike)."""
    return x if x.dtype in NATIVE_DTYPES else x.to(torch.int64)


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
    check_op(op, scale, shards[0].dtype)
    if lengths is not None:
        check_host_lengths(lengths, starts, [s.shape[0] for s in shards], size)
    out = shards[0].new_empty((size, *shards[0].shape[1:]), dtype=dtype)
    rows = [readable(s.contiguous()) for s in shards]
    kernels.sum_rows(out, None, rows, starts, 0, op == "mean", scale)
    return out


def _ragged_sum_adjoint(
    grad: Tensor, starts: Sequence[int], lengths: Sequence[int], op: str, scale: float | None, dtype: torch.dtype
) -> list[Tensor]:
    size = grad.shape[0]
    ends = [s + n for s, n in zip(starts, lengths)]
    count = coverage(list(zip(starts, ends)), size, grad.device) if op == "mean" else None
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


# ``lengths`` is what compiled code has cut its shards to, with values that are only known, and checked, when it runs.
ragged_sum = define(
    "ragged_sum(Tensor[] shards, SymInt[] starts, SymInt size, SymInt[]? lengths, " + _TAIL + "Tensor",
    _ragged_sum,
    lambda shards, starts, size, *tail: shards[0].new_empty((size, *shards[0].shape[1:]), dtype=tail[-1]),
)
ragged_sum_adjoint = define(
    "ragged_sum_adjoint(Tensor grad, SymInt[] starts, SymInt[] lengths, " + _TAIL + "Tensor[]",
    _ragged_sum_adjoint,
    lambda grad, starts, lengths, *tail: [grad.new_empty((n, *grad.shape[1:]), dtype=tail[-1]) for n in lengths],
)


# padded_sum


def _padded_sum(
    x: Tensor, starts: list[int], firsts: list[int], lengths: list[int], size: int, op: str, scale: float | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    plan = planned(list(lengths), list(starts) or None, size, str(op), scale, dtype, False, list(firsts) or None)
    try:
        if plan is None:
            raise RuntimeError("padded_sum: bad bounds")
        return kernels.sum_plan_new(readable(x), plan)
    except RuntimeError:
        check_op(op, scale, x.dtype)
        check_host_lengths(lengths, starts or None, [x.shape[1]] * x.shape[0], size)
        raise


def _padded_sum_adjoint(
    grad: Tensor, starts: list[int], firsts: list[int], lengths: list[int], capacity: int, op: str,
    scale: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    count = None
    if op == "mean":
        begins = starts or [0] * len(lengths)
        count = coverage([(s, s + n) for s, n in zip(begins, lengths)], grad.shape[0], grad.device)
    spread = finish_gradient(grad, count, scale, dtype)
    plan = planned(list(lengths), list(starts) or None, grad.shape[0], "sum", None, None, False, list(firsts) or None)
    if plan is None:
        raise RuntimeError("padded_sum_adjoint: bad bounds")
    return kernels.spread_plan(spread, plan, len(lengths), capacity)


padded_sum = define(
    "padded_sum(Tensor x, SymInt[] starts, SymInt[] firsts, SymInt[] lengths, SymInt size, " + _TAIL + "Tensor",
    _padded_sum,
    lambda x, starts, firsts, lengths, size, *tail: x.new_empty((size, *x.shape[2:]), dtype=tail[-1]),
)
padded_sum_adjoint = define(
    "padded_sum_adjoint(Tensor grad, SymInt[] starts, SymInt[] firsts, SymInt[] lengths, SymInt capacity, "
    + _TAIL
    + "Tensor",
    _padded_sum_adjoint,
    lambda grad, starts, firsts, lengths, capacity, *tail: grad.new_empty(
        (len(lengths), capacity, *grad.shape[1:]), dtype=tail[-1]
    ),
)


# padded_sum_device


def _padded_sum_device(
    x: Tensor, starts: Tensor | None, lengths: Tensor, size: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    if lengths.is_cpu and (starts is None or starts.is_cpu):
        begins = [] if starts is None else starts.tolist()
        return _padded_sum(x, begins, [], lengths.tolist(), size, op, scale, dtype)
    native.load()
    check_op(op, scale, x.dtype)
    out = x.new_empty((size, *x.shape[2:]), dtype=dtype)
    kernels.sum_padded_device(out, readable(row_contiguous(x)), starts, lengths, op == "mean", scale)
    return out


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
    # Of every padded row ``(R, capacity)``: the position it contributes to, and whether it does.
    n = lengths.to(grad.device).clamp(0, capacity)[:, None]
    begin = torch.zeros_like(n) if starts is None else starts.to(grad.device).clamp(0, size)[:, None]
    row = torch.arange(capacity, device=grad.device)
    valid = (row < n) & (begin + row < size)
    position = (begin + row).clamp(max=size - 1)
    count = None
    if op == "mean":
        count = torch.zeros(size, dtype=torch.int64, device=grad.device)
        count.index_put_((position.flatten(),), valid.flatten().to(torch.int64), accumulate=True)
    spread = finish_gradient(grad, count, scale, dtype)
    return select(valid, spread[position])


padded_sum_device = define(
    "padded_sum_device(Tensor x, Tensor? starts, Tensor lengths, SymInt size, " + _TAIL + "Tensor",
    _padded_sum_device,
    lambda x, starts, lengths, size, *tail: x.new_empty((size, *x.shape[2:]), dtype=tail[-1]),
)
padded_sum_device_adjoint = define(
    "padded_sum_device_adjoint(Tensor grad, Tensor? starts, Tensor lengths, SymInt capacity, " + _TAIL + "Tensor",
    _padded_sum_device_adjoint,
    lambda grad, starts, lengths, capacity, *tail: grad.new_empty(
        (lengths.shape[0], capacity, *grad.shape[1:]), dtype=tail[-1]
    ),
)


# masked_sum


def _masked_sum(x: Tensor, mask: Tensor, op: str, scale: float | None, dtype: torch.dtype) -> Tensor:
    plan = planned(None, None, None, str(op), check_op(op, scale, x.dtype), dtype, False)
    return kernels.sum_plan_new_masked(readable(x), mask, plan)


def _masked_sum_adjoint(
    grad: Tensor, mask: Tensor, capacity: int, op: str, scale: float | None, dtype: torch.dtype
) -> Tensor:
    mask = kernels.unpack_bits(mask, capacity)
    spread = finish_gradient(grad, mask.sum(0) if op == "mean" else None, scale, dtype)
    return select(mask, spread.unsqueeze(0))


masked_sum = define(
    "masked_sum(Tensor x, Tensor mask, " + _TAIL + "Tensor",
    _masked_sum,
    lambda x, mask, op, scale, dtype: x.new_empty(x.shape[1:], dtype=dtype),
)
masked_sum_adjoint = define(
    "masked_sum_adjoint(Tensor grad, Tensor mask, SymInt capacity, " + _TAIL + "Tensor",
    _masked_sum_adjoint,
    lambda grad, mask, capacity, op, scale, dtype: grad.new_empty((mask.shape[0], *grad.shape), dtype=dtype),
)


link(ragged_sum, ragged_sum_adjoint, lambda shards, m: [m[0], [s.shape[0] for s in shards]])
link(ragged_sum_adjoint, ragged_sum, lambda grad, m: [m[0], grad.shape[0], None])
link(padded_sum, padded_sum_adjoint, lambda x, m: [*m[:3], x.shape[1]])
link(padded_sum_adjoint, padded_sum, lambda grad, m: [*m[:3], grad.shape[0]])
link(padded_sum_device, padded_sum_device_adjoint, lambda x, m: [*m[:2], x.shape[1]])
link(padded_sum_device_adjoint, padded_sum_device, lambda grad, m: [*m[:2], grad.shape[0]])
link(masked_sum, masked_sum_adjoint, lambda x, m: [m[0], x.shape[1]])
link(masked_sum_adjoint, masked_sum, lambda grad, m: [m[0]])
