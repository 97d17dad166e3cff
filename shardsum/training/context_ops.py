"""The collective part of attention over chunks: K and V go to who needs them, partial dK and dV come back.

Eager calls run :class:`_Attention`, compiled ones the registered operator ``shardsum::context_attention`` with the same
two halves. The operator finds its batch by a number in a tensor on the CPU: neither the batch's lengths nor the number
of its documents are values of the graph, so another batch compiles nothing anew.

**Order of collectives.** All hosted chunks are one node of autograd, empty ones included, and its backward makes all
exchanges (K and V anew where they were not kept, then their gradients), so all processes run the same collectives in
the same order. What the caller owes is a loss that depends, on every process, on at least one hosted output (an empty
one's sum will do).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..group.compiled import Kept, keep, refuse_recomputation
from ..local.registry import define, differentiate
from .context_checks import QKV
from .context_kernels import backward, empty_results, forward

if TYPE_CHECKING:
    from ..group.plan import Plan
    from .context import ContextBatch

#: Batches by number. Entries go with their batches.
batches: WeakValueDictionary[int, ContextBatch] = WeakValueDictionary()
_numbers = itertools.count()

#: Bytes of K on a process from which K and V travel apart: one message less is worth less than the copy that packs it.
_APART_BYTES = 4 << 20


def register(batch: ContextBatch) -> Tensor:
    """The tensor by which compiled code knows the batch, while that lives."""
    number = next(_numbers)
    batches[number] = batch
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def _batch_of(key: Tensor) -> ContextBatch:
    batch = batches.get(int(key))
    if batch is None:
        raise RuntimeError("attention: its ContextBatch is gone; keep it until the backward pass has run")
    return batch


def exchange(
    batch: ContextBatch, shards: Sequence[Tensor], name: str, back: bool = False, shared: bool = False
) -> list[Tensor]:
    """Rows of every chunk to all that need them as keys; ``back``: the adjoint, a sum in rank order to their owners.

    Args:
        name: what processes compare beside the rows: whether a backward follows must be the same on all.
        shared: the results of chunks that need the same rows may be views of one tensor. Not where autograd follows: it
            would add the gradients of a process's chunks, in an order that depends on who hosts them.
    """
    first = shards[0]
    key = name, first.shape[1:], first.dtype
    plans = batch.exchanges.get(key)
    if plans is None:
        plans = batch.exchanges[key] = _plans(batch, name, first)
    if back:
        return plans[0].adjoint.on_list(list(shards), batch.origin)
    if not shared:
        return plans[0].on_list(list(shards), batch.origin)
    found = plans[1].on_list(list(shards), batch.origin)
    return [found[i] if rows is None else found[i][rows] for i, rows in batch.plan.views]


def _plans(batch: ContextBatch, name: str, like: Tensor) -> tuple[Plan, Plan]:
    """The exchange of keys, and that of what each process needs, joined: which rows those are follows from the first,
    so the processes' agreement on that covers both."""
    sequence = batch.plan
    options: dict[str, Any] = {"row_shape": tuple(like.shape[1:]), "dtype": like.dtype, "name": name}
    plan = batch.group.plan(
        "exchange", in_intervals=sequence.owned, out_intervals=sequence.needed, size=sequence.size, **options
    )
    joined = plan.of(replace(plan.terms, sinks=tuple(sequence.received)))
    joined.mark_agreed(False)
    return plan, joined


def send(
    batch: ContextBatch,
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    name: str,
    back: bool = False,
    shared: bool = False,
) -> list[list[Tensor]]:
    """K and V, exchanged. The results may be halves of one tensor: kernels read them at a stride."""
    row = ks[0].shape[1] * ks[0].shape[2] * ks[0].element_size()
    if batch.group.world_size == 1 or batch.size * row >= _APART_BYTES * batch.group.world_size:
        return [exchange(batch, ks, name, back, shared), exchange(batch, vs, name, back, shared)]
    if ks[0].shape[2] != vs[0].shape[2]:
        dims = [ks[0].shape[2], vs[0].shape[2]]
        both = exchange(batch, [torch.cat(pair, -1) for pair in zip(ks, vs)], name, back, shared)
        return [list(half) for half in zip(*(x.split(dims, -1) for x in both))]
    both = exchange(batch, list(map(_packed, ks, vs)), name, back, shared)
    return [list(half) for half in zip(*(x.unbind(1) for x in both))]


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """``(rows, 2, heads, dim)``; a view where k and v are views of such a tensor, and need no gradient."""
    apart = v.storage_offset() - k.storage_offset()
    tracked = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    together = not tracked and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if together and k.stride() == v.stride() and apart == k.shape[1] * k.shape[2] == k.stride(0) // 2:
        return k.as_strided((k.shape[0], 2, *k.shape[1:]), (k.stride(0), apart, *k.stride()[1:]))
    return torch.stack([k, v], 1)


def _forward(
    batch: ContextBatch, qkv: QKV, scale: float | None, name: str = "attention"
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """``(keys, values, outs, lses)`` per hosted chunk."""
    qs, ks, vs = qkv
    keys, values = send(batch, ks, vs, name, shared=True)
    results = [forward(*inputs, scale) for inputs in zip(qs, keys, values, batch.chunks)]
    outs, lses = map(list, zip(*results))
    return keys, values, outs, lses


def _backward(
    batch: ContextBatch,
    grads: Sequence[Any],
    saved: Sequence[Tensor],
    scale: float | None,
    local: bool,
    name: str = "attention",
) -> list[Tensor]:
    """Gradients of q, k and v.

    Args:
        grads: of the outputs, then, where these are differentiated, of the log-sum-exps; None is zero.
        saved: what :func:`_forward` took and gave.
        local: the K and V among them are as it took them.
    """
    qs, keys, values, outs, lses = _parts(saved, 5)
    if local:
        keys, values = send(batch, keys, values, name, shared=True)
    n = len(batch.chunks)
    found: list[Any] = [None] * n
    # The chunk with the most keys first: its kernel takes the most memory, when nobody's results are here yet.
    for i in sorted(range(n), key=lambda i: -batch.chunks[i].keys):
        grad = torch.zeros_like(outs[i]) if grads[i] is None else grads[i]
        of_lse = grads[n + i] if len(grads) > n else None
        found[i] = backward(grad, qs[i], keys[i], values[i], outs[i], lses[i], batch.chunks[i], scale, of_lse)
        keys[i] = values[i] = None  # what was sent anew is done with
    dqs, dks, dvs = map(list, zip(*found))
    return [*dqs, *itertools.chain(*send(batch, dks, dvs, name, back=True))]


def _parts(xs: Sequence[Any], count: int) -> list[list[Any]]:
    n = len(xs) // count
    return [list(xs[i * n : (i + 1) * n]) for i in range(count)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, batch: ContextBatch, scale: float | None, lse: bool, name: str, *tensors: Tensor
    ) -> Any:
        qkv = _parts(tensors, 3)
        keys, values, outs, lses = _forward(batch, qkv, scale, name)
        ctx.batch, ctx.scale, ctx.name = batch, scale, name
        ctx.call = next((plan.call for plan, _ in batch.exchanges.values()), 0)
        ks, vs = qkv[1:] if batch.recompute_exchange else (keys, values)
        ctx.save_for_backward(*qkv[0], *ks, *vs, *outs, *lses)
        ctx.set_materialize_grads(False)
        return (*outs, *lses) if lse else tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:  # type: ignore[override]
        batch, saved = ctx.batch, ctx.saved_tensors  # to unpack them may run a checkpointed layer again
        batch.origin = ctx.call
        try:
            found = _backward(batch, grads, saved, ctx.scale, batch.recompute_exchange, ctx.name)
        finally:
            batch.origin = 0
        return None, None, None, None, *found


def attend(batch: ContextBatch, qkv: QKV, scale: float | None, lse: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """``(outs, lses)`` per hosted chunk, with autograd. Without ``lse`` no log-sum-exps are given out."""
    tensors, n = [x for xs in qkv for x in xs], len(qkv[0])
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        results = _operator(tensors, batch.key, scale, lse)
        if torch.compiler.is_compiling() and batch.group.world_size > 1:
            results = [Kept.apply(x) for x in results]
    else:
        follows = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        name = "attention and its gradient" if follows else "attention"
        results = _Attention.apply(batch, scale, lse, name, *tensors)
    return list(results[:n]), list(results[n:])


# The registered operator


def _run(tensors: list[Tensor], key: Tensor, scale: float | None, lse: bool) -> list[Tensor]:
    batch = _batch_of(key)
    qkv = _parts(tensors, 3)
    try:
        batch.check(qkv, scale, lse)
    except ValueError as error:
        raise batch.group.refuse("attention", error) from error
    _, _, outs, lses = _forward(batch, qkv, scale)
    _origin(batch)  # notes this call
    return [*outs, *lses]


def _origin(batch: ContextBatch) -> int:
    """:meth:`shardsum.group.plan.Plan.origin_of_operator` of any exchange of this batch; 0 before the first."""
    return next((plan.origin_of_operator() for plan, _ in batch.exchanges.values()), 0)


def _run_fake(tensors: list[Tensor], key: Tensor, scale: float | None, lse: bool) -> list[Tensor]:
    refuse_recomputation(tensors)
    qs, _, vs = _parts(tensors, 3)
    results = [empty_results(q, v) for q, v in zip(qs, vs)]
    return [x for half in zip(*results) for x in half]


def _run_backward(grads: list[Tensor], saved: list[Tensor], key: Tensor, scale: float | None) -> list[Tensor]:
    batch = _batch_of(key)
    batch.origin = _origin(batch)
    try:
        return [x.contiguous() for x in _backward(batch, grads, saved, scale, local=True)]
    finally:
        batch.origin = 0


def _run_backward_fake(grads: list[Tensor], saved: list[Tensor], key: Tensor, scale: float | None) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for half in _parts(saved, 5)[:3] for x in half]


# The log-sum-exps are results always, since backward needs them; ``lse``: they are differentiated, too.
_operator = define(
    "context_attention(Tensor[] tensors, Tensor key, float? scale, bool lse) -> Tensor[]",
    _run,
    _run_fake,
)
_adjoint = define(
    "context_attention_backward(Tensor[] grads, Tensor[] saved, Tensor key, float? scale) -> Tensor[]",
    _run_backward,
    _run_backward_fake,
)


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, key, ctx.scale, ctx.lse = inputs
    if torch.compiler.is_compiling() and dist.is_initialized():
        output = list(map(keep, output))
    ctx.save_for_backward(*tensors, *output, key)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple:
    *saved, key = ctx.saved_tensors
    cotangents = grads if ctx.lse else _parts(grads, 2)[0]
    return _adjoint(cotangents, saved, key, ctx.scale), None, None, None


differentiate(_operator, _setup, _differentiate)
