"""ContextBatch: context parallelism over one batch of packed documents, planned once and used by every layer.

Virtual rank r holds the tokens, queries, keys and values of its chunk of one long sequence. One exchange brings it the
keys and values from the start of its oldest document (:mod:`shardsum.training.context_chunks`); then it attends
locally, all documents in one kernel call where there is one (:mod:`shardsum.training.context_kernels`). The gradient of
that exchange is an exchange too: partial dK and dV, valid where the chunk's queries looked, are added over virtual
ranks in rank order, in fp32, and rounded once.

For given chunks and one compute thread a process the bits do not depend on the number of processes or the placement:
each virtual rank's work is the same sequence of operators on tensors of its own, never batched with another rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..core.checks import brief
from . import context_ops as ops
from . import lockstep
from .context_checks import QKV, AttentionOptions, check_shapes, hosted_tensors
from .context_chunks import Borders, to_device
from .context_inner import attend_by
from .context_kernels import has_lse, kernel_of
from .context_plan import SequencePlan
from .documents import documents_of
from .lockstep import running

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..group.group import CollectiveGroup
    from ..group.plan import Plan

Hosted = Tensor | Sequence[Tensor]


class ContextBatch:
    """One batch's plan. Made by :meth:`shardsum.ShardGroup.context_parallel`; keep it until the backward pass has run.

    Arguments and results "per hosted virtual rank" are a list of tensors in increasing virtual-rank order; one Tensor
    where the process hosts one.

    Attributes:
        lengths: rows of every virtual rank's chunk.
        cu_seqlens: borders of the documents.
        window: ``(left, right)`` with the causal mask in it: ``(-1, 0)`` is a causal mask alone.
        size: positions of the whole sequence.
        work: query-key pairs that attention computes, by process: what must be even for none to wait for another.
        recompute_exchange: K and V of other chunks are not kept from forward to backward but sent again.
    """

    def __init__(self, group: CollectiveGroup, plan: SequencePlan, exchanges: dict[Any, Any] | None = None) -> None:
        self.group, self.plan = group, plan
        #: Plans of exchanges by what travels, from those that the caller has of this sequence.
        self.exchanges: dict[Any, tuple[Plan, Plan]] = {} if exchanges is None else exchanges
        self.lengths, self.cu_seqlens, self.window = plan.lengths, plan.cu_seqlens, plan.window
        self.size, self.work, self.chunks = plan.size, plan.work, plan.chunks
        self.recompute_exchange = plan.recompute_exchange
        self.key = ops.register(self)
        #: The number of the call whose backward runs now, else 0.
        self.origin = 0

    def __repr__(self) -> str:
        return (
            f"ContextBatch({self.size} positions, {len(self.cu_seqlens) - 1} documents, "
            f"lengths={brief(self.lengths)}, window={self.window}, work={brief(self.work)})"
        )

    # What the sequence is cut into

    def split(self, x: Tensor, dim: int = 0) -> Any:
        """The hosted chunks of a whole sequence, each a copy of its own.

        Args:
            x: ``size`` positions along ``dim``; any dtype. Every process passes the same.

        Raises:
            ValueError: another number of positions.
        """
        if x.shape[dim] != self.size:
            raise ValueError(f"split: {x.shape[dim]} positions in dim {dim}, but the batch has {self.size}")
        chunks = (x.narrow(dim, chunk.owned[0], chunk.rows) for chunk in self.chunks)
        return self._deliver([c.clone(memory_format=torch.contiguous_format) for c in chunks])

    @cached_property
    def positions(self) -> Any:
        """The position inside its document of every row, int64 ``(length,)`` per hosted virtual rank, on the group's
        device."""
        found = [documents_of(self.cu_seqlens, *chunk.owned)[1] for chunk in self.chunks]
        return self._deliver([to_device(p, self.group.device) for p in found])

    def shift(
        self, x: Hosted, by: int = 1, ignore_index: float = -100, dim: int = -1, whole: bool | None = None
    ) -> Any:
        """``y[i] = x[i + by]`` where that is a position of the same document, else ``ignore_index``: labels.

        Args:
            x: the whole sequence along ``dim`` (before :meth:`split`: nothing travels), or the hosted chunks (then it
                is a collective: one exchange).
            by: positions; negative ones look back.
            whole: which of the two ``x`` is. Needed only where one chunk holds the whole sequence.

        Returns:
            In the form, shape and dtype of ``x``.
        """
        if whole is None:
            whole = isinstance(x, Tensor) and x.shape[dim] == self.size
            if whole and self.group.num_virtual_ranks > 1 and max(self.lengths) == self.size > 0:
                raise ValueError("shift: one chunk holds the whole sequence; pass whole=True or whole=False")
        if whole:
            assert isinstance(x, Tensor)
            first, last = self._span((0, self.size), by)
            return self._shifted(x, x.narrow(dim, first, last - first), (0, self.size), by, ignore_index, dim)
        if (now := running(self.group)) is not None:
            options: dict[str, Any] = {"by": by, "ignore_index": ignore_index, "dim": dim, "whole": False}
            return now.meet("shift", self.shift, (x,), **options)
        single, xs = hosted_tensors("x", x, self.group.virtual_ranks)
        rows = [t.movedim(dim, 0).contiguous() for t in xs]
        wanted = [self._span(interval, by) for interval in self.plan.owned]
        there = self.group.exchange(rows, self.plan.owned, wanted, size=self.size)
        there = [t.to(rows[0].dtype).movedim(0, dim) for t in there]
        outs = [self._shifted(t, s, c.owned, by, ignore_index, dim) for t, s, c in zip(xs, there, self.chunks)]
        return outs[0] if single else outs

    def _span(self, interval: tuple[int, int], by: int) -> tuple[int, int]:
        """The positions ``by`` behind an interval, as far as the sequence goes."""
        begin, end = (min(max(bound + by, 0), self.size) for bound in interval)
        return begin, end

    def _shifted(
        self, like: Tensor, source: Tensor, interval: tuple[int, int], by: int, ignore_index: float, dim: int
    ) -> Tensor:
        """``source``, the positions of :meth:`_span`, where ``like`` has those of the interval."""
        moved = torch.full_like(like, ignore_index)
        first, last = self._span(interval, by)
        if first == last:
            return moved
        theirs, own = (documents_of(self.cu_seqlens, first - back, last - back)[0] for back in (0, by))
        same = to_device(theirs == own, like.device)
        shape = [1] * like.dim()
        shape[dim] = last - first
        kept = torch.where(same.view(shape), source, torch.full_like(source, ignore_index))
        moved.narrow(dim, first - by - interval[0], last - first).copy_(kept)
        return moved

    def gather(self, y: Hosted, dim: int = 0) -> Tensor:
        """The whole sequence from the hosted chunks, on every process. Collective.

        Args:
            y: ``lengths[r]`` rows along ``dim`` per hosted virtual rank; any dtype.
        """
        if (now := running(self.group)) is not None:
            return now.meet("gather", self.gather, (y,), dim=dim)
        _, ys = hosted_tensors("y", y, self.group.virtual_ranks)
        rows = [t.movedim(dim, 0).contiguous() for t in ys]
        return self.group.all_gather(rows, self.lengths).movedim(0, dim)

    # Attention

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[AttentionOptions],
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Sequence[Tensor],
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[AttentionOptions],
    ) -> list[Tensor]: ...
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attention(
        self,
        q: Sequence[Tensor],
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        *,
        return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> tuple[list[Tensor], list[Tensor]]: ...
    def attention(
        self,
        q: Hosted,
        k: Hosted,
        v: Hosted,
        *,
        scale: float | None = None,
        inner: Callable[[Tensor, Tensor, Tensor, Borders], Any] | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of every hosted chunk to its documents' keys, wherever they are held. Collective.

        Args:
            q: ``(length, heads, head_dim)`` per hosted virtual rank. There is no batch dim: documents are the batch.
            k: ``(length, key_heads, head_dim)``; ``heads`` is a multiple of ``key_heads`` (grouped queries).
            v: ``(length, key_heads, value_dim)``. Under autocast q, k and v may have different dtypes.
            scale: factor of the scores; None is ``1 / sqrt(head_dim)``.
            inner: another attention (softcap, sinks, ALiBi, FlexAttention, FlashAttention 3).
                ``inner(q, k, v, borders)`` gets a chunk's q, the keys and values that it needs and
                :class:`shardsum.training.context_chunks.Borders`; it returns ``out`` of one row a query, or
                ``(out, lse)``. It applies ``borders.window`` itself. Not called for empty chunks.
            return_lse: also return the log-sum-exp of the scores, fp32 ``(length, heads)``, with its gradient (with
                ``inner``: what that returns).

        Returns:
            ``(length, heads, value_dim)`` per hosted virtual rank, or ``(outs, lses)``.

        Raises:
            ValueError: on every process, naming argument, virtual rank and both values.
        """
        ranks = self.group.virtual_ranks
        options: dict[str, Any] = {"scale": scale, "inner": inner, "return_lse": return_lse}
        if torch.compiler.is_compiling() and isinstance(q, Tensor) and len(ranks) > 1 and lockstep.outside_graphs:
            return lockstep.outside_graphs(self.attention, q, k, v, **options)
        if (now := running(self.group)) is not None:
            return now.meet("attention", self.attention, (q, k, v), **options)
        try:
            given = [hosted_tensors(name, x, ranks) for name, x in (("q", q), ("k", k), ("v", v))]
            single, qkv = given[0][0], [_autocast(xs) for _, xs in given]
            if not torch.compiler.is_compiling():
                self.check(qkv, scale, return_lse and inner is None)
                if inner is not None and scale is not None:
                    raise ValueError(f"scale: {scale}, but inner scales the scores itself")
                if inner is not None and return_lse and self.plan.has_chunks_of_two_calls:
                    raise ValueError(f"return_lse: not with inner where window {self.window} reaches beyond a chunk")
        except ValueError as error:
            raise self.group.refuse("attention", error) from error
        if inner is None:
            if scale is not None and scale <= 0:
                qkv[0], scale = _times_sign(qkv[0], scale)
            outs, lses = ops.attend(self, qkv, scale, return_lse)
            lses = [x.t() for x in lses[: len(outs)]] if return_lse else []
        else:
            outs, lses = attend_by(inner, self, qkv, return_lse)
        if not return_lse:
            return outs[0] if single else outs
        return (outs[0], lses[0]) if single else (outs, lses)

    def check(self, qkv: QKV, scale: float | None, lse: bool = False) -> None:
        """ValueError for what :meth:`attention` cannot take."""
        check_shapes(self.group.virtual_ranks, self.lengths, qkv, scale)
        q, _, v = (xs[0] for xs in qkv)
        if lse and not has_lse(kernel := kernel_of(q, v, self.window)):
            what = f"{q.dtype} on {q.device.type}, window {self.window}, head dims {q.shape[-1]} and {v.shape[-1]}"
            raise ValueError(f"return_lse: {what} run the kernel {kernel!r}, which has none")

    def explain(self) -> str:
        """Rows, keys and attention work of every process, for people."""
        return self.plan.explain()

    # Hosted virtual ranks

    def _deliver(self, xs: list[Tensor]) -> Any:
        return xs[0] if len(xs) == 1 else list(xs)


def _times_sign(qs: Sequence[Tensor], scale: float) -> tuple[list[Tensor], float]:
    """The same scores with a scale above 0: kernels put -inf where a causal mask is before they multiply by it."""
    return [q * (-1.0 if scale < 0 else 0.0) for q in qs], -scale or 1.0


def _autocast(xs: Sequence[Tensor]) -> list[Tensor]:
    """The cast that autocast gives SDPA's arguments."""
    device = xs[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(xs)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in xs]
