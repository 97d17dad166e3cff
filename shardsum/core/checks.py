"""Checks: bad input is a ValueError that names the argument, the virtual rank and both values. Also values as text."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MAX_POSITIONS = 1 << 48  # rows of a tensor; far beyond memory, far below overflow
_INDEX_DTYPES = (torch.int32, torch.int64)
_NARROW_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16)
_SHOWN = 8  # items of a list in a repr


def is_strided(value: Any) -> bool:
    """True for a Tensor whose elements lie in memory at strides (not sparse, nested or opaque)."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if not is_strided(value):
        return f"a {value.dtype} Tensor of layout {'nested' if value.is_nested else value.layout}"
    return f"{value.dtype} {tuple(value.shape)}"


def brief(values: Sequence[object]) -> str:
    """A list as Python shows it, but of many items the first ones and their number.

    Example:
        >>> brief([3, 1]), brief(range(64))
        ('[3, 1]', '[0, 1, 2, 3, 4, 5, 6, 7, ... 64 in all]')
    """
    if len(values) <= _SHOWN + 1:
        return str(list(values))
    return f"[{', '.join(map(repr, values[:_SHOWN]))}, ... {len(values)} in all]"


def _have_tangents(tensors: Sequence[Tensor]) -> bool:
    forward_mode = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    return forward_mode and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records what is done to these tensors. ValueError for tensors with a forward-mode tangent, which
    would be lost."""
    if _have_tangents(tensors):
        raise ValueError("shards: forward-mode derivatives are not implemented; use backward")
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def check_host_lengths(
    lengths: Sequence[int], starts: Sequence[int] | None, capacities: Sequence[int], size: int | None
) -> tuple[list[int], list[int], int]:
    """``(lengths, starts, size)`` as plain ints, or the ValueError that names the virtual rank and both values."""
    lengths = as_ints("lengths", lengths, len(capacities))
    begins = [0] * len(lengths) if starts is None else as_ints("starts", starts, len(capacities))
    size = None if size is None else check_size(size)
    for r, (start, n, capacity) in enumerate(zip(begins, lengths, capacities)):
        if n < 0:
            raise ValueError(f"lengths: virtual rank {r} has {n}, a length is at least 0")
        if n > capacity:
            raise ValueError(f"lengths: virtual rank {r} has {n}, but its shard holds {capacity} rows")
        if start < 0:
            raise ValueError(f"starts: virtual rank {r} starts at {start}, a position is at least 0")
        if size is not None and start + n > size:
            raise ValueError(f"lengths: virtual rank {r} ends at {start + n}, beyond size {size}")
    if size is None:
        size = max(capacities) if starts is None else max(s + n for s, n in zip(begins, lengths))
    return lengths, begins, check_size(size)


def as_index(value: Any) -> int:
    """``value`` as an int. TypeError for what is none, and for a bool: a row of a mask is no list of lengths."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise TypeError
    return operator.index(value)


def is_count(value: Any) -> bool:
    """Whether ``value`` is an int, not a bool, that a 64-bit count can hold."""
    try:
        return 0 <= as_index(value) < 2**63
    except TypeError:
        return False


def check_size(size: Any) -> int:
    if torch.compiler.is_compiling():  # a symbol; the operator sees the value
        return size
    try:
        value = as_index(size)
    except TypeError:
        raise ValueError(f"size: expected an int, got {size!r}") from None
    if not 0 <= value < _MAX_POSITIONS:
        raise ValueError(f"size: {value} is {'negative' if value < 0 else 'more than any tensor holds'}")
    return value


def as_ints(name: str, values: Sequence[int], count: int) -> list[int]:
    try:
        ints = list(values)
        if not torch.compiler.is_compiling() and {*map(type, ints)} != {int}:
            ints = [as_index(v) for v in ints]
    except TypeError:
        raise ValueError(f"{name}: expected {count} ints or an integer Tensor, got {values!r}") from None
    if len(ints) != count:
        raise ValueError(f"{name}: {len(ints)} values for {count} virtual ranks")
    return ints


def check_index_tensor(name: str, value: Tensor, count: int) -> Tensor:
    """``value`` as a contiguous int32 or int64 tensor ``(count,)``; ValueError when it is anything else."""
    if value.dtype in _NARROW_INDEX_DTYPES:
        value = value.to(torch.int32)
    if value.dtype not in _INDEX_DTYPES or not is_strided(value):
        raise ValueError(f"{name}: expected an integer Tensor ({count},), got {describe(value)}")
    if tuple(value.shape) != (count,):
        raise ValueError(f"{name}: shape {tuple(value.shape)} for {count} virtual ranks")
    return value.contiguous()


def check_shards(shards: Sequence[Tensor], first_rank: Sequence[int] | None = None) -> list[Tensor]:
    """A list of Tensors ``(length_r, *F)`` of one dtype, device and trailing shape; ValueError names the odd one.

    ``first_rank`` gives the virtual rank of each list entry (default: 0, 1, ...).
    """
    shards = list(shards) if isinstance(shards, (list, tuple)) else shards
    if not isinstance(shards, list) or not shards:
        raise ValueError(f"shards: expected a Tensor or a non-empty sequence of Tensors, got {describe(shards)}")
    first = shards[0]
    for i, shard in enumerate(shards):
        r = i if first_rank is None else first_rank[i]
        if isinstance(shard, Tensor) and is_traceable_wrapper_subclass(shard):
            raise ValueError(
                f"shards: virtual rank {r} is a {type(shard).__name__}, which wraps other tensors; pass a plain Tensor "
                "(of a DTensor its to_local())"
            )
        if not is_strided(shard) or shard.dim() < 1:
            raise ValueError(f"shards: virtual rank {r} is {describe(shard)}, expected a Tensor (length, *F)")
        if shard.dtype != first.dtype:
            raise ValueError(f"shards: virtual rank {r} has dtype {shard.dtype}, the first has {first.dtype}")
        if shard.device != first.device:
            raise ValueError(f"shards: virtual rank {r} has device {shard.device}, the first has {first.device}")
        if shard.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"shards: virtual rank {r} has trailing shape {tuple(shard.shape[1:])}, "
                f"the first has {tuple(first.shape[1:])}"
            )
    return shards


def check_out(out: Tensor, shards: Sequence[Tensor], shape: Sequence[int | None], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``out`` can receive a result of these shards, of this dtype and shape (None: of any
    extent)."""
    if not is_strided(out):
        raise ValueError(f"out: expected a Tensor, got {describe(out)}")
    fits = out.shape == shape or (out.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, out.shape)))
    if not fits or out.dtype != dtype or out.device != shards[0].device:
        result = f"{dtype} {tuple('size' if n is None else n for n in shape)} on {shards[0].device}"
        raise ValueError(f"out: {describe(out)} on {out.device}, but the result is {result}")
    if torch.compiler.is_compiling():  # the result is copied there, with its gradient
        return
    if not has_distinct_elements(out):
        how = "is expanded" if 0 in out.stride() else "overlaps itself"
        raise ValueError(
            f"out: {how} (shape {tuple(out.shape)}, strides {out.stride()}); several elements share one place in memory"
        )
    tensors = [*shards, out]
    if _have_tangents(tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        raise ValueError("out: not possible where gradients are needed; use the returned tensor")
    for r, shard in enumerate(shards):
        if overlap(out, shard):
            raise ValueError(f"out: shares memory with the shards (tensor {r}); rows would change while they are read")


def has_distinct_elements(x: Tensor) -> bool:
    """Whether no two elements of a strided tensor lie at one place in memory."""
    if x.numel() < 2 or x.is_contiguous():
        return True
    dims = sorted((stride, n) for n, stride in zip(x.shape, x.stride()) if n > 1)
    reach, nested = 0, True
    for stride, n in dims:
        nested = nested and stride > reach  # a step passes over all that the smaller strides reach
        reach += stride * (n - 1)
    if nested:
        return True
    if dims[0][0] == 0 or reach + 1 < x.numel():
        return False
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, n in dims:
        places = places[..., None] + stride * torch.arange(n, device="cpu")
    return places.unique().numel() == x.numel()


def overlap(a: Tensor, b: Tensor) -> bool:
    """True when the memory ranges that two strided tensors span intersect."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_begin, b_begin = a.data_ptr(), b.data_ptr()
    if not a_begin or not b_begin:  # fake tensors lie nowhere
        return False
    return a_begin < b_begin + _span(b) and b_begin < a_begin + _span(a)


def _span(x: Tensor) -> int:
    if x.is_contiguous():
        return x.numel() * x.element_size()
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))) * x.element_size()
