"""MaskedSum against the loops of reference.py, bit for bit; first layer: one process, no group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardsum
from shardsum.core import bits, reference
from shardsum.local.module import MaskedSum, pack_bits, row_intervals


def interval_mask(intervals: list[tuple[int, int]], capacity: int) -> torch.Tensor:
    position = torch.arange(capacity)
    return torch.stack([(position >= begin) & (position < end) for begin, end in intervals])


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    ranks, capacity = draw(st.integers(1, 6)), draw(st.sampled_from([0, 1, 5, 31, 32, 33, 70]))
    if draw(st.booleans()):
        ends = [sorted(draw(st.tuples(*[st.integers(0, capacity)] * 2))) for _ in range(ranks)]
        return interval_mask([(a, b) for a, b in ends], capacity)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return torch.rand(ranks, capacity, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))


@settings(max_examples=150, deadline=None)
@given(masks(), st.sampled_from([(), (3,), (2, 17)]), st.sampled_from([torch.bfloat16, torch.float32, torch.int32]))
def test_equals_reference(mask: torch.Tensor, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (1000 * torch.randn(*mask.shape, *trailing)).to(dtype)
    if dtype.is_floating_point:
        x[~mask] = float("nan")  # what is masked out must not even be looked at
    out_dtype = dtype if dtype.is_floating_point else torch.int64
    expected = reference.masked_sum(x, mask, out_dtype=out_dtype)
    module = MaskedSum(mask)
    assert bits.equal(module(x), expected)
    assert bits.equal(module(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    if dtype.is_floating_point:
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        assert bits.equal(out.detach(), expected)
        grad = torch.randn(out.shape).to(dtype)
        out.backward(grad)
        assert bits.equal(leaf.grad, reference.masked_sum_adjoint(grad, mask, dtype=dtype))


@settings(max_examples=100, deadline=None)
@given(masks())
def test_packed_words_hold_the_mask(mask: torch.Tensor) -> None:
    words = pack_bits(mask)
    assert words.dtype == torch.int32 and words.shape == (mask.shape[0], -(-mask.shape[1] // 32))
    for r in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            assert bool((words[r, j // 32].item() >> (j % 32)) & 1) == bool(mask[r, j])


def test_recognises_intervals() -> None:
    assert row_intervals(interval_mask([(0, 8), (0, 12), (0, 10), (0, 18)], 20)) == [(0, 8), (0, 12), (0, 10), (0, 18)]
    assert row_intervals(interval_mask([(2, 5), (0, 0), (5, 6)], 6)) == [(2, 5), (0, 0), (5, 6)]
    assert row_intervals(torch.tensor([[True, False, True]])) is None
    assert row_intervals(torch.zeros(3, 0, dtype=torch.bool)) == [(0, 0)] * 3


def test_seed_case() -> None:
    """R=4, lengths 8, 12, 10, 18 of 20: equal to (x * mask).sum(0) on whole numbers."""
    mask = interval_mask([(0, 8), (0, 12), (0, 10), (0, 18)], 20)
    x = torch.arange(4.0 * 20).reshape(4, 20)
    assert torch.equal(MaskedSum(mask)(x), (x * mask).sum(0))


def test_is_a_module() -> None:
    gaps = torch.tensor([[True, False, True], [True, True, True]])
    module = torch.nn.Sequential(MaskedSum(gaps))
    assert module.state_dict() == {} and {n for n, _ in module.named_buffers()} == {"0.packed_mask"}
    assert "num_virtual_ranks=2, s_max=3, packed to bits" in repr(module)
    assert "intervals=[(0, 2)]" in repr(MaskedSum(torch.tensor([[True, True, False]])))
    moved = copy.deepcopy(module).half().to("meta")[0]
    assert moved.packed_mask.device.type == "meta" and moved.packed_mask.dtype == torch.int32
    assert moved(torch.ones(2, 3, device="meta")).shape == (3,)
    assert module[0].packed_mask.device.type == "cpu"


@pytest.mark.parametrize("change", [
    lambda m: m.to("meta").to_empty(device="cpu"),
    lambda m: m.type(torch.float16),
    lambda m: m.half(),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.double().float(),
    lambda m: m._apply(torch.zeros_like),
    lambda m: copy.deepcopy(m),
    lambda m: pickle.loads(pickle.dumps(m)),
])  # fmt: skip
@pytest.mark.parametrize("mask", [torch.tensor([[True, False, True]] * 4), torch.tensor([[False, True, True]] * 4)])
def test_what_converts_or_empties_buffers_leaves_the_mask(change: Callable, mask: torch.Tensor) -> None:
    module, x = MaskedSum(mask, op="mean", scale=0.5), torch.randn(4, 3, 2)
    before = module(x)
    torch.full((4096,), 255, dtype=torch.uint8)  # what new memory is likely to hold
    module = change(module)
    assert bits.equal(module(x), before)
    assert torch.equal(module.shard_mask, mask)
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    want = reference.masked_sum_adjoint(torch.ones(3, 2), mask, op="mean", scale=0.5, dtype=torch.float32)
    assert bits.equal(leaf.grad, want)


def test_from_lengths() -> None:
    x = torch.randn(4, 5, 3)
    x[2, 1:] = float("nan")
    rows = [x[r, :n] for r, n in enumerate([5, 0, 1, 3])]
    want = reference.ragged_sum(rows, [0] * 4, 5, op="mean", scale=0.3, out_dtype=torch.bfloat16)
    for lengths in ([5, 0, 1, 3], (5, 0, 1, 3), torch.tensor([5, 0, 1, 3])):
        module = MaskedSum.from_lengths(lengths, 5, op="mean", scale=0.3, out_dtype=torch.bfloat16)
        out = torch.empty(5, 3, dtype=torch.bfloat16)
        assert bits.equal(module(x), want) and module(x, out=out) is out and bits.equal(out, want)
    assert module.intervals == [(0, 5), (0, 0), (0, 1), (0, 3)] and module.shard_mask.sum(1).tolist() == [5, 0, 1, 3]


@pytest.mark.parametrize("call, message", [
    (lambda: MaskedSum.from_lengths([1, 6], 5), r"lengths: virtual rank 1 has 6, expected 0 to size 5"),
    (lambda: MaskedSum.from_lengths([1, -1], 5), r"lengths: virtual rank 1 has -1"),
    (lambda: MaskedSum.from_lengths([1, True], 5), r"lengths: expected 2 ints"),
    (lambda: MaskedSum.from_lengths([], 5), r"lengths: no virtual ranks"),
    (lambda: MaskedSum.from_lengths(3, 5), r"lengths: expected ints or an integer Tensor, got 3"),
    (lambda: MaskedSum.from_lengths([1], 5.0), r"size: expected an int, got 5.0"),
    (lambda: MaskedSum.from_lengths([1], 5, op="max"), r'op: expected "sum" or "mean"'),
    (lambda: MaskedSum.from_lengths([1], 5, scale="2"), r"scale: expected a float, got '2'"),
    (lambda: MaskedSum.from_lengths([1], 5, out_dtype=torch.complex64), r"out_dtype: torch.complex64"),
    (lambda: MaskedSum.from_lengths([1], 5, scale=2.0)(torch.ones(1, 5).int()), r"scale of torch.int32"),
    (lambda: MaskedSum.from_lengths([1], 5, scale=1e300)(torch.ones(1, 5)), r"scale: 1e\+300 is beyond torch.float32"),
    (lambda: MaskedSum.from_lengths([1], 5)(torch.ones(1, 6)), r"\(1, 6\) does not begin with the mask's \(1, 5\)"),
    (lambda: MaskedSum(torch.tensor([[True, False, True]]))(torch.ones(1, 4)), r"\(1, 4\) does not begin"),
    (lambda: MaskedSum.from_lengths([1], 5)(torch.ones(1, 5), out=torch.ones(4)), r"out: torch.float32 \(4,\)"),
    (lambda: MaskedSum.from_lengths([1], 5)(torch.ones(1, 5).requires_grad_(), out=torch.ones(5)), r"out: not poss"),
])  # fmt: skip
def test_bad_arguments_are_named(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_writing_to_the_mask_later_has_no_effect() -> None:
    for mask in (torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])):
        module, x = MaskedSum(mask), torch.tensor([[1.0, 2.0, 4.0]])
        before = module(x)
        mask.fill_(False)
        assert torch.equal(module(x), before) and before.sum() > 0


@pytest.mark.parametrize("mask", [torch.tensor([[True, False, True]] * 4), torch.tensor([[False, True, True]] * 4)])
def test_compiles_whole(mask: torch.Tensor) -> None:
    x = torch.randn(4, 3, 2, requires_grad=True)
    compiled = torch.compile(MaskedSum(mask), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert bits.equal(out, reference.masked_sum(x.detach(), mask, out_dtype=torch.float32))
    out.sum().backward()
    assert bits.equal(x.grad, reference.masked_sum_adjoint(torch.ones(3, 2), mask, dtype=torch.float32))


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool), [[True]], torch.ones(0, 3).bool()])
def test_refuses_other_masks(mask: object) -> None:
    with pytest.raises(ValueError, match=r"mask: expected a bool Tensor \(R, S_MAX\)"):
        MaskedSum(mask)  # type: ignore[arg-type]


def test_refuses_other_shapes_and_devices() -> None:
    module = MaskedSum(torch.tensor([[True, False, True]] * 2))
    with pytest.raises(ValueError, match=r"\(3, 2\) does not begin with the mask's \(2, 3\)"):
        module(torch.ones(3, 2))
    with pytest.raises(ValueError, match="x: on meta, but the mask is on cpu"):
        module(torch.ones(2, 3, device="meta"))


def test_what_is_no_tensor_is_named() -> None:
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True, False, True]] * 2)):
        for x in (None, [torch.ones(3)] * 2, (torch.ones(3),) * 2):
            with pytest.raises(ValueError, match=r"x: .* does not begin"):
                MaskedSum(mask)(x)
    with pytest.raises(ValueError, match=r"mask: expected a bool Tensor|x: expected a Tensor"):
        shardsum.masked_sum([torch.ones(3)] * 2, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask: .* on meta"):
        MaskedSum(torch.ones(2, 3, dtype=torch.bool, device="meta"))
