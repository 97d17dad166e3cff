"""The usual calls of ``ragged_sum`` with as little Python as possible: padded shards and host lengths, or a list of
whole shards; no starts, no gradient.

The operators ``sum_checked`` check what they are given themselves (:mod:`shardsum.kernels`); they and this module
refuse what is unusual or wrong without saying why. The checks of :mod:`shardsum.ops` then do.
"""

from __future__ import annotations

import marshal
import struct
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels, native
from .numerics import resolve_out_dtype

# torch.autograd.graph.increment_version without the checks of its argument.
_increment_version = torch._C._increment_version
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_MAX_COUNTS = 64


class _Vector:
    """A CPU tensor of so many lengths, which is overwritten. ``key`` are those in it, as marshal writes a list of them;
    ``others`` are free."""

    __slots__ = ("key", "kinds", "others", "read", "tensor", "write")

    def __init__(self, length: int) -> None:
        memory = bytearray(8 * length)
        self.tensor = torch.frombuffer(memory, dtype=torch.int64)  # ValueError for none
        self.write = partial(struct.Struct(f"{length}q").pack_into, memory, 0)
        if len(_free) > _MAX_COUNTS:  # a program with ever other numbers of shards would keep them all
            _free.clear()
        self.key, self.others = b"", _free[length]
        self.read, self.kinds = struct.Struct("<5x" + "xi" * length).unpack, b"i" * length
        if type(self.tensor) is not Tensor or torch._C._are_functorch_transforms_active():
            raise ValueError("a mode makes its own tensors, and those of a transform end with it")


_free: defaultdict[int, list[_Vector]] = defaultdict(list)  # by number of lengths; a call takes one while it runs


def _take(lengths: list[int]) -> _Vector | None:
    """Ints as a tensor: of four it costs the dispatcher a fifth of a list. None where something else is there.

    marshal looks at them once, whatever another thread may write meanwhile, and tells True and 8.0 from ints, which a
    tensor would take: 5 bytes in front, then a byte "i" and 4 of value for each that fits into 32 bits.
    """
    try:
        key = marshal.dumps(lengths, 2)
        free = _free[len(lengths)]
        vector = free.pop() if free else _Vector(len(lengths))
        if vector.key != key:
            if key[5::5] != vector.kinds:
                free.append(vector)
                return None
            vector.write(*vector.read(key))
            vector.key = key
    except (IndexError, ValueError, struct.error):  # another thread took the last one; none can be; of another length
        return None
    return vector


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
    if size is not None and (type(size) is not int or x.is_nested or x.shape[1:2] != (size,)):
        return None
    vector = None
    if type(lengths) is list:
        vector = _take(lengths)
        if vector is None:
            return None
        lengths = vector.tensor
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
    finally:
        if vector is not None:
            vector.others.append(vector)
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
