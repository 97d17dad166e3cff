"""Options of the collectives and of their plans, by name and type, for the overloads of :mod:`.methods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.words import Grad, Op

if TYPE_CHECKING:
    from typing_extensions import Required


class _Sums(TypedDict, total=False):
    """Options of the collectives that add."""

    op: Op
    scale: float | None
    out_dtype: torch.dtype | None
    name: str | None


class _Planned(TypedDict, total=False):
    """What every plan takes."""

    row_shape: Sequence[int]
    dtype: torch.dtype
    s_max: int | None


class _AllReduce(_Sums, total=False):
    """Options of an all_reduce."""

    size: int | None
    grad: Grad


class AllReducePlan(_AllReduce, _Planned):
    """Options of a planned all_reduce."""


class AllReduce(_AllReduce, total=False):
    """Options of all_reduce."""

    out: Tensor | None


class _ReduceScatter(_Sums, total=False):
    """Options of a reduce_scatter."""

    size: int | None
    splits: Sequence[int] | None


class ReduceScatterPlan(_ReduceScatter, _Planned):
    """Options of a planned reduce_scatter."""


class ReduceScatter(_ReduceScatter, total=False):
    """Options of reduce_scatter."""

    out: Tensor | Sequence[Tensor] | None


class _AllGather(TypedDict, total=False):
    """Options of an all_gather."""

    grad: Grad
    name: str | None


class AllGatherPlan(_AllGather, _Planned):
    """Options of a planned all_gather."""


class AllGather(_AllGather, total=False):
    """Options of all_gather."""

    out: Tensor | None


class Exchange(_Sums, total=False):
    """Options of exchange."""

    size: Required[int]
    out: Tensor | Sequence[Tensor] | None


class ExchangePlan(_Sums, _Planned, total=False):
    """Options of a planned exchange."""

    size: Required[int]
    in_intervals: Required[Sequence[Interval]]
    out_intervals: Required[Sequence[Interval]]
