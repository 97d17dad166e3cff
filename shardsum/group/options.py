"""Options of the collectives and of their plans, by name and type, for the overloads of :mod:`.methods`.

What a call and a plan of a collective share begins with an underscore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.words import Grad, Op


class _Sums(TypedDict, total=False):
    op: Op
    scale: float | None
    out_dtype: torch.dtype | None
    name: str | None


class _Planned(TypedDict, total=False):
    row_shape: Sequence[int]
    dtype: torch.dtype
    s_max: int | None


class _AllReduce(_Sums, total=False):
    size: int | None
    grad: Grad


class AllReducePlan(_AllReduce, _Planned):
    pass


class AllReduce(_AllReduce, total=False):
    out: Tensor | None


class _ReduceScatter(_Sums, total=False):
    size: int | None
    splits: Sequence[int] | None


class ReduceScatterPlan(_ReduceScatter, _Planned):
    pass


class ReduceScatter(_ReduceScatter, total=False):
    out: Tensor | Sequence[Tensor] | None


class _AllGather(TypedDict, total=False):
    grad: Grad
    name: str | None


class AllGatherPlan(_AllGather, _Planned):
    pass


class AllGather(_AllGather, total=False):
    out: Tensor | None


class _Exchange(_Sums):
    size: int


class Exchange(_Exchange, total=False):
    out: Tensor | Sequence[Tensor] | None


class ExchangePlan(_Exchange, _Planned):
    in_intervals: Sequence[Interval]
    out_intervals: Sequence[Interval]
