"""MaskedSum against the loops of reference.py, bit for bit; first layer: one process, no group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert module.state_dict() == {} and {n for n, _ in module.named_buffers()} == {"0.shard_mask", "0.packed_mask"}
    assert "num_virtual_ranks=2, s_max=3, packed to bits" in repr(module)
    assert "intervals=[(0, 2)]" in repr(MaskedSum(torch.tensor([[True, True, False]])))
    moved = module.half().to("meta")[0]
    assert moved.shard_mask.dtype == torch.bool and moved.shard_mask.device.type == "meta"
    assert moved.packed_mask.device.type == "meta" and moved.packed_mask.dtype == torch.int32


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
    module = MaskedSum(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(3, 2\) does not begin with the mask's \(2, 3\)"):
        module(torch.ones(3, 2))
    with pytest.raises(ValueError, match="x: on meta, but the mask is on cpu"):
        module(torch.ones(2, 3, device="meta"))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="x: None does not begin"):
        MaskedSum(torch.ones(2, 3, dtype=torch.bool))(None)
    with pytest.raises(ValueError, match=r"mask: .* on meta"):
        MaskedSum(torch.ones(2, 3, dtype=torch.bool, device="meta"))
