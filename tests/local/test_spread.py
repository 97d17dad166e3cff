"""The adjoint of a padded sum is a copy of bytes: every bit of it, at any offset, for any number of shards."""

from __future__ import annotations

import random

import pytest
import torch

from shardsum import ragged_sum
from shardsum.local import kernels
from shardsum.local.plan import SumPlan, planned
from tests.values import assert_same, random_values

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected_rows(x: torch.Tensor, rows: list[tuple[int, int, int]], capacity: int) -> torch.Tensor:
    result = torch.zeros((len(rows), capacity, *x.shape[1:]), dtype=x.dtype)
    for r, (start, first, n) in enumerate(rows):
        for i in range(n):
            result[r, first + i] = x[start + i]
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.complex64])
def test_random_rows_are_copied_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pick = random.Random(str(dtype))
    for case in range(10):
        size, num_shards = pick.choice((1, 5, 64, 700)), pick.choice((1, 3, 8, 70))
        capacity = size + pick.choice((0, 0, 3))
        row_shape = pick.choice(((), (1,), (3,), (8,), (2, 16)))
        rows = []
        for _ in range(num_shards):
            n = pick.choice((0, size, pick.randrange(size + 1)))
            rows.append((pick.randrange(size - n + 1), pick.randrange(capacity - n + 1), n))
        values = random_values((size + 1, *row_shape), torch.float32, case)
        values.view(-1)[::7] = -0.0
        x = (values * 3).to(dtype)[1:]  # from an odd offset
        plan = SumPlan(rows, size).words()
        given = x.to(device) if pick.random() < 0.5 else torch.cat([x[:1], x]).to(device)[1:]
        got = kernels.spread_plan(given, plan, num_shards, capacity)
        assert got.dtype == dtype and got.shape == (num_shards, capacity, *row_shape)
        assert torch.equal(got.cpu().view(torch.uint8), expected_rows(x, rows, capacity).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_gradient_that_is_not_contiguous(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = random_values((32, 5000), torch.float32, 1).to(device).t()
    rows = [(0, 0, 5000), (10, 3, 4000), (0, 0, 0)]
    got = kernels.spread_plan(x, SumPlan(rows, 5000).words(), 3, 5000)
    assert_same(got.cpu(), expected_rows(x.cpu(), rows, 5000))


def test_what_does_not_fit_is_refused() -> None:
    plan = planned([2, 3], None, 4, "sum", None, None, False)
    x = torch.ones(4, 2)
    assert kernels.spread_plan(x, plan, 2, 3).shape == (2, 3, 2)
    for bad, shards, capacity in ((x[:3], 2, 3), (x, 3, 3), (x, 2, 2), (x, 2, -1)):
        with pytest.raises(RuntimeError):
            kernels.spread_plan(bad, plan, shards, capacity)


def test_a_gradient_follows_the_lists_of_its_call() -> None:
    """Backward comes later: by then the caller may have the next step's lengths in the same lists."""
    for op in ("sum", "mean"):
        for starts in (None, [1, 0]):
            lengths, x = [2, 3], torch.ones(2, 4, requires_grad=True)
            y = ragged_sum(x, lengths, starts=starts, op=op)
            (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            lengths[:] = [0, 0]
            if starts:
                starts[:] = [0, 0]
            (got,) = torch.autograd.grad(y.sum(), x)
            assert_same(got, want)
            assert (got != 0).sum(1).tolist() == [2, 3]
