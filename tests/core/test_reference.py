"""The definition of every result, against the same arithmetic in numpy (tests/oracle.py), bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsum.core import reference
from tests import oracle
from tests.problems import problems
from tests.values import assert_same, random_values


@settings(deadline=None, max_examples=150)
@given(problems(), st.integers(0, 10**6), st.integers(-3, 3))
def test_sums_and_gradients_equal_the_oracle(p: dict, seed: int, shift: int) -> None:
    """``shift``: rows may lie outside the result."""
    lengths, size, kwargs = p["lengths"], p["size"], p["kwargs"]
    starts = [s + shift for s in p["starts"]]
    rows = [p["x"][r, :n] for r, n in enumerate(lengths)]
    if p["x"].dtype != torch.uint32:
        previous = random_values((size, *p["x"].shape[2:]), kwargs["out_dtype"], seed)
        for before in (None, previous):
            want = oracle.ragged_sum(rows, starts, size, **kwargs, previous=before)
            assert_same(reference.ragged_sum(rows, starts, size, **kwargs, previous=before), want)
    if p["x"].dtype.is_floating_point:
        numerics = dict(op=kwargs["op"], scale=kwargs["scale"], dtype=p["x"].dtype)
        grad = random_values((size, *p["x"].shape[2:]), kwargs["out_dtype"], seed)
        wanted = oracle.ragged_sum_gradients(grad, starts, lengths, **numerics)
        for got, want in zip(reference.ragged_sum_adjoint(grad, starts, lengths, **numerics), wanted):
            assert_same(got, want)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_masks_are_sums_of_single_rows(op: str) -> None:
    """A masked sum and its gradient are those of one shard a True position."""
    x = random_values((5, 7, 3), torch.bfloat16, 2)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    places = [(r, j) for r in range(5) for j in range(7) if mask[r, j]]
    numerics = dict(op=op, scale=0.3)
    rows, starts = [x[r, j : j + 1] for r, j in places], [j for _, j in places]
    want = oracle.ragged_sum(rows, starts, 7, **numerics, out_dtype=x.dtype)
    assert_same(reference.masked_sum(x, mask, **numerics, out_dtype=x.dtype), want)
    grad = random_values((7, 3), x.dtype, 4)
    gradient = reference.masked_sum_adjoint(grad, mask, **numerics, dtype=x.dtype)
    wanted = torch.zeros_like(x)
    pieces = oracle.ragged_sum_gradients(grad, starts, [1] * len(starts), **numerics, dtype=x.dtype)
    for (r, j), piece in zip(places, pieces):
        wanted[r, j] = piece[0]
    assert_same(gradient, wanted)


def test_mutants_differ_from_the_oracle() -> None:
    """A mean that divides after the scale, or by the number of ranks, and a gradient without its divisor are seen."""
    x = random_values((6, 9, 50), torch.float32, 5).nan_to_num(1.0, 2.0, 3.0)
    lengths = [9, 3, 7, 0, 5, 9]
    rows, starts = [x[r, :n] for r, n in enumerate(lengths)], [0] * 6
    want = oracle.ragged_sum(rows, starts, 9, op="mean", scale=0.3, out_dtype=x.dtype)
    total = oracle.ragged_sum(rows, starts, 9, out_dtype=x.dtype)
    count = torch.tensor([sum(j < n for n in lengths) for j in range(9)])[:, None]
    scale = torch.tensor(0.3)
    assert_same(total / count * scale, want)
    for mutant in (total * scale / count, total / 6 * scale, total / count * 0.3000001):
        assert not torch.equal(mutant, want)
    gradients = oracle.ragged_sum_gradients(total, starts, lengths, op="mean", scale=0.3, dtype=x.dtype)
    assert_same(gradients[0], total / count * scale)
