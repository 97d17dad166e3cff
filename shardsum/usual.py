"""The usual calls of ``ragged_sum`` with as little Python as possible: padded shards and host lengths, or a list of
whole shards; no starts, no gradient.

The operators ``sum_checked`` check what they are given themselves (:mod:`shardsum.kernels`); they and this module
refuse what is unusual or wrong without saying why. The checks of :mod:`shardsum.ops` then do.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels, native
from .numerics import resolve_out_dtype

# torch.autograd.graph.increment_version without the checks of its argument.
_increment_version = torch._C._increment_version
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_INTS = {int}
_MAX_VECTORS = 256
_vectors: dict[tuple[int, ...], Tensor] = {}  # lists of lengths as tensors


def usual_sum(
    x: Tensor,
    lengths: Any,
    size: int | None,
    op: str,
    scale: float | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor | None:
    """The result (``out``, where given), or None where anything is unusual or wrong. Arguments as of ``ragged_sum``."""
    if _is_dynamo_compiling() or type(x) is not Tensor or forward_ad._current_level >= 0:
        return None
    if (x.requires_grad and torch.is_grad_enabled()) or (op != "sum" and op != "mean"):
        return None
    if scale is not None and type(scale) is not float:
        return None  # the operator would drop its gradient
    if size is not None and (type(size) is not int or x.shape[1:2] != (size,)):
        return None
    if type(lengths) is list:
        lengths = _vector_of(lengths)
        if lengths is None:
            return None
    elif type(lengths) is not Tensor or not lengths.is_cpu or lengths.dtype != torch.int64:
        return None
    native.load()
    plain = scale is None and op == "sum"
    try:
        if out is None and out_dtype is None:
            if plain:
                return kernels.sum_checked_new(x, lengths)
            return kernels.sum_checked_new_finish(x, lengths, op == "mean", scale)
        if out is None:
            out = x.new_empty(x.shape[1:], dtype=out_dtype)
        elif out_dtype is not None or out.requires_grad:
            return None
        if plain:
            kernels.sum_checked(out, x, lengths)
        else:
            kernels.sum_checked_finish(out, x, lengths, op == "mean", scale)
    except (RuntimeError, TypeError, AttributeError):
        return None
    _increment_version((out,))
    return out


def usual_list_sum(
    shards: Any, size: int | None, op: str, scale: float | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor | None:
    """The same for whole shards in a list or tuple."""
    if not isinstance(shards, (list, tuple)) or {*map(type, shards)} != {Tensor} or forward_ad._current_level >= 0:
        return None
    if _is_dynamo_compiling() or (torch.is_grad_enabled() and any([x.requires_grad for x in shards])):
        return None
    if (op != "sum" and op != "mean") or (scale is not None and type(scale) is not float):
        return None
    if size is not None and (type(size) is not int or size < 0):
        return None
    native.load()
    try:
        if out is None and out_dtype is None and size is None:
            return kernels.sum_checked_new_list(shards, op == "mean", scale)
        if out is None:
            size = max([x.shape[0] for x in shards]) if size is None else size
            dtype = resolve_out_dtype(shards[0].dtype, out_dtype)
            out = shards[0].new_empty((size, *shards[0].shape[1:]), dtype=dtype)
        elif out_dtype is not None or out.requires_grad:
            return None
        kernels.sum_checked_list(out, shards, -1 if size is None else size, op == "mean", scale)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        return None
    _increment_version((out,))
    return out


def _vector_of(lengths: list[int]) -> Tensor | None:
    """Ints as a tensor: a list of four costs the dispatcher five times as much. None where something else is there."""
    ints = (*lengths,)  # not what another thread may write meanwhile
    if not _INTS.issuperset(map(type, ints)):  # 8.0 and True equal ints; the operator would read 3.7 in a Tensor as 3
        return None
    vector = _vectors.get(ints)
    return _new_vector(ints) if vector is None else vector


def _new_vector(ints: tuple[int, ...]) -> Tensor | None:
    if torch._C._are_functorch_transforms_active():  # a tensor made here would end with the transform
        return None
    try:  # in a quarter of the time of torch.tensor
        vector = torch.frombuffer(array("q", ints), dtype=torch.int64)
    except (OverflowError, ValueError):  # more than 64 bits; no lengths
        return None
    if type(vector) is not Tensor:  # a mode makes its own here
        return None
    if len(_vectors) >= _MAX_VECTORS:
        _vectors.clear()
    _vectors[ints] = vector
    return vector
