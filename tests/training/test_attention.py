"""Context-parallel attention: against float64, against itself on other numbers of processes, and its collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardsum import ShardGroup, context_parallel_attention
from shardsum.core import bits, reference
from shardsum.training import context_ops
from tests.processes import run_processes

EPS = 2.0**-24
CASES: dict[str, tuple[list[int], list[int] | None]] = {
    "one sequence": ([40, 0, 100, 7, 61], None),
    "packed": ([40, 0, 100, 7, 61], [0, 15, 15, 95, 208]),
    "borders at chunks": ([16, 16, 16, 16], [0, 16, 32, 64]),
    "one chunk": ([0, 0, 33, 0], [0, 3, 33]),
    "many documents": ([13, 50, 0, 1, 30], [0, 1, 9, 14, 15, 50, 63, 64, 70, 94]),
}


def make(
    lengths: Sequence[int], heads: int = 4, key_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    rows = sum(lengths)
    return [torch.randn(rows, h, dim, generator=g).to(dtype) for h in (heads, key_heads, key_heads, heads)]


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Sequence[int], causal: bool, scale: float
) -> torch.Tensor:
    """By definition, in the dtype given, on one process."""
    rows, groups = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    document = torch.bucketize(torch.arange(rows), torch.tensor(borders[1:]), right=True)
    mask = document[:, None] == document
    if causal:
        mask = mask.tril()
    p = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v)


def chunks(x: torch.Tensor, lengths: Sequence[int], ranks: Sequence[int]) -> list[torch.Tensor]:
    parts = x.split(list(lengths))
    return [parts[r].clone().requires_grad_() for r in ranks]


def forward_backward(group: Any, lengths: Sequence[int], borders: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Outputs and gradients of the hosted chunks, with a fixed cotangent."""
    dtype = options.pop("dtype", torch.float32)
    q, k, v, g = (chunks(x, lengths, group.virtual_ranks) for x in make(lengths, dtype=dtype))
    outs = context_parallel_attention(q, k, v, group, lengths=lengths, cu_seqlens=borders, **options)
    torch.autograd.backward(outs, [x.detach() for x in g])
    return [{"out": o.detach(), "dq": a.grad, "dk": b.grad, "dv": c.grad} for o, a, b, c in zip(outs, q, k, v)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_within_the_documented_bound_of_float64(case: str, causal: bool) -> None:
    lengths, borders = CASES[case]
    scale = 0.21
    found = forward_backward(ShardGroup(len(lengths)), lengths, borders, causal=causal, scale=scale)
    q, k, v, g = (x.double().requires_grad_() for x in make(lengths))
    out = full_attention(q, k, v, borders or [0, sum(lengths)], causal, scale)
    out.backward(g.detach())
    largest = scale * torch.einsum("ihd,jhd->hij", q.abs(), k.abs().repeat_interleave(2, 1)).max().item()
    keys = sum(lengths)
    factor = 2 * EPS * ((q.shape[-1] + 1) * largest + keys + 8)
    error = {name: 0.0 for name in ("out", "dq", "dk", "dv")}
    for name, exact in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        mine = torch.cat([f[name] for f in found])
        assert mine.shape == exact.shape and mine.dtype == torch.float32
        error[name] = (mine - exact).abs().max().item()
    assert error["out"] <= factor * v.abs().max().item()
    # gradients: the same factor times the sums of absolute values that they are made of
    probabilities = keys * g.abs().max().item()
    assert error["dv"] <= factor * probabilities * 2
    slope = 2 * v.shape[-1] * (g.abs().max() * v.abs().max()).item() * scale
    assert error["dq"] <= factor * slope * k.abs().max().item()
    assert error["dk"] <= factor * slope * keys * q.abs().max().item()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.21])
def test_a_scale_that_is_not_above_zero(scale: float, causal: bool) -> None:
    lengths, borders = CASES["packed"]
    found = forward_backward(
        ShardGroup(len(lengths)), lengths, borders, causal=causal, scale=scale, dtype=torch.float64
    )
    q, k, v, g = (x.double().requires_grad_() for x in make(lengths))
    out = full_attention(q, k, v, borders, causal, scale)
    out.backward(g.detach())
    for name, exact in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        torch.testing.assert_close(torch.cat([f[name] for f in found]), exact.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_one_process(dtype: torch.dtype) -> None:
    lengths, borders = CASES["packed"]
    found = forward_backward(ShardGroup(len(lengths)), lengths, borders, dtype=dtype)
    whole = forward_backward(ShardGroup(1), [sum(lengths)], borders, dtype=dtype)[0]
    q, k, v, g = (x.double().requires_grad_() for x in make(lengths, dtype=dtype))
    out = full_attention(q, k, v, borders, True, q.shape[-1] ** -0.5)
    out.backward(g.detach())
    for name, exact in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        mine = torch.cat([f[name] for f in found])
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        assert mine.dtype == dtype and (mine - exact).abs().max() <= 1.5 * (whole[name] - exact).abs().max() + ulp


def reference_exchange(
    batch: Any, shards: Any, name: str, back: bool = False, shared: bool = False
) -> list[torch.Tensor]:
    """The exchange by the loops of reference.py, forward and adjoint, in place of context_ops.exchange."""
    owned, needed = batch.plan.owned, batch.plan.needed
    if back:
        return reference.exchange_adjoint(shards, owned, needed, dtype=shards[0].dtype)
    return reference.exchange(shards, owned, needed, out_dtype=shards[0].dtype)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert bits.equal(found[name], value), (name, bits.first_difference(found[name], value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_the_sum_in_rank_order(monkeypatch: pytest.MonkeyPatch, case: str, dtype: torch.dtype) -> None:
    lengths, borders = CASES[case]
    found = forward_backward(ShardGroup(len(lengths)), lengths, borders, dtype=dtype)
    monkeypatch.setattr(context_ops, "exchange", reference_exchange)
    expected = forward_backward(ShardGroup(len(lengths)), lengths, borders, dtype=dtype)
    for f, e in zip(found, expected):
        assert_same(f, e)


def _in_process(
    rank: int, world_size: int, lengths: list[int], borders: Any, placement: Any, dtype: torch.dtype
) -> tuple[list[int], list]:
    group = ShardGroup(len(lengths), placement=placement)
    return list(group.virtual_ranks), forward_backward(group, lengths, borders, dtype=dtype)


@pytest.mark.parametrize(
    ("world_size", "placement", "case", "dtype"),
    [
        (2, "contiguous", "packed", torch.float32),
        (2, "zigzag", "one sequence", torch.bfloat16),
        (3, [2, 1, 0, 0, 2], "many documents", torch.float32),
        (4, "contiguous", "one chunk", torch.float32),
        (4, "zigzag", "packed", torch.bfloat16),
    ],
)
def test_same_bits_for_every_number_of_processes(
    world_size: int, placement: Any, case: str, dtype: torch.dtype
) -> None:
    lengths, borders = CASES[case]
    torch.set_num_threads(1)
    expected = forward_backward(ShardGroup(len(lengths)), lengths, borders, dtype=dtype)
    hosted = []
    for ranks, found in run_processes(_in_process, world_size, lengths, borders, placement, dtype):
        hosted += ranks
        for r, f in zip(ranks, found):
            assert_same(f, expected[r])
    assert sorted(hosted) == list(range(len(lengths)))


def _layers(
    group: ShardGroup, lengths: list[int], ignored: Sequence[int], checkpointed: bool = False
) -> list[torch.Tensor]:
    """Three layers in lockstep; the loss leaves out the ranks in ``ignored`` where the process hosts others."""

    def attend(layer: int, *h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = context_parallel_attention(list(h), [t + layer for t in h], list(h), group, lengths=lengths)
        return tuple(a + 0.5 * b for a, b in zip(h, outs))

    hosted = group.virtual_ranks
    x, weights, _, _ = (chunks(t, lengths, hosted) for t in make(lengths, 2, 2, 8))
    h = tuple(x)
    for layer in range(3):
        h = checkpoint(attend, layer, *h, use_reentrant=False) if checkpointed else attend(layer, *h)
    used = [v for v in hosted if v not in ignored] or hosted[:1]
    loss = sum((h[hosted.index(v)] * weights[hosted.index(v)].detach()).sum() for v in used)
    loss.backward()
    return [t.grad for t in x]


def _layers_in_process(
    rank: int, world_size: int, lengths: list[int], ignored: list[int], placement: Any, checkpointed: bool
) -> tuple:
    group = ShardGroup(len(lengths), placement=placement)
    return list(group.virtual_ranks), _layers(group, lengths, ignored, checkpointed)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "ignored", "placement"),
    [
        ([9, 0, 0, 12], [], [0, 0, 1, 2]),  # process 1 hosts an empty chunk only
        ([9, 4, 0, 12], [0, 3], [0, 0, 1, 1]),  # process 1 uses the output of its empty chunk only
        ([0, 0, 0, 5], [2], [0, 0, 1, 2]),
    ],
)
def test_backward_collectives_match_with_empty_chunks_and_unused_outputs(
    lengths: list[int], ignored: list[int], placement: list[int], checkpointed: bool
) -> None:
    torch.set_num_threads(1)
    expected = _layers(ShardGroup(4), lengths, ignored)
    args = (lengths, ignored, placement, checkpointed)
    for ranks, grads in run_processes(_layers_in_process, max(placement) + 1, *args, timeout=20):
        for r, grad in zip(ranks, grads):
            assert grad is not None and bits.equal(grad, expected[r])


def test_every_output_hangs_on_the_exchange() -> None:
    lengths, borders = CASES["packed"]
    group = ShardGroup(len(lengths))
    q, k, v, _ = (chunks(x, lengths, group.virtual_ranks) for x in make(lengths))
    outs = context_parallel_attention(q, k, v, group, lengths=lengths, cu_seqlens=borders)
    assert len({o.grad_fn for o in outs}) == 1 and outs[0].grad_fn is not None
    assert [tuple(o.shape) for o in outs] == [(n, 4, 16) for n in lengths]
    outs[1].sum().backward()  # the empty chunk's output reaches the exchange
    assert all(t.grad is not None for t in k)


def test_only_straddling_documents_travel() -> None:
    """Chunk 1 needs 5 earlier positions, chunk 2 none, chunk 3 all 20 of the document that fills chunk 2."""
    plan = ShardGroup(4).context_parallel([20] * 4, torch.tensor([0, 15, 40, 80])).plan
    assert plan.owned == [(0, 20), (20, 40), (40, 60), (60, 80)]
    assert plan.needed == [(0, 20), (15, 40), (40, 60), (40, 80)]


def _agreed_lengths(rank: int, world_size: int) -> torch.Tensor:
    group = ShardGroup()
    lengths = [5, 3]
    q, k, v, _ = (chunks(x, lengths, group.virtual_ranks)[0] for x in make(lengths))
    return context_parallel_attention(q, k, v, group).detach()


def test_single_tensors_and_lengths_from_the_rows() -> None:
    lengths = [5, 3]
    q, k, v, _ = (chunks(x, lengths, range(2)) for x in make(lengths))
    expected = context_parallel_attention(q, k, v, ShardGroup(2), lengths=lengths)
    for found, e in zip(run_processes(_agreed_lengths, 2), expected):
        assert bits.equal(found, e)
    for found, e in zip(context_parallel_attention(q, k, v, ShardGroup(2)), expected):
        assert bits.equal(found, e)


BAD = {
    "dims": ({"q": [torch.zeros(4, 2), torch.zeros(3, 4, 8)]}, r"q: virtual rank 0 has \(4, 2\)"),
    "none": ({"q": None}, "q: expected a list of Tensors, one for each hosted virtual rank, got None"),
    "scale": ({"scale": "half"}, "scale: expected a float, got 'half'"),
    "a bool": ({"lengths": [4, True]}, "lengths: expected 2 ints"),
    "a bool as border": ({"cu_seqlens": [0, True, 7]}, "cu_seqlens: expected integers"),
    "count": ({"k": [torch.zeros(4, 2, 8)]}, r"k: 1 tensors for the 2 virtual ranks hosted here \(0, 1\)"),
    "rows": ({"v": [torch.zeros(4, 2, 8), torch.zeros(2, 2, 8)]}, "virtual rank 1 has 3, 3 and 2 rows"),
    "dtype": ({"k": [torch.zeros(4, 2, 8), torch.zeros(3, 2, 8).half()]}, "k: virtual rank 1 has torch.float16"),
    "head dim": ({"q": [torch.zeros(4, 4, 6), torch.zeros(3, 4, 6)]}, "k: virtual rank 0 has head dim 8, but q has 6"),
    "groups": ({"q": [torch.zeros(4, 3, 8), torch.zeros(3, 3, 8)]}, "has 2 heads, which do not divide q's 3"),
    "heads": ({"v": [torch.zeros(4, 1, 8), torch.zeros(3, 1, 8)]}, "v: virtual rank 0 has 1 heads, but k has 2"),
    "lengths": ({"lengths": [4, 4]}, "q: virtual rank 1 has 3 rows, but lengths gives it 4"),
    "number of lengths": ({"lengths": [4, 3, 1]}, "lengths: 3 values for 2 virtual ranks"),
    "borders": ({"cu_seqlens": [0, 8]}, "the last border is 8, but the lengths sum to 7"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    arguments: dict[str, Any] = {
        "q": [torch.zeros(4, 4, 8), torch.zeros(3, 4, 8)],
        "k": [torch.zeros(4, 2, 8), torch.zeros(3, 2, 8)],
        "v": [torch.zeros(4, 2, 8), torch.zeros(3, 2, 8)],
        "lengths": [4, 3],
    }
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(group=ShardGroup(2), **{**arguments, **change})


def _bad_on_one(rank: int, world_size: int) -> str:
    group, x = ShardGroup(), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError) as caught:
        context_parallel_attention(x, x, x[: 3 - rank], group, lengths=[3, 3])
    return str(caught.value)


def test_bad_input_on_one_process_is_an_error_on_all() -> None:
    for message in run_processes(_bad_on_one, 2, timeout=20):
        assert "virtual rank 1 has 3, 3 and 2 rows" in message
