"""The collectives as users call them, with types that tell one Tensor from a list of them.

What holds for all of them is said in :mod:`shardsum.group.group`. The overloads, and the options by name and type, are
for type checkers; what runs is the last definition of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.words import Grad, Op
from .arguments import Shards
from .calls import call
from .handle import Handle
from .planner import Planner

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: One shard gives a Tensor, a list of them a list.
Form = TypeVar("Form", Tensor, list[Tensor])
HostLengths = Sequence[int] | None
Lengths = HostLengths | Tensor


# Options of calls and of plans; what both share begins with an underscore


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


class Collectives:
    """What :class:`shardsum.group.group.CollectiveGroup` offers over its planner."""

    _planner: Planner

    @overload
    def all_reduce(
        self,
        shards: Shards,
        lengths: Lengths = None,
        *,
        async_op: Literal[False] = False,
        **options: Unpack[AllReduce],
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, shards: Shards, lengths: Lengths = None, *, async_op: Literal[True], **options: Unpack[AllReduce]
    ) -> Handle[Tensor]: ...
    def all_reduce(
        self,
        shards: Shards,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        size: int | None = None,
        op: Op = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        grad: Grad = "identity",
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The ragged sum of all R shards on every process: ``y[j] = sum of x_r[j]`` over r with ``j < length_r``.

        Arguments and errors are those of all collectives (:mod:`shardsum.group.group`); ``op``, ``scale``,
        ``out_dtype`` and ``out`` as in :func:`shardsum.ragged_sum`.

        Returns:
            ``(size, *F)``, with ``async_op`` a :class:`Handle` of it.

        Example:
            >>> ShardGroup(2).all_reduce([torch.tensor([1.0, 2.0]), torch.tensor([4.0])])
            tensor([5., 2.])
        """
        out_dtype = out.dtype if out_dtype is None and isinstance(out, Tensor) else out_dtype
        options = (out_dtype, size, op, scale, grad, name)
        return call(self._planner, "all_reduce", shards, lengths, options, out, async_op)

    @overload
    def reduce_scatter(
        self,
        shards: Form,
        lengths: Lengths = None,
        *,
        async_op: Literal[False] = False,
        **options: Unpack[ReduceScatter],
    ) -> Form: ...
    @overload
    def reduce_scatter(
        self, shards: Form, lengths: Lengths = None, *, async_op: Literal[True], **options: Unpack[ReduceScatter]
    ) -> Handle[Form]: ...
    def reduce_scatter(
        self,
        shards: Shards,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        size: int | None = None,
        splits: Sequence[int] | None = None,
        op: Op = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The ragged sum, each virtual rank receiving its part of the positions.

        Arguments and errors are those of all collectives (:mod:`shardsum.group.group`). ``splits`` are R ints that sum
        to ``size`` (default: even, longer first); ``out`` is a list with one Tensor a hosted virtual rank, or the
        Tensor where there is one.

        Returns:
            ``(splits[v], *F)`` per hosted virtual rank v: a list, or a Tensor when ``shards`` was one and this process
            hosts one virtual rank. (Type checkers take a Tensor to be one shard, not several stacked ones.)

        Example:
            >>> ShardGroup(2).reduce_scatter([torch.tensor([1.0, 2.0]), torch.tensor([4.0])], splits=[1, 1])
            [tensor([5.]), tensor([2.])]
        """
        splits = tuple(splits) if isinstance(splits, (list, Iterator)) else splits
        options = (out_dtype, size, op, scale, splits, name)
        return call(self._planner, "reduce_scatter", shards, lengths, options, out, async_op)

    @overload
    def all_gather(
        self,
        shards: Shards,
        lengths: Sequence[int] | None = None,
        *,
        async_op: Literal[False] = False,
        **options: Unpack[AllGather],
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        shards: Shards,
        lengths: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        **options: Unpack[AllGather],
    ) -> Handle[Tensor]: ...
    def all_gather(
        self,
        shards: Shards,
        lengths: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        grad: Grad = "sum",
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """All shards behind one another in virtual-rank order, on every process. Any dtype; bits are kept.

        Arguments and errors are those of all collectives (:mod:`shardsum.group.group`), lengths R ints or None.

        Returns:
            ``(sum of lengths, *F)``.

        Example:
            >>> ShardGroup(2).all_gather([torch.tensor([1, 2]), torch.tensor([4])])
            tensor([1, 2, 4])
        """
        return call(self._planner, "all_gather", shards, lengths, (grad, name), out, async_op)

    @overload
    def exchange(
        self,
        shards: Form,
        in_intervals: Sequence[Interval],
        out_intervals: Sequence[Interval],
        *,
        async_op: Literal[False] = False,
        **options: Unpack[Exchange],
    ) -> Form: ...
    @overload
    def exchange(
        self,
        shards: Form,
        in_intervals: Sequence[Interval],
        out_intervals: Sequence[Interval],
        *,
        async_op: Literal[True],
        **options: Unpack[Exchange],
    ) -> Handle[Form]: ...
    def exchange(
        self,
        shards: Shards,
        in_intervals: Sequence[Interval],
        out_intervals: Sequence[Interval],
        *,
        size: int,
        op: Op = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The operator itself: ``y_q[j] = sum of x_r[j]`` over r with ``j in I_r``, for ``j in O_q``.

        Args:
            shards: shard r holds the positions of ``in_intervals[r]`` (rows beyond them are ignored).
            in_intervals, out_intervals: R pairs ``(begin, end)`` of global positions each, equal on all processes;
                empty ones allowed, outputs may overlap. What no output covers is ignored and gets gradient 0.
            size: the end of all positions.
            out: as for :meth:`reduce_scatter`.

        Returns:
            ``(|O_v|, *F)`` per hosted virtual rank v, in the form of ``shards`` (see :meth:`reduce_scatter`).

        Example:
            >>> x = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])]
            >>> ShardGroup(2).exchange(x, [(0, 2), (1, 3)], [(0, 3), (1, 2)], size=3)
            [tensor([1., 6., 8.]), tensor([6.])]
        """
        options = (out_dtype, size, op, scale, name)
        intervals = (in_intervals, out_intervals)
        return call(self._planner, "exchange", shards, intervals, options, out, async_op)
