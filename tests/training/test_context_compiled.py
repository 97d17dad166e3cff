"""Attention of a batch under torch.compile: other batches compile nothing anew, and the bits of eager code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.training import context_ops
from tests.processes import run_processes
from tests.training.test_attention import chunks, make
from tests.training.test_context_training import BORDERS, LENGTHS


class Block(nn.Module):
    """One layer of attention on every hosted chunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.cp = nn.Linear(16, 64), nn.Linear(32, 16), None

    def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], 1) for x in xs]
        q, k, v = ([part[i] for part in parts] for i in range(3))
        return [x + self.out(y.flatten(1)) for x, y in zip(xs, self.cp.attention(q, k, v))]


def gradients(block: Block, run: Callable[..., Any], lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, 16, generator=generator, requires_grad=True) for n in lengths]
    ys = run(xs)
    sum(y.square().sum() for y in ys).backward()
    found = [*(y.detach() for y in ys), *(x.grad for x in xs), *(p.grad for p in block.parameters())]
    block.zero_grad(set_to_none=True)
    return found


def test_compiled_blocks_take_other_batches_without_compiling() -> None:
    """15 packings of one whole chunk a process: the second compilation is the first with symbols for rows."""
    group, block, draw = ShardGroup(2), Block(), torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for step in range(15):
        first, size = 5 + 2 * step, 40 + 3 * step
        inner = torch.randint(size, (step % 6,), generator=draw).sort()[0].tolist()
        lengths = [first, size - first]
        block.cp = group.context_parallel(lengths, [0, *inner, size])
        for found, expected in zip(gradients(block, compiled, lengths), gradients(block, block, lengths)):
            assert torch.equal(found, expected)
    assert counter.frame_count <= 2


def test_chunks_of_no_and_of_one_row_compile_nothing_anew() -> None:
    """With symbols that may be 0 and 1, of activations that nobody can mark."""
    group, block = ShardGroup(2), Block()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(automatic_dynamic_shapes_mark_as="unbacked"):
        for lengths in ([5, 7], [4, 9], [0, 12], [1, 11], [9, 1], [1, 0], [0, 0], [3, 3]):
            block.cp = group.context_parallel(lengths, [0, sum(lengths) // 2, sum(lengths)])
            for found, expected in zip(gradients(block, compiled, lengths), gradients(block, block, lengths)):
                assert torch.equal(found, expected)
    assert counter.frame_count == 2


def test_compiled_code_differentiates_the_log_sum_exp() -> None:
    cp = ShardGroup(2).context_parallel([5, 7], [0, 4, 12])

    def both(*xs: Any) -> torch.Tensor:
        outs, lses = cp.attention(*xs, return_lse=True)
        return sum(x.square().sum() for x in (*outs, *lses))

    found = []
    for run in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        parts = [chunks(x, [5, 7], range(2)) for x in make([5, 7])[:3]]
        run(*parts).backward()
        found.append([x.grad for part in parts for x in part])
    assert all(map(bits.equal, *found))


def test_selective_checkpoints_save_the_exchange_of_the_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    block, calls, real = Block(), [], context_ops.exchange
    block.cp = ShardGroup(5).context_parallel(LENGTHS, BORDERS, recompute_exchange=True)
    monkeypatch.setattr(context_ops, "exchange", lambda *a, **k: calls.append(a) or real(*a, **k))
    saved = [torch.ops.shardsum.context_attention.default]
    policy = partial(create_selective_checkpoint_contexts, saved)
    results = []
    for options in ({}, {"context_fn": policy}):
        calls.clear()
        run = partial(checkpoint, block, use_reentrant=False, **options)
        results.append((gradients(block, run, LENGTHS), len(calls)))
    (plain, often), (selective, seldom) = results
    assert (often, seldom) == (8, 6)  # K and V each: forward, recomputation, backward, gradients
    assert all(map(bits.equal, plain, selective))


def _compiled_to_save_memory(rank: int, world_size: int) -> list[str]:
    """What a process sends where one alone saves memory."""
    torch._dynamo.reset()
    group = ShardGroup(2)
    batch, sent, send = group.context_parallel([6, 4], [0, 5, 10]), [], context_ops.send

    def counted(*args: Any, back: bool = False, **options: Any) -> Any:
        sent.append("back" if back else "there")
        return send(*args, back=back, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = batch.attention(x.tanh(), x.cos(), x.exp())
        return ((y.sin() * y).exp() * y.sin()).sum()

    whole = torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(0))
    x = batch.split(whole).requires_grad_()
    budget = torch._functorch.config.patch(activation_memory_budget=0.3 if rank else 1.0)
    with budget, patch.object(context_ops, "send", counted):
        torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")(x).backward()
    return sent


def test_compiled_attention_is_not_run_again_to_save_memory() -> None:
    # K and V are sent again, as they are in all compiled code.
    assert run_processes(_compiled_to_save_memory, 2) == [["there", "there", "back"]] * 2
