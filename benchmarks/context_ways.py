"""The ways that context_parallel.py compares: one attention layer, forward and backward, on packed documents.

shardsum            group.context_parallel once, then cp.attention
one call            context_parallel_attention, which finds the plan of the layer before
user                K and V by all_gather, one variable-length kernel, dK and dV added into a buffer of all positions
                    and given back by reduce_scatter. In one process: a concatenation, slices, a split.
SDPA a document     the exchange, then one scaled_dot_product_attention a document
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from shardsum import ShardGroup, context_parallel_attention
from shardsum.training.context import ContextBatch
from shardsum.training.context_chunks import Chunk, to_device
from shardsum.training.context_kernels import backward, forward

BF16 = torch.bfloat16


class Layer:
    """Inputs of one attention layer in bf16, seeded by virtual rank, and the ways to run it.

    Args:
        device: where it runs.
        borders: of the documents.
        processes: contiguous chunks, one a process, or zigzag ones, two a process. All are here when there is one real
            process.
        placement: "contiguous" or "zigzag".
        heads, key_heads, dim: of the attention.
    """

    def __init__(
        self,
        device: torch.device,
        borders: list[int],
        processes: int,
        placement: str,
        heads: int,
        key_heads: int,
        dim: int,
    ) -> None:
        ranks = processes * (2 if placement == "zigzag" else 1)
        self.device, self.borders, self.size = device, borders, borders[-1]
        self.group = ShardGroup(ranks, placement=placement, device=device)
        self.lengths = [self.size // ranks] * ranks
        self.cp = self.group.context_parallel(self.lengths, borders)
        self.user = UserBatch(self.cp)
        shapes = [(self.size // ranks, h, dim) for h in (heads, key_heads, key_heads, heads)]
        #: q, k, v of every hosted chunk; and the gradients of its output.
        self.inputs: list[list[Tensor]] = [[], [], []]
        self.gs: list[Tensor] = []
        for rank in self.group.virtual_ranks:
            generator = torch.Generator(device).manual_seed(rank)
            for xs, shape in zip([*self.inputs, self.gs], shapes):
                xs.append(torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(BF16))

    def ways(self, layers: int = 1) -> dict[str, Callable[[], list[Tensor]]]:
        """Each gives the outputs and the gradients of q, k and v of all hosted chunks, of all layers: several are run
        forward, then all backward, as those of a model."""
        attentions: dict[str, Callable[..., Sequence[Tensor]]] = {
            "shardsum": self.cp.attention,
            "one call": self.one_call,
            "user": self.user.attention,
            "SDPA a document": self._documents,
        }
        # Inputs of their own: autograd adds nothing.
        inputs = [[[x.detach().requires_grad_() for x in xs] for xs in self.inputs] for _ in range(layers)]
        return {name: partial(self._step, attention, inputs) for name, attention in attentions.items()}

    def _step(self, attention: Callable[..., Sequence[Tensor]], inputs: list[list[list[Tensor]]]) -> list[Tensor]:
        outs = [out for xs in inputs for out in attention(*xs)]
        grads = torch.autograd.grad(outs, [x for xs in inputs for x in chain(*xs)], self.gs * len(inputs))
        return [*(o.detach() for o in outs), *grads]

    def one_call(self, *inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        options: dict[str, Any] = {"lengths": self.lengths, "cu_seqlens": self.borders}
        return context_parallel_attention(*inputs, self.group, **options)

    # What the library did before

    def _documents(self, qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> Sequence[Tensor]:
        plan, dim = self.cp.plan, ks[0].shape[-1]
        kvs = [torch.cat(pair, -1) for pair in zip(ks, vs)]
        kvs = self.group.exchange(kvs, plan.owned, plan.needed, size=self.size)
        outs = []
        for q, kv, chunk in zip(qs, kvs, self.cp.chunks):
            queries, keys = zip(*chunk.segments)
            parts = zip(q.split(queries), kv.split(keys))
            outs.append(torch.cat([_document(one, *both.split(dim, -1)) for one, both in parts]))
        return outs


# What a user writes


class UserBatch:
    """One batch of packed documents in equal chunks, as the engineer plans it who has no library.

    Args:
        cp: whose documents, chunks and hosted virtual ranks it takes.
    """

    def __init__(self, cp: ContextBatch) -> None:
        self.group, self.chunks, self.size, self.length = cp.group, cp.chunks, cp.size, cp.lengths[0]
        #: Per hosted chunk ``(cu_seq_q, cu_seq_k, max_q, max_k)``.
        self.borders = []
        for chunk in cp.chunks:
            queries, keys = (torch.tensor(column) for column in zip(*chunk.segments))
            cu = [to_device(F.pad(x.cumsum(0), (1, 0)).int(), cp.group.device) for x in (queries, keys)]
            self.borders.append((*cu, int(queries.max()), int(keys.max())))
        owners = cp.group.owners
        order = sorted(range(len(owners)), key=lambda r: (owners[r], r))
        #: Where each chunk lies in what an all_gather gives.
        self.places = [order.index(r) for r in range(len(owners))]

    def attention(
        self, qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor], scale: float | None = None
    ) -> list[Tensor]:
        parts = Gather.apply(self, self.reduce_scatter, *ks, *vs)
        keys, values = parts[: len(ks)], parts[len(ks) :]
        return [_varlen(*x, scale) for x in zip(qs, keys, values, self.borders, self.chunks)]

    def all_gather(self, xs: Sequence[Tensor]) -> Tensor:
        if self.group.world_size == 1:
            return xs[0] if len(xs) == 1 else torch.cat(list(xs))
        whole = xs[0].new_empty(self.size, *xs[0].shape[1:])
        dist.all_gather_into_tensor(whole, xs[0].contiguous() if len(xs) == 1 else torch.cat(list(xs)))
        if self.places == sorted(self.places):
            return whole
        chunks = whole.split(self.length)
        return torch.cat([chunks[place] for place in self.places])

    def reduce_scatter(
        self, grads: Sequence[Tensor], dtype: torch.dtype | None = None, by_hand: bool = False
    ) -> list[Tensor]:
        """Gradients of what each hosted chunk needs, added into a buffer of zeros of ``dtype`` (default theirs), whose
        chunks go to their owners. ``by_hand``: by an all_to_all, and added in fp32 by who receives them."""
        if self.group.world_size == len(grads) == 1:
            return list(grads)
        buffer = grads[0].new_zeros(self.size, *grads[0].shape[1:], dtype=dtype)
        places = buffer.split(self.length)
        for grad, chunk in zip(grads, self.chunks):
            begin, end = chunk.needed
            if self.places == sorted(self.places):
                buffer[begin:end] += grad
                continue
            for r in range(begin // self.length, -(-end // self.length)):
                first, last = max(begin, r * self.length), min(end, (r + 1) * self.length)
                rows = slice(first - r * self.length, last - r * self.length)
                places[self.places[r]][rows] += grad[first - begin : last - begin]
        if self.group.world_size == 1:
            return list(places)
        if by_hand:
            received = torch.empty_like(buffer)
            dist.all_to_all_single(received, buffer)
            own = received.unflatten(0, (self.group.world_size, -1)).sum(0, dtype=torch.float32)
        else:
            own = buffer.new_empty(self.size // self.group.world_size, *buffer.shape[1:])
            dist.reduce_scatter_tensor(own, buffer)
        return list(own.to(grads[0].dtype).split(self.length))


class Gather(torch.autograd.Function):
    """Of each of several tensors, whose hosted chunks are given one tensor after the other: the rows that each hosted
    chunk needs, as slices of all; backward by ``reduce``."""

    @staticmethod
    def forward(ctx: Any, batch: UserBatch, reduce: Callable, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce, ctx.count = reduce, len(batch.chunks)
        wholes = [batch.all_gather(xs[i : i + ctx.count]) for i in range(0, len(xs), ctx.count)]
        return tuple(whole[slice(*chunk.needed)] for whole in wholes for chunk in batch.chunks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts = (grads[i : i + ctx.count] for i in range(0, len(grads), ctx.count))
        return None, None, *(x for part in parts for x in ctx.reduce(part))


_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, borders: tuple[Tensor, Tensor, int, int], chunk: Chunk, scale: float | None
) -> Tensor:
    if q.is_cuda:
        return varlen_attn(q, k, v, *borders, scale=scale, window_size=(-1, 0), **_GROUPED)
    return Kernels.apply(chunk, scale, q, k, v)  # torch's variable-length kernel is for GPUs


class Kernels(torch.autograd.Function):
    """The library's kernels for one chunk."""

    @staticmethod
    def forward(ctx: Any, chunk: Chunk, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = forward(q, k, v, chunk, scale)
        ctx.chunk, ctx.scale = chunk, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *backward(grad, *ctx.saved_tensors, ctx.chunk, ctx.scale)


def _document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees the last key."""
    options: dict[str, Any] = {"is_causal": True}
    if q.shape[0] != k.shape[0]:
        shape = q.shape[0], k.shape[0]
        mask = (
            causal_lower_right(*shape) if q.is_cuda else torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        )
        options = {"attn_mask": mask}
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    return out[0].transpose(0, 1)
