"""ContextBatch: cutting, positions, labels, gathering, windows, inner attention, autocast, and documents kept apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.training import context_ops
from shardsum.training.context import ContextBatch
from shardsum.training.context_plan import share
from tests.processes import run_processes
from tests.training.test_attention import chunks, make

LENGTHS, BORDERS = [9, 0, 4, 12, 3], [0, 7, 7, 15, 21, 28]
S = sum(LENGTHS)


def batch(**options: Any) -> ContextBatch:
    return ShardGroup(len(LENGTHS)).context_parallel(LENGTHS, BORDERS, **options)


def test_chunks_and_positions() -> None:
    cp, x = batch(), torch.arange(2 * S).view(2, S)
    parts = cp.split(x, dim=1)
    assert [tuple(p.shape) for p in parts] == [(2, n) for n in LENGTHS]
    assert torch.equal(torch.cat(parts, 1), x)
    assert len({p.untyped_storage().data_ptr() for p in parts if p.numel()}) == 4
    expected = torch.cat([torch.arange(b - a) for a, b in zip(BORDERS, BORDERS[1:])])
    assert torch.equal(torch.cat(cp.positions), expected)
    assert torch.equal(cp.gather(parts, dim=1), x)
    with pytest.raises(ValueError, match="split: 29 positions in dim 0, but the batch has 28"):
        cp.split(torch.zeros(29))


def shifted(x: torch.Tensor, by: int, fill: float) -> torch.Tensor:
    """By definition."""
    document = [i for i, (a, b) in enumerate(zip(BORDERS, BORDERS[1:])) for _ in range(b - a)]
    y = torch.full_like(x, fill)
    for i in range(S):
        if 0 <= i + by < S and document[i] == document[i + by]:
            y[..., i] = x[..., i + by]
    return y


def test_an_empty_sequence_is_shifted() -> None:
    cp = ShardGroup(2).context_parallel([0, 0], [0])
    assert [tuple(x.shape) for x in cp.shift([torch.zeros(0)] * 2)] == [(0,)] * 2
    assert tuple(cp.shift(torch.zeros(3, 0)).shape) == (3, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("by", [1, 2, 6, -3, 0, 40])
def test_shift_of_whole_sequences_and_of_chunks(by: int, dtype: torch.dtype) -> None:
    cp, x = batch(), (torch.arange(2 * S).view(2, S) + 1).to(dtype)
    expected = shifted(x, by, -100)
    found = cp.shift(x, by)
    assert found.dtype == dtype and torch.equal(found, expected)
    parts = cp.shift(cp.split(x, dim=1), by)
    assert parts[0].dtype == dtype and torch.equal(torch.cat(parts, 1), expected)
    rows = cp.shift(cp.split(x.t().contiguous()), by, dim=0, ignore_index=7)
    assert torch.equal(torch.cat(rows).t(), shifted(x, by, 7))


def _whole_and_chunks(rank: int, world_size: int, placement: Any) -> list[Any]:
    cp = ShardGroup(len(LENGTHS), placement=placement).context_parallel(LENGTHS, BORDERS)
    x = torch.arange(S)
    parts = cp.split(x)
    return [cp.group.virtual_ranks, cp.shift(parts, 2), cp.positions, cp.gather(parts), cp.work]


@pytest.mark.parametrize("placement", ["contiguous", [1, 0, 2, 2, 0]])
def test_chunks_of_several_processes(placement: Any) -> None:
    alone, x = batch(), torch.arange(S)
    shift, positions = alone.shift(alone.split(x), 2), alone.positions
    for ranks, mine, where, whole, work in run_processes(_whole_and_chunks, 3, placement):
        mine, where = ([t] if isinstance(t, torch.Tensor) else t for t in (mine, where))
        assert torch.equal(whole, x) and sum(work) == alone.work[0]
        for r, a, b in zip(ranks, mine, where):
            assert torch.equal(a, shift[r]) and torch.equal(b, positions[r])


def test_one_chunk_with_the_whole_sequence_must_be_named() -> None:
    cp = ShardGroup(2).context_parallel([5, 0], [0, 5])
    with pytest.raises(ValueError, match="pass whole=True or whole=False"):
        cp.shift(torch.arange(5))
    assert cp.shift(torch.arange(5), whole=True).tolist() == [1, 2, 3, 4, -100]


def test_chunks_of_a_process_receive_common_keys_once() -> None:
    needed = [(0, 4), (0, 8), (2, 12), (5, 5), (12, 16), (13, 20)]
    assert share(needed, [0, 1, 1, 1, 0, 0]) == (
        [(0, 4), (0, 12), (2, 2), (5, 5), (12, 20), (13, 13)],
        [0, 1, 1, 3, 4, 4],
    )
    for borders in (BORDERS, [0, S]):
        cp = ShardGroup(5).context_parallel(LENGTHS, borders)
        k = torch.arange(float(S * 8)).view(S, 2, 4)
        (keys, values) = context_ops.send(cp, cp.split(k), cp.split(-k), "attention", shared=True)
        for chunk, key, value in zip(cp.chunks, keys, values):
            rows = k[slice(*chunk.needed)]
            assert torch.equal(key, rows) and torch.equal(value, -rows)
    assert len({x.untyped_storage().data_ptr() for x in keys if len(x)}) == 1


# Attention


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Sequence[int]) -> tuple:
    """``(out, lse)`` by definition."""
    groups, rows = q.shape[1] // k.shape[1], torch.arange(S)
    document = torch.bucketize(rows, torch.tensor(BORDERS[1:]), right=True)
    mask = document[:, None] == document
    distance = rows - rows[:, None]
    left, right = window
    mask &= (distance >= -left) if left >= 0 else True
    mask &= (distance <= right) if right >= 0 else True
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1).t()


def check_gradients_of_both(parts: Any, inputs: Any, outs: Any, lses: Any, window: Sequence[int]) -> None:
    """Gradients through out and lse together, and through lse alone."""
    generator = torch.Generator().manual_seed(5)
    g, h = (torch.randn(*shape, generator=generator) for shape in ((S, 4, 16), (S, 4)))
    for results, exact, cotangents in (
        ([*lses, *outs], windowed(*inputs, window)[::-1], [h, g]),
        (lses, windowed(*inputs, window)[1:], [h]),
    ):
        wanted = torch.autograd.grad(exact, inputs, [x.double() for x in cotangents], materialize_grads=True)
        flat = [x for part in parts for x in part]
        split = [piece for x in cotangents for piece in x.split(LENGTHS)]
        found = torch.autograd.grad(results, flat, split, retain_graph=True)
        for i, expected in enumerate(wanted):
            assert torch.allclose(torch.cat(found[5 * i : 5 * (i + 1)]).double(), expected, atol=1e-5)


@pytest.mark.parametrize("value_dim", [16, 12])
@pytest.mark.parametrize(
    ("window", "causal"),
    [(None, True), (None, False), ((3, 0), True), ((2, 1), False), ((-1, 4), False), ((5, -1), False)],
)
def test_windows_against_the_definition(window: Any, causal: bool, value_dim: int) -> None:
    cp = batch(causal=causal, window=window)
    q, k, v, g = make(LENGTHS)
    v, g = v[..., :value_dim], g[..., :value_dim]
    parts = [chunks(x, LENGTHS, range(5)) for x in (q, k, v)]
    outs = cp.attention(*parts)
    torch.autograd.backward(outs, list(g.split(LENGTHS)))
    left, right = window or (-1, -1)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse = windowed(*inputs, (left, 0 if causal else right))
    expected.backward(g.double())
    assert torch.allclose(torch.cat(outs).double(), expected, atol=2e-6)
    for part, exact in zip(parts, inputs):
        assert torch.allclose(torch.cat([p.grad for p in part]).double(), exact.grad, atol=1e-5)
    if value_dim == 16:
        outs, lses = cp.attention(*parts, return_lse=True)
        assert torch.allclose(torch.cat(lses).double(), lse, atol=1e-5)
        check_gradients_of_both(parts, inputs, outs, lses, (left, 0 if causal else right))
    else:
        with pytest.raises(
            ValueError, match=r"return_lse: .* head dims 16 and 12 run the kernel 'math', which has none"
        ):
            cp.attention(*parts, return_lse=True)


def test_calls_of_a_batch_meet_in_a_lockstep() -> None:
    pytest.importorskip("greenlet")
    cp = batch()
    q, k, v, _ = (chunks(x, LENGTHS, range(5)) for x in make(LENGTHS))
    x = cp.split(torch.arange(S))

    def of_one(r: int) -> tuple[torch.Tensor, ...]:
        return cp.attention(q[r], k[r], v[r]), cp.shift(x[r], 1), cp.gather(x[r])

    outs, shifts, whole = zip(*cp.group.lockstep([lambda r=r: of_one(r) for r in range(5)]))
    for found, expected in ((outs, cp.attention(q, k, v)), (shifts, cp.shift(x, 1)), (whole, [torch.arange(S)] * 5)):
        assert all(map(bits.equal, found, expected))
