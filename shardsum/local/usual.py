"""The usual calls of ``ragged_sum`` with as little Python as possible: padded shards and host lengths, or a list of
whole shards; no starts, no gradient.

The operators ``sum_checked`` check what they are given themselves (:mod:`shardsum.local.kernels`); they and this module
refuse what is unusual or wrong without saying why. The checks of :mod:`shardsum.local.functional` then do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.numerics import resolve_out_dtype
from ..native import loader as native
from . import kernels

# torch.autograd.graph.increment_version without the checks of its argument.
_increment_version = torch._C._increment_version
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def _first_sum(*args: Any) -> Tensor | None:
    global usual_sum
    native.load()
    into, new = "sum_checked", "sum_checked_new"
    operators = [getattr(kernels, name) for form in (into, new) for name in (form, f"{form}_lengths")]
    usual_sum = native.make_usual_sum((Tensor, vars(forward_ad), _increment_version, *operators))
    return usual_sum(*args)


#: ``usual_sum(x, lengths, size, op, scale, out_dtype, out)``, arguments as of ``ragged_sum``: the result (``out``,
#: where given), or None where anything is unusual or wrong, as a result in another ``out_dtype`` is.
usual_sum: Callable[..., Tensor | None] = _first_sum


def usual_sum_as(
    x: Tensor, lengths: Any, size: int | None, op: str, scale: float | None, out_dtype: torch.dtype
) -> Tensor | None:
    """The same into a new tensor of ``out_dtype``."""
    if type(out_dtype) is not torch.dtype:  # new_empty would take the type float, too
        return None
    try:
        out = x.new_empty(x.shape[1:], dtype=out_dtype)
    except (RuntimeError, TypeError):
        return None
    return usual_sum(x, lengths, size, op, scale, None, out)


def usual_list_sum(
    shards: Any, size: int | None, op: str, scale: float | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor | None:
    """The same for whole shards in a list or tuple."""
    if _is_dynamo_compiling() or (type(shards) is not list and type(shards) is not tuple):
        return None
    if forward_ad._current_level >= 0:
        return None
    if not native.are_plain(shards, Tensor, "requires_grad" if torch.is_grad_enabled() else None):
        return None
    if type(op) is not str or (op != "sum" and op != "mean") or (scale is not None and type(scale) is not float):
        return None
    if size is not None and (type(size) is not int or size < 0):
        return None
    try:
        if out is None and out_dtype is None and size is None:
            return native.call_with(kernels.sum_checked_new_list, None, -1, op == "mean", scale, shards)
        if out is None:
            size = max([x.shape[0] for x in shards]) if size is None else size
            dtype = resolve_out_dtype(shards[0].dtype, out_dtype)
            out = shards[0].new_empty((size, *shards[0].shape[1:]), dtype=dtype)
        elif out_dtype is not None or out.requires_grad:
            return None
        size = -1 if size is None else size
        native.call_with(kernels.sum_checked_list, None, size, op == "mean", scale, out, shards)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        return None
    _increment_version((out,))
    return out
