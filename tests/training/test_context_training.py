"""Attention of a batch inside training: inner attention, autocast, checkpoints, what is kept, documents kept apart."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.training import context_ops
from shardsum.training.context_chunks import Borders
from tests.processes import run_processes
from tests.training.test_attention import chunks, make

LENGTHS, BORDERS = [9, 0, 4, 12, 3], [0, 7, 7, 15, 21, 28]
S = sum(LENGTHS)


def softcapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, cap: float = 2.0) -> tuple:
    """An attention of the user's own: scores pass a tanh. Document by document, from the borders alone."""
    groups, outs, lses = q.shape[1] // k.shape[1], [], []
    cu_q, cu_k = borders.cu_seq_q.tolist(), borders.cu_seq_k.tolist()
    left, right = borders.window
    for i in range(len(cu_q) - 1):
        one = q[cu_q[i] : cu_q[i + 1]]
        key, value = (x[cu_k[i] : cu_k[i + 1]].repeat_interleave(groups, 1) for x in (k, v))
        n, m = one.shape[0], key.shape[0]
        assert n <= borders.max_q and m <= borders.max_k
        distance = torch.arange(m) - (torch.arange(n) + m - n)[:, None]
        hidden = (distance > right) if right >= 0 else torch.zeros(n, m, dtype=torch.bool)
        hidden |= (distance < -left) if left >= 0 else False
        scores = cap * torch.tanh(torch.einsum("ihd,jhd->hij", one, key) / cap)
        scores = scores.masked_fill(hidden, -math.inf)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), value))
        lses.append(scores.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(lses)


def inner_step(group: ShardGroup, window: Any, causal: bool) -> tuple[list[torch.Tensor], ...]:
    q, k, v, g = (chunks(x, group_lengths(group), group.virtual_ranks) for x in make(group_lengths(group)))
    cp = group.context_parallel(group_lengths(group), BORDERS, causal, window)
    outs = cp.attention(q, k, v, inner=softcapped)
    outs = [outs] if isinstance(outs, torch.Tensor) else outs
    torch.autograd.backward(outs, [x.detach() for x in g])
    return [o.detach() for o in outs], *([x.grad for x in xs] for xs in (q, k, v))


def group_lengths(group: ShardGroup) -> list[int]:
    return LENGTHS if group.num_virtual_ranks == len(LENGTHS) else [S]


@pytest.mark.parametrize(("window", "causal"), [(None, True), ((2, 1), False)])
def test_inner_attention_sees_what_one_process_sees(window: Any, causal: bool) -> None:
    """Other chunks are other matrix products of the user's own attention: close, not the same bits."""
    cut, whole = inner_step(ShardGroup(5), window, causal), inner_step(ShardGroup(1), window, causal)
    for found, expected in zip(cut, whole):
        assert torch.allclose(torch.cat(found), expected[0], atol=2e-6)


def _inner_of_process(rank: int, world_size: int, window: Any, causal: bool) -> tuple[list[int], Any]:
    group = ShardGroup(5, placement=[1, 0, 2, 2, 0])
    return list(group.virtual_ranks), inner_step(group, window, causal)


@pytest.mark.parametrize(("window", "causal"), [(None, True), ((2, 1), False)])
def test_inner_attention_has_the_bits_of_one_process(window: Any, causal: bool) -> None:
    alone = inner_step(ShardGroup(5), window, causal)
    for ranks, found in run_processes(_inner_of_process, 3, window, causal):
        for mine, expected in zip(found, alone):
            assert len(mine) == len(ranks) and all(bits.equal(x, expected[r]) for r, x in zip(ranks, mine))


def test_inner_attention_with_lse_and_what_is_refused() -> None:
    cp = ShardGroup(5).context_parallel(LENGTHS, BORDERS)
    q, k, v, _ = (chunks(x, LENGTHS, range(5)) for x in make(LENGTHS))
    outs, lses = cp.attention(q, k, v, inner=softcapped, return_lse=True)
    assert [tuple(x.shape) for x in lses] == [(n, 4) for n in LENGTHS] and outs[1].grad_fn is not None
    with pytest.raises(ValueError, match="return_lse: inner returned no"):
        cp.attention(q, k, v, inner=lambda *x: softcapped(*x)[0], return_lse=True)
    with pytest.raises(ValueError, match=r"scale: 0\.5, but inner scales"):
        cp.attention(q, k, v, inner=softcapped, scale=0.5)
    cp = cp.group.context_parallel(LENGTHS, BORDERS, False, (2, 1))
    with pytest.raises(ValueError, match=r"return_lse: not with inner where window \(2, 1\) reaches beyond a chunk"):
        cp.attention(q, k, v, inner=softcapped, return_lse=True)


def _empty_only(rank: int, world_size: int, inner: bool, apart: bool, again: bool) -> list[Any]:
    """Two layers; process 1 hosts an empty chunk only."""
    context_ops._APART_BYTES = 0 if apart else 1 << 40
    group, lengths = ShardGroup(4, placement=[0, 0, 1, 2] if world_size > 1 else "contiguous"), [9, 7, 0, 12]
    cp = group.context_parallel(lengths, BORDERS, recompute_exchange=again)
    q, k, v, _ = (chunks(x, lengths, group.virtual_ranks) for x in make(lengths, 4, 4))
    use, xs = (lambda *args: softcapped(*args)[0]) if inner else None, q
    for _ in range(2):
        xs = [x + y for x, y in zip(xs, cp.attention(xs, k, v, inner=use))]
    sum(x.square().sum() for x in xs).backward()
    return [list(group.virtual_ranks), [[x.grad for x in hosted] for hosted in zip(q, k, v)]]


@pytest.mark.parametrize(
    ("inner", "apart", "again"), [(True, True, False), (True, False, False), (False, True, True), (False, False, True)]
)
def test_a_process_with_an_empty_chunk_only(inner: bool, apart: bool, again: bool) -> None:
    _, expected = run_processes(_empty_only, 1, inner, apart, again)[0]
    for ranks, found in run_processes(_empty_only, 3, inner, apart, again, timeout=20):
        for rank, grads in zip(ranks, found):
            assert all(map(bits.equal, grads, expected[rank]))


def test_autocast_as_for_sdpa() -> None:
    cp = ShardGroup(5).context_parallel(LENGTHS, BORDERS)
    q, k, v, _ = (chunks(x, LENGTHS, range(5)) for x in make(LENGTHS))
    low = [x.detach().bfloat16().requires_grad_() for x in v]
    with pytest.raises(ValueError, match=r"v: virtual rank 0 has torch\.bfloat16, the first q has torch\.float32"):
        cp.attention(q, k, low)
    with torch.autocast("cpu", torch.bfloat16):
        outs = cp.attention(q, k, low)
    assert {o.dtype for o in outs} == {torch.bfloat16}  # the empty chunk's, too
    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    assert {x.grad.dtype for x in q} == {torch.float32} and {x.grad.dtype for x in low} == {torch.bfloat16}
    expected = cp.attention(*([x.detach().bfloat16() for x in xs] for xs in (q, k, v)))
    assert all(map(bits.equal, outs, expected))


# Kept between forward and backward


def kept_bytes(step: Callable[[], Any], local: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps of a step beside ``local``."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        step()
    own = {x.untyped_storage().data_ptr() for x in local}
    return sum(n for place, n in kept.items() if place not in own)


def _kept(rank: int, world_size: int, again: bool | None) -> float:
    rows = 64
    cp = ShardGroup().context_parallel([rows] * world_size, None, recompute_exchange=again)
    q, k, v, g = (torch.randn(rows, h, 64, requires_grad=True) for h in (4, 4, 4, 4))
    local: list[torch.Tensor] = []

    def step() -> None:
        local.extend([q, k, v, cp.attention(q, k, v)])

    beside = kept_bytes(step, [q, k, v])
    local[3].backward(g.detach())
    out = q.numel() * q.element_size()
    return (4 * out + beside - out) / (4 * out)


def test_only_local_keys_and_values_are_kept() -> None:
    assert max(run_processes(_kept, 4, None)) <= 1.15
    assert run_processes(_kept, 4, False)[3] > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_what_is_kept(dtype: torch.dtype) -> None:
    found = []
    for again in (False, True):
        cp = ShardGroup(5).context_parallel(LENGTHS, BORDERS, recompute_exchange=again)
        q, k, v, g = (chunks(x, LENGTHS, range(5)) for x in make(LENGTHS, dtype=dtype))
        torch.autograd.backward(cp.attention(q, k, v), [x.detach() for x in g])
        found.append([x.grad for xs in (q, k, v) for x in xs])
    assert all(map(bits.equal, *found))


def test_keys_and_values_of_one_tensor_travel_without_a_copy() -> None:
    both = torch.randn(5, 2, 3, 8)
    packed = context_ops._packed(*both.unbind(1))
    assert packed.data_ptr() == both.data_ptr() and torch.equal(packed, both)
    k, v = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    assert torch.equal(context_ops._packed(k, v), torch.stack([k, v], 1))
    k, v = both[:, :, :2].unbind(1)  # rows with something between them
    assert torch.equal(context_ops._packed(k, v), both[:, :, :2])


def _gradient_on_one(rank: int, world_size: int) -> str:
    cp = ShardGroup().context_parallel([3, 3])
    q, k, v = (torch.zeros(3, 2, 8, requires_grad=rank == 0) for _ in range(3))
    with pytest.raises(ValueError) as caught:
        cp.attention(q, k, v)
    return str(caught.value)


def test_a_gradient_on_one_process_only_is_an_error_on_all() -> None:
    for message in run_processes(_gradient_on_one, 2, timeout=20):
        assert "process 0" in message and "attention and its gradient" in message, message


def test_a_batch_and_its_group_end_with_their_last_use() -> None:
    gc.disable()
    try:
        group = ShardGroup(5)
        cp = group.context_parallel(LENGTHS, BORDERS)
        q, k, v, _ = (chunks(x, LENGTHS, range(5)) for x in make(LENGTHS))
        out, seen = cp.attention(q, k, v)[0], [weakref.ref(group), weakref.ref(cp)]
        del group, cp
        assert all(ref() is not None for ref in seen)  # the backward needs them
        out.sum().backward()
        del out
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


# Documents apart


def _attend(group: ShardGroup, lengths: list[int], x: torch.Tensor, inner: Any, dtype: torch.dtype) -> list[Any]:
    cp = group.context_parallel(lengths, BORDERS)
    q, k, v = (cp.split(part.to(dtype)) for part in x.split([4, 2, 2], 1))
    outs = cp.attention(q, k, v, inner=inner)
    return [outs] if isinstance(outs, torch.Tensor) else outs


def changed_rows(outs: torch.Tensor, others: torch.Tensor) -> list[int]:
    return (outs != others).flatten(1).any(1).nonzero().flatten().tolist()


def _apart(rank: int, world_size: int, placement: Any, lengths: list[int], inner: bool, dtype: torch.dtype) -> list:
    group = ShardGroup(len(lengths), placement=placement)
    x = torch.randn(S, 8, 16, generator=torch.Generator().manual_seed(3))
    use = (lambda *args: softcapped(*args)[0]) if inner else None
    before, found = _attend(group, lengths, x, use, dtype), {}
    for token in (0, 6, 7, 10, 20, 21, 27):
        other = x.clone()
        other[token] += 1
        found[token] = [changed_rows(a, b) for a, b in zip(before, _attend(group, lengths, other, use, dtype))]
    return [list(group.virtual_ranks), found]


@pytest.mark.parametrize(
    ("world_size", "placement", "lengths", "inner", "dtype"),
    [
        (1, "contiguous", [S], False, torch.float32),
        (2, "contiguous", [9, 0, 4, 12, 3], False, torch.bfloat16),
        (2, "zigzag", [7, 7, 7, 7], True, torch.float32),
        (3, [2, 0, 1, 1, 2, 0], [1, 5, 8, 1, 6, 7], False, torch.float64),
    ],
)
def test_a_token_changes_only_later_outputs_of_its_document(
    world_size: int, placement: Any, lengths: list[int], inner: bool, dtype: torch.dtype
) -> None:
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    changed: dict[int, list[int]] = {}
    for ranks, found in run_processes(_apart, world_size, placement, lengths, inner, dtype):
        for token, hosted in found.items():
            changed.setdefault(token, []).extend(starts[r] + i for r, rows in zip(ranks, hosted) for i in rows)
    for token, rows in changed.items():
        end = next(border for border in BORDERS if border > token)
        assert sorted(rows) == list(range(token, end))
