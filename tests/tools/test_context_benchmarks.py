"""Benchmarks of context parallelism: what docs/training.md says of bytes, and that every way runs and is verified."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.processes import run_processes
from tests.scripts import load_script

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import context_balance
import context_gradients
import context_host
import context_parallel
from common import Meter
from context_cases import Case, packed_borders, share_of_padded

SIZE = 256
LAYER = ["--heads", "2", "--key-heads", "1", "--head-dim", "8", "--samples", "1"]


def test_bytes_of_the_adjoint_over_those_of_a_padded_reduce_scatter() -> None:
    assert share_of_padded(SIZE, SIZE, 4, "contiguous", range(1)) == [0.5]
    assert share_of_padded(SIZE, SIZE, 4, "zigzag", range(1)) == [1.0]
    for placement in ("contiguous", "zigzag"):
        assert fmean(share_of_padded(4096, 4096 // 16, 4, placement, range(100))) < 0.2


def _measure(rank: int, world_size: int, mean: int, placement: str) -> list[context_gradients.Row]:
    case = Case(torch.device("cpu"), packed_borders(SIZE, mean, context_gradients.SEED), 2, 16, placement)
    return context_gradients.measure(Meter(torch.device("cpu"), 1, 2e-2), case, "")[0]


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


def test_a_layer_in_every_way(tmp_path: Path) -> None:
    words = [*LAYER, "--size", "64", "--parts", "1", "8", "--processes", "2", "--json", str(tmp_path / "rows.json")]
    rows = context_parallel.run(context_parallel.arguments(words), torch.device("cpu"))
    assert len(rows) == 16 and {row.way for row in rows} == {"shardsum", "one call", "user", "SDPA a document"}
    assert all(min(row.step.median, row.host, row.host_alone, row.peak) > 0 for row in rows)
    assert (tmp_path / "rows.json").exists()


def test_the_hosts_part_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    context_host.run(context_host.arguments(["--size", "128", *LAYER[:6]]), torch.device("cpu"))
    said = capsys.readouterr().out
    assert said.count("forward ") == 4 and said.count("1 x _AttentionBackward") == 4


def test_balance_of_every_arrangement() -> None:
    words = [*LAYER, "--processes", "2", "--mean", "20"]
    rows = context_balance.run(context_balance.arguments(words), torch.device("cpu"))
    assert [row.chunks for row in rows[:2]] == ["equal, contiguous", "equal, zigzag"] and len(rows) == 4
    assert rows[2].predicted < rows[0].predicted and min(row.slowest for row in rows) > 0


def _train_step(rank: int, world_size: int) -> list[Any]:
    train_step = load_script("benchmarks/train_step.py")
    return train_step.run(train_step.arguments(["--small", "--samples", "1"]), torch.device("cpu"))


def test_a_training_step_in_all_ways() -> None:
    pytest.importorskip("transformers")
    alone, (together, _) = _train_step(0, 1), run_processes(_train_step, 2)
    ways = [f"{name}, {placement}" for placement in ("contiguous", "zigzag") for name in ("shardsum", "user")]
    assert [(row.mean, row.way) for row in alone] == [(m, way) for m in (16, 256) for way in ways[:2]]
    assert [(row.mean, row.way) for row in together] == [(m, way) for m in (16, 256) for way in ways]
    losses = {row.mean: row.loss for row in alone}
    for row in together:
        assert row.loss == pytest.approx(losses[row.mean], rel=1e-2) and row.tokens_per_second > 0
