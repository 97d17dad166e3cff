"""benchmarks/context_gradients.py: what docs/training.md says of bytes, and that every way runs and is verified."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.processes import run_processes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import context_gradients
from context_cases import Case, packed_borders, share_of_padded

SIZE = 256


def test_bytes_of_the_adjoint_over_those_of_a_padded_reduce_scatter() -> None:
    assert share_of_padded(SIZE, SIZE, 4, "contiguous", range(1)) == [0.5]
    assert share_of_padded(SIZE, SIZE, 4, "zigzag", range(1)) == [1.0]
    for placement in ("contiguous", "zigzag"):
        assert fmean(share_of_padded(4096, 4096 // 16, 4, placement, range(100))) < 0.2


def _measure(rank: int, world_size: int, mean: int, placement: str) -> list[context_gradients.Row]:
    case = Case(torch.device("cpu"), packed_borders(SIZE, mean), 2, 16, placement)
    return context_gradients.measure(context_gradients.Meter(torch.device("cpu"), 1), case, "")[0]


@pytest.mark.parametrize(("mean", "placement"), [(SIZE, "zigzag"), (SIZE // 16, "contiguous")])
def test_every_way_is_verified_and_measured(mean: int, placement: str) -> None:
    rows = run_processes(_measure, 4, mean, placement)[0]
    ours, bf16, fp32, by_hand = rows
    assert [row.way for row in rows[1:]] == ["padded bf16", "padded fp32", "padded by hand"]
    assert fp32.total == 2 * bf16.total == 2 * by_hand.total
    if mean == SIZE:
        assert ours.total == bf16.total and ours.busiest == bf16.busiest
    else:
        assert ours.total < 0.2 * bf16.total
    assert ours.reduction_error == pytest.approx(fp32.reduction_error, rel=1e-3)  # added in fp32, rounded once
    for row in rows:
        assert min(row.reduction_peak, row.step_peak, row.reduction.median, row.step.median) > 0
