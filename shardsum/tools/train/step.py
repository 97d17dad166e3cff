"""One optimizer step on R virtual ranks: where training calls the library.

documents    each virtual rank's shard is a document of its own
context      each virtual rank's shard is a chunk of one sequence of packed documents

Both modes compute per virtual rank, never on several at once, and go through the layers in lockstep: every hosted
virtual rank finishes its half of a block before any starts the next, because attention over sequence shards is
collective. Then, in both:

    group.token_mean          the loss: sum of all token losses over the exact count of all tokens
    group.reduce_gradients    parameter gradients, added over virtual ranks in rank order
    group.all_reduce          the loss per position: a ragged sum, since every shard reaches another offset
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...training.context import ContextBatch
from ...training.shard_group import ShardGroup
from .data import Batch, Shard
from .model import ByteTransformer, causal_attention


@dataclass(frozen=True)
class StepResult:
    """loss: fp32, 0-dim, nats per token. loss_per_position: fp32 ``(document_length, 2)``, sum and count."""

    loss: Tensor
    loss_per_position: Tensor
    num_tokens: int


class Step:
    """Forward and backward of the micro-steps of one step; leaves the gradients in the model's parameters.

    Args:
        group: the virtual ranks.
        model: its parameters are shared by the virtual ranks, and equal on every process.
        document_length: rows of the loss per position.
        bf16: autocast matrix products and attention.
    """

    def __init__(self, group: ShardGroup, model: ByteTransformer, document_length: int, bf16: bool) -> None:
        self.group, self.model, self.document_length, self.bf16 = group, model, document_length, bf16
        self.replicas = group.replicas(model)
        #: Kept until its backward pass has run: under a dispatch mode autograd knows the batch by number alone.
        self._cp: ContextBatch | None = None

    def __call__(self, batches: Sequence[Batch]) -> StepResult:
        num_tokens = sum(sum(batch.lengths) for batch in batches)
        loss = torch.zeros((), device=self.group.device)
        loss_per_position = torch.zeros(self.document_length, 2, device=self.group.device)
        for batch in batches:
            token_losses = self._forward(batch)
            sums, counts = [losses.sum() for losses in token_losses], list(map(len, token_losses))
            mean, count = self.group.token_mean(sums, counts)
            part = mean * (count / num_tokens)
            part.backward()
            loss += part.detach()
            loss_per_position += self._loss_per_position(batch, token_losses)
        self.group.reduce_gradients(self.replicas)
        return StepResult(loss, loss_per_position, num_tokens)

    def _forward(self, batch: Batch) -> list[Tensor]:
        """The loss of every token, fp32 ``(n,)`` per hosted virtual rank."""
        group = self.group
        shards = [batch.shard(v, group.device) for v in group.virtual_ranks]
        packed = batch.cu_seqlens is not None
        self._cp = cp = group.context_parallel(batch.lengths, batch.cu_seqlens) if packed else None
        with torch.autocast(group.device.type, torch.bfloat16, enabled=self.bf16):
            xs = [replica.embedding(shard.inputs) for replica, shard in zip(self.replicas, shards)]
            for layer in range(len(self.replicas[0].blocks)):
                xs = self._block([replica.blocks[layer] for replica in self.replicas], xs, shards, cp)
            logits = [replica.logits(x) for replica, x in zip(self.replicas, xs)]
        return [F.cross_entropy(z.float(), s.targets, reduction="none") for z, s in zip(logits, shards)]

    def _block(self, blocks: list, xs: list[Tensor], shards: list[Shard], cp: ContextBatch | None) -> list[Tensor]:
        qkv = [block.before(x, shard.positions) for block, x, shard in zip(blocks, xs, shards)]
        if cp is None:
            attention = [causal_attention(q, k, v) for q, k, v in qkv]
        else:
            attention = cp.attention(*(list(column) for column in zip(*qkv)))
        out = []
        for v, block, x, a in zip(self.group.virtual_ranks, blocks, xs, attention):
            with self.group.rng(v) if block.dropout.p else nullcontext():
                out.append(block.after(x, a))
        return out

    @torch.no_grad()
    def _loss_per_position(self, batch: Batch, token_losses: list[Tensor]) -> Tensor:
        tables = []
        for v, losses in zip(self.group.virtual_ranks, token_losses):
            table = losses.new_zeros(batch.reach[v], 2)
            row = 0
            for piece in batch.pieces[v]:  # slices, so that two documents' equal offsets are added in order
                table[piece.begin : piece.end, 0] += losses[row : row + piece.length]
                table[piece.begin : piece.end, 1] += 1
                row += piece.length
            tables.append(table)
        return self.group.all_reduce(tables, batch.reach, size=self.document_length)
