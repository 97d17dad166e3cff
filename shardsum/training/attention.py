"""Causal context parallelism: attention over one long sequence whose positions are spread over R virtual ranks.

Virtual rank r holds the queries, keys and values of its chunk of the sequence. One ``exchange`` brings it the keys and
values from the start of its oldest document; then it attends locally, document by document. The gradient of that
exchange is an exchange too: partial dK and dV, valid where the chunk's queries looked, are added over virtual ranks in
rank order, in fp32, and rounded once.

**Error.** With eps = 2^-24 (fp32), L the keys a query sees, D the head dimension, A = scale * max_ij sum_d |q_id k_jd|
the largest absolute score: every output is within ``2 eps ((D + 1) A + L + 8) max|v|`` of exact arithmetic, whatever R.
For given chunks and one compute thread a process the bits do not depend on the number of processes or the placement:
each virtual rank's work is the same sequence of operators on tensors of its own, never batched with another rank's.

**Backward.** All processes run the same backward collectives in the same order: every hosted output depends on this
process's one exchange, empty chunks included, and a later exchange depends on an earlier one through the outputs. What
the caller owes is a loss that depends, on every process, on at least one hosted output (an empty one's sum will do).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.checks import as_ints
from ..core.numerics import check_op
from .documents import ChunkPlan, plan_chunks
from .lockstep import running

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup

Hosted = Tensor | Sequence[Tensor]


def context_parallel_attention(
    q: Hosted,
    k: Hosted,
    v: Hosted,
    group: CollectiveGroup,
    *,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Any:
    """Attention of every hosted chunk to its documents' keys, wherever they are held.

    Args:
        q: one tensor ``(length_r, heads, head_dim)`` per hosted virtual rank, in increasing order; a single Tensor
            where the process hosts one. Chunks follow each other in the sequence in virtual-rank order; they may have
            any lengths, 0 included. Dim 0 is the sequence; there is no batch dim: pack the batch as documents.
        k: ``(length_r, key_heads, head_dim)``; ``heads`` is a multiple of ``key_heads`` (grouped-query attention:
            query head h uses key head ``h // (heads / key_heads)``).
        v: ``(length_r, key_heads, value_dim)``, of k's dtype.
        group: the processes and virtual ranks that share the sequence.
        lengths: R chunk lengths, equal on all processes: nothing else travels. None: agreed through the group's side
            channel in every call (blocks the host).
        cu_seqlens: borders of the packed documents, ``[0, ..., sum(lengths)]``, equal on all processes (ints or an
            integer tensor on CPU). None: one document.
        scale: factor of the scores; None is ``1 / sqrt(head_dim)``.
        causal: a query sees its own and earlier positions only (False: its whole document).

    Returns:
        One tensor ``(length_r, heads, value_dim)`` per hosted virtual rank, in the form of ``q``. float16, bfloat16,
        float32 and float64 work.

    Raises:
        ValueError: on every process, naming argument, virtual rank and both values.

    Example:
        >>> group = ShardGroup(3)
        >>> q, k, v = ([torch.randn(n, 8, 64) for n in (5, 0, 4)] for _ in range(3))
        >>> out = context_parallel_attention(q, k, v, group, lengths=[5, 0, 4], cu_seqlens=[0, 2, 9])
    """
    now = running(group)
    if now is not None:
        options = {"lengths": lengths, "cu_seqlens": cu_seqlens, "scale": scale, "causal": causal}
        return now.meet("context_parallel_attention", context_parallel_attention, (q, k, v), (group,), **options)
    single = isinstance(q, Tensor)
    qs, ks, vs = ([x] if isinstance(x, Tensor) else x for x in (q, k, v))
    plans = _plan(group, qs, ks, vs, lengths, cu_seqlens, scale, causal)
    kvs = [torch.cat([key, value], dim=-1) for key, value in zip(ks, vs)]
    gathered = group.exchange(kvs, [p.chunk for p in plans], [p.keys for p in plans], size=plans[-1].chunk[1])
    outs = [
        attend_chunk(query, kv, plans[rank], ks[0].shape[-1], scale, causal)
        for rank, query, kv in zip(group.virtual_ranks, qs, gathered)
    ]
    return outs[0] if single else outs


def _plan(
    group: CollectiveGroup,
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    lengths: Sequence[int] | None,
    cu_seqlens: Sequence[int] | Tensor | None,
    scale: float | None,
    causal: bool,
) -> list[ChunkPlan]:
    """Check everything, agree on the lengths if need be, and plan all R chunks."""
    name = "context_parallel_attention"
    try:
        _check_shapes(group.virtual_ranks, qs, ks, vs)
        if lengths is not None:
            _check_lengths(group, qs, lengths)
        check_op("sum", scale, qs[0].dtype)
    except ValueError as error:
        raise group.refuse(name, error, counted=lengths is None) from error
    if lengths is None:
        most = max(map(group.owners.count, range(group.world_size)))
        rows = group.gather_ints(name, [q.shape[0] for q in qs], most)
        lengths = [rows[owner][slot] for owner, slot in map(group.positions, range(group.num_virtual_ranks))]
    try:
        borders = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        return plan_chunks(lengths, borders, causal=causal)
    except ValueError as error:
        raise group.refuse(name, error) from error


def _check_lengths(group: CollectiveGroup, qs: Sequence[Tensor], lengths: Sequence[int]) -> None:
    lengths = as_ints("lengths", lengths, group.num_virtual_ranks)
    for rank, query in zip(group.virtual_ranks, qs):
        if query.shape[0] != lengths[rank]:
            raise ValueError(f"q: virtual rank {rank} has {query.shape[0]} rows, but lengths gives it {lengths[rank]}")


def _check_shapes(ranks: Sequence[int], qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
    for name, xs in (("q", qs), ("k", ks), ("v", vs)):
        if not isinstance(xs, (list, tuple)):
            raise ValueError(f"{name}: expected a list of Tensors, one for each hosted virtual rank, got {xs!r}")
        if len(xs) != len(ranks):
            raise ValueError(f"{name}: {len(xs)} tensors for the {len(ranks)} virtual ranks hosted here {tuple(ranks)}")
        for rank, x in zip(ranks, xs):
            if not isinstance(x, Tensor) or x.dim() != 3:
                what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: virtual rank {rank} has {what}, expected a Tensor (length, heads, dim)")
            if x.dtype != qs[0].dtype or not x.dtype.is_floating_point:
                raise ValueError(f"{name}: virtual rank {rank} has {x.dtype}, the first q has {qs[0].dtype}")
    for rank, q, k, v in zip(ranks, qs, ks, vs):
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise ValueError(
                f"q, k, v: virtual rank {rank} has {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows; they are equal"
            )
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"k: virtual rank {rank} has head dim {k.shape[2]}, but q has {q.shape[2]}")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"v: virtual rank {rank} has {v.shape[1]} heads, but k has {k.shape[1]}")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(f"k: virtual rank {rank} has {k.shape[1]} heads, which do not divide q's {q.shape[1]}")


def attend_chunk(q: Tensor, kv: Tensor, plan: ChunkPlan, head_dim: int, scale: float | None, causal: bool) -> Tensor:
    """One virtual rank's own work, nothing sent: queries ``q`` ``(length, heads, head_dim)`` of a chunk against the
    keys and values it needs, ``kv`` ``(keys, key_heads, head_dim + value_dim)`` -> ``(length, heads, value_dim)``."""
    value_dim = kv.shape[-1] - head_dim
    if not plan.segments:
        # Nothing to attend to, but the result must hang on the exchange: its backward is a collective. A product, since
        # it saves its inputs: under activation checkpointing, needing them is what runs the exchange again.
        return q[..., :1].expand(-1, -1, value_dim) * kv[:, :1, head_dim:]
    # split, not slices: its backward is one concatenation, which adds nothing
    queries = q.split([n for n, _ in plan.segments])
    keys_values = kv.split([n for _, n in plan.segments])
    outs = []
    for segment, part in zip(queries, keys_values):
        key, value = part.split([head_dim, value_dim], dim=-1)
        outs.append(_segment_attention(segment, key, value, scale, causal))
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs)


def _segment_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """A document's queries ``(n, heads, d)`` against its keys ``(m, key_heads, d)``; the last query sees all m."""
    value_dim = v.shape[-1]
    backend: AbstractContextManager[None] = nullcontext()
    options: dict[str, Any] = {"scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale}
    if q.is_cuda:
        kernel = _cuda_kernel(q, v)
        backend = sdpa_kernel(kernel)
        q, k, v = _for_cuda(kernel, q, k, v)
    if causal and q.shape[0] == k.shape[0]:
        options["is_causal"] = True
    elif causal and q.is_cuda:  # is_causal aligns to the upper left; a chunk's queries are the last of their prefix
        from torch.nn.attention.bias import causal_lower_right  # as slow to import as all of torch

        options["attn_mask"] = causal_lower_right(q.shape[0], k.shape[0])
    elif causal:
        whole = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
        options["attn_mask"] = whole.tril(k.shape[0] - q.shape[0])
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with backend:
        out = F.scaled_dot_product_attention(query, key, value, **options)
    out = out[0].transpose(0, 1)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def _for_cuda(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel asks for beyond SDPA's own conditions; zeros that fill a head change no score and no value."""
    if q.shape[1] != k.shape[1] and kernel != SDPBackend.FLASH_ATTENTION:  # a key head for every query head
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if kernel != SDPBackend.MATH:  # heads of whole vectors
        q, k, v = (x if x.shape[-1] % 8 == 0 else F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v))
    return q, k, v


def _cuda_kernel(q: Tensor, v: Tensor) -> SDPBackend:
    """A fixed choice: bits must not depend on what torch finds fastest. None but MATH builds an S x S mask."""
    if q.dtype == torch.float64:
        return SDPBackend.MATH
    if q.dtype != torch.float32 and q.shape[-1] == v.shape[-1] <= 256:
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.EFFICIENT_ATTENTION
