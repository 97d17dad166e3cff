"""What a caller changes after a call, or can be read only once, has the value that it had in the call."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardsum import ShardGroup, context_parallel_attention
from shardsum.training.hooks import HookState
from tests.values import assert_same

X = [torch.arange(4.0), torch.arange(4.0) + 10]
SUM = [10.0, 12.0, 14.0, 16.0]


def tolist(results: Any) -> list[list[float]]:
    return [y.tolist() for y in results]


def test_a_tensor_that_was_an_argument_is_read_anew() -> None:
    """Tensors are equal to themselves, whatever they hold by then."""
    group, splits, size = ShardGroup(2), torch.tensor([1, 3]), torch.tensor(4)
    intervals = torch.tensor([[0, 4], [0, 4]])
    for cut in (1, 3, 2):
        splits.copy_(torch.tensor([cut, 4 - cut]))
        for given in (splits, list(splits), tuple(splits)):
            assert tolist(group.reduce_scatter(X, [4, 4], splits=given)) == [SUM[:cut], SUM[cut:]]
        assert tolist(group.reduce_scatter(X, splits=splits)) == [SUM[:cut], SUM[cut:]]
        size.fill_(4 + cut)
        assert group.all_reduce(X, [4, 4], size=size).tolist() == SUM + [0.0] * cut
        intervals[1, 1] = cut
        assert tolist(group.exchange(X, [(0, 4)] * 2, intervals, size=4)) == [SUM, SUM[:cut]]


def test_what_can_be_read_once_is_read_once() -> None:
    group = ShardGroup(2)
    for n in (4, 2, 4):
        want = [a + (b if i < n else 0) for i, (a, b) in enumerate(zip(X[0].tolist(), X[1].tolist()))]
        assert group.all_reduce(X, iter([4, n])).tolist() == want
        assert group.all_reduce(X, (k for k in (4, n)), size=4).tolist() == want
        assert tolist(group.reduce_scatter(X, [4, n], splits=iter([1, 3]))) == [want[:1], want[1:]]
        held, wanted = zip([0, 0], [4, n]), zip([0, 1], [1, 4])
        assert tolist(group.exchange(X, held, wanted, size=4)) == [want[:1], want[1:]]
    assert tolist(group.reduce_scatter(X, splits=iter([1, 3]))) == [SUM[:1], SUM[1:]]
    assert group.context_parallel(None, iter([0, 2, 8])).lengths == [4, 4]
    assert group.context_parallel([4, 4], iter([0, 8]), False, iter([1, 2])).window == (1, 2)


def test_lists_are_free_once_a_call_has_begun() -> None:
    group = ShardGroup(2)
    shards, outs = list(X), [torch.zeros(2), torch.zeros(2)]
    given, other = list(outs), torch.full((2,), 7.0)
    handle = group.reduce_scatter(shards, [4, 4], out=given, async_op=True)
    given[:] = [other, other]
    shards[:] = [other, other]
    assert tolist(handle.wait()) == tolist(outs) == [SUM[:2], SUM[2:]] and other.tolist() == [7.0, 7.0]


def test_numpy_values_are_told_apart_by_type() -> None:
    """Their bytes are the same: what is refused is refused after a call with those that are taken, too."""
    group, x = ShardGroup(2), torch.ones(2, 250)
    ones, many = np.array([1, 1], np.uint8), np.array([200, 2], np.uint8)
    for _ in range(2):
        assert group.all_reduce(x, ones, size=2).tolist() == [2.0, 0.0]
        assert group.all_reduce(x, many, size=250).sum() == 202
        with pytest.raises(ValueError, match="lengths: expected 2 ints"):
            group.all_reduce(x, ones.view(np.bool_), size=2)
        with pytest.raises(ValueError, match="lengths: virtual rank 0 has -56"):
            group.all_reduce(x, many.view(np.int8), size=250)
        for scale in (np.float32(1), np.float32(1).view(np.int32)):
            assert group.all_reduce(x, [1, 1], scale=scale).item() == torch.tensor(2.0 * int(scale)).item()


@pytest.mark.parametrize("form", [np.array, tuple, torch.tensor, lambda n: array("q", n)])
def test_any_form_of_lengths_tells_stacked_shards(form: Any) -> None:
    assert ShardGroup(1).all_reduce(torch.ones(1, 3, 2), form([2]), size=3).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_attention_knows_borders_by_their_values() -> None:
    """Long arrays print shortened, and iterators as the place where they lie."""
    group, q, ranks = ShardGroup(8), [torch.randn(1, 1, 4) for _ in range(8)], 8
    forms = [lambda ints: np.array(ints), lambda ints: iter(ints)]
    with np.printoptions(threshold=4):
        for form in forms:
            for middle in (4, 3, 4):  # two documents of one position, or one of two and an empty one
                borders = [0, 1, 2, 3, middle, 5, 6, 7, 8]
                outs = context_parallel_attention(q, q, q, group, lengths=form([1] * ranks), cu_seqlens=form(borders))
                for y, want in zip(outs, group.context_parallel([1] * ranks, borders).attention(q, q, q)):
                    assert_same(y, want)


def test_a_hook_follows_its_scale() -> None:
    state = HookState.for_sum_loss(ShardGroup(1))
    x = torch.ones(3)
    for scale, value in ((1.0, 1.0), (0.5, 0.5), (1.0, 1.0)):
        state.scale = scale
        assert state.plan(3, torch.float32)(x).tolist() == [value] * 3


def test_a_replayed_function_is_for_one_checkpoint() -> None:
    group = ShardGroup(1)

    def noise(x: torch.Tensor) -> torch.Tensor:
        with group.rng(0):
            return x * torch.rand(4)

    layer, x = group.generators.replayed(noise), torch.ones(4, requires_grad=True)
    for use_reentrant in (True, False):
        layer = group.generators.replayed(noise)
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
        (grad,) = torch.autograd.grad(y.sum(), x) if not use_reentrant else (None,)
        if use_reentrant:
            y.sum().backward()
            grad, x.grad = x.grad, None
        assert_same(grad, y.detach())
        with pytest.raises(RuntimeError, match="called again outside a backward pass"):
            checkpoint(layer, x, use_reentrant=use_reentrant)
