"""shardsum bench: cases, verified rows, files and pictures; what it must notice; every way to start it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from shardsum.native import loader as native
from shardsum.tools import cli
from shardsum.tools.bench import cases, collectives, local, plots, rows
from shardsum.tools.bench.cases import Case, lengths_of
from tests.processes import run_processes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def bench(*arguments: str) -> int:
    return cli.main(["bench", "--quick", "--samples", "1", *arguments])


# -- cases ------------------------------------------------------------------------------------------------------------


def test_profiles() -> None:
    case = Case(num_ranks=4, size=100, width=1, dtype="fp32")
    assert lengths_of(replace(case, profile="full")) == [100] * 4
    assert lengths_of(replace(case, profile="causal")) == [25, 50, 75, 100]
    assert lengths_of(replace(case, profile="skewed")) == [64, 64, 100, 64]
    assert lengths_of(cases.SEED) == [8, 12, 10, 18]


@pytest.mark.parametrize("fill", [0.1, 0.3, 0.5, 0.7])
def test_random_lengths_are_spread_and_have_the_mean_asked_for(fill: float) -> None:
    lengths = lengths_of(Case(num_ranks=64, size=10000, width=1, dtype="fp32", fill=fill))
    assert sum(lengths) / 640000 == pytest.approx(fill, abs=0.01)
    assert 0 <= min(lengths) < 1300 and 8600 < max(lengths) <= 10000
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_of_cases_tell_them_apart_and_shapes_stand_together(device: str) -> None:
    names = [str(case) for case in cases.full(device)]
    assert len(set(names)) == len(names)
    shapes = [(c.num_ranks, c.size, c.width, c.dtype) for c in cases.full(device) if c.operation == "ragged_sum"]
    runs = sum(a != b for a, b in zip(shapes, [None, *shapes]))
    assert runs == len(set(shapes))  # torch.compile compiles each once
    names = [str(case) for case in collectives.full(device)]
    assert len(set(names)) == len(names)


def test_documents_reach_back_over_their_chunk() -> None:
    held = cases.packed_documents(4, 1000, 60)
    assert [end for _, end in held] == [250, 500, 750, 1000]
    assert held[0][0] == 0 and all(0 <= begin <= 250 * i for i, (begin, _) in enumerate(held))
    assert any(begin < 250 * i for i, (begin, _) in enumerate(held))


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_run_is_verified_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "cpu.json"
    assert bench("--json", str(file), "--baselines", "[eager, loop, sum fp32]") == 0
    printed = capsys.readouterr().out
    facts, measured = rows.load(file)
    assert facts["command"].startswith("python -m shardsum bench --quick") and facts["torch"] == torch.__version__
    assert {str(case) for case in cases.quick()} == {row.case for row in measured}
    assert all(0 < row.us_least <= row.us_20 <= row.us <= row.us_80 for row in measured)
    ours = [row for row in measured if row.variant in ("shardsum", "MaskedSum", "mean", "accumulate fp32")]
    assert len(ours) >= 8 and not any(row.wrong for row in ours)
    seed = {row.variant: row for row in measured if row.profile == "seed"}
    assert list(seed) == ["shardsum", "eager", "loop", "sum fp32", "copy"]
    assert seed["shardsum"].bytes == (8 + 12 + 10 + 18 + 20) * 4 and seed["shardsum"].fill == 0.6
    row = seed["shardsum"]
    assert row.gbps == pytest.approx(row.bytes / row.us / 1e3)
    fastest = min(("eager", "loop", "sum fp32"), key=lambda name: seed[name].us)
    assert row.baseline == fastest and row.speedup == pytest.approx(seed[fastest].us / row.us)
    assert row.percent == pytest.approx(100 * seed["copy"].us / row.us)
    assert f"{row.us:.2f}" in printed and row.case in printed
    assert (tmp_path / "deep" / "cpu_roofline.png").stat().st_size > 5000
    assert not list(tmp_path.rglob("*.part"))


def sabotage(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    honest = local.ragged_sum
    monkeypatch.setattr(local, "ragged_sum", lambda x, lengths, out=None, **mode: change(honest, x, lengths, out))


def seed_rows(tmp_path: Path, *arguments: str) -> dict[str, rows.Row]:
    assert bench("--only", "seed", "--json", str(tmp_path / "seed.json"), *arguments) == 1
    return {row.variant: row for row in rows.load(tmp_path / "seed.json")[1]}


def test_one_wrong_bit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_ulp_off(honest: Any, x: torch.Tensor, lengths: list[int], out: torch.Tensor) -> torch.Tensor:
        honest(x, lengths, out=out)
        out[3] = torch.nextafter(out[3], torch.tensor(torch.inf))
        return out

    sabotage(monkeypatch, one_ulp_off)
    assert seed_rows(tmp_path)["shardsum"].wrong == 1


def test_what_is_not_written_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def only_at_first(honest: Any, x: torch.Tensor, lengths: list[int], out: torch.Tensor) -> torch.Tensor:
        written.append(1)
        return honest(x, lengths, out=out) if len(written) <= 2 else out

    sabotage(monkeypatch, only_at_first)
    assert seed_rows(tmp_path)["shardsum"].wrong == 20


def test_a_baseline_that_computes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_sum_flat", lambda b: b.wide.fill_(1))
    assert list(seed_rows(tmp_path)) == ["shardsum", "eager", "loop", "copy"]
    assert "sum fp32 is left out: its result is off by more than rounding" in capsys.readouterr().out


def test_no_case_starts_after_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--limit", "0") == 0
    printed = capsys.readouterr().out
    assert f"0 s are over: stopped before {cases.SEED}" in printed and "\n0 rows in" in printed


def test_the_instruction_set_is_limited_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str | None] = []
    monkeypatch.setattr(native, "limit_cpu_isa", limits.append)
    assert bench("--only", "seed", "--isa", "baseline") == 0 and limits == ["baseline"]


# -- between processes ------------------------------------------------------------------------------------------------


def _collectives(rank: int, world_size: int, file: str) -> int:
    return bench("--only", "16384", "--json", file)


def test_collectives_are_verified_and_their_bytes_counted(tmp_path: Path) -> None:
    file = tmp_path / "gloo.json"
    assert run_processes(_collectives, 2, str(file)) == [0, 0]
    facts, measured = rows.load(file)
    assert facts["processes"] == 2 and facts["wire_gbps"] > 0
    found = {(row.profile, row.variant): row for row in measured}
    transports = {
        f"shardsum {name}" for name in ("auto", "auto, out=", "gather", "gather, device lengths", "all_to_all")
    }
    theirs = {"dist.all_reduce bf16", "dist.all_reduce fp32"}
    assert {variant for profile, variant in found if profile == "uneven"} == transports | theirs
    assert {row.wrong for (_, variant), row in found.items() if variant in transports} == {0}
    size = 16384 // 128
    assert found["full", "dist.all_reduce bf16"].wire_bytes == 16384
    assert found["full", "dist.all_reduce fp32"].wire_bytes == 2 * 16384
    assert found["full", "shardsum gather"].wire_bytes == 16384
    assert found["uneven", "shardsum gather"].wire_bytes == round(0.7 * size) * 128
    assert (
        found["documents", "shardsum all_to_all"].wire_bytes < found["documents", "dist.reduce_scatter bf16"].bytes / 2
    )


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sample", "3"], "--sample"),
        (["--samples", "0"], "samples"),
        (["--baselines", "[numpy]"], "numpy"),
        (["--transports", "[pigeon]"], "pigeon"),
        (["--device", "tpu"], "tpu"),
        (["--only", "no such case"], "no such case"),
        (["--plot", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and named in lines[0]


def test_torchrun_leaves_all_options_alone() -> None:
    from shardsum.tools.bench.run import make_parser

    options = [o for action in make_parser()._actions for o in action.option_strings if o.startswith("--")]
    assert len(options) > 8
    for option in options:
        arguments = ["bench", option, "x"]
        parsed = get_args_parser().parse_args(["--nproc-per-node=2", "-m", "shardsum", *arguments])
        assert parsed.training_script_args == arguments


# -- pictures ---------------------------------------------------------------------------------------------------------


def made_up(variant: str, fill: float, size: int) -> rows.Row:
    return rows.Row(
        case=f"ragged_sum random {fill} bf16 R=4 {size}x1", operation="ragged_sum", profile="random", dtype="bf16",
        fill=fill, num_virtual_ranks=4, size=size, width=1, processes=1, variant=variant, bytes=size * 2, us=1.0 * size,
        us_20=1.0, us_80=2.0, us_least=1.0, gbps=2.0 * fill, percent=50.0, wire_bytes=None, baseline=None, speedup=None,
        host_us=None, wrong=0, cold=True,
    )  # fmt: skip


def test_pictures_are_drawn_where_there_is_something_to_show(tmp_path: Path) -> None:
    facts = {"device": "cuda", "gpu": "G", "torch": "t", "date": "d"}
    file = tmp_path / "x.json"
    some = [made_up(v, f, 100) for v in ("shardsum", "copy") for f in (0.1, 0.5)]
    assert [p.name for p in plots.save(file, facts, some)] == ["x_fill.png", "x_roofline.png"]
    some += [made_up("shardsum", 0.5, 1000)]
    assert [p.name for p in plots.save(file, facts, some)] == ["x_fill.png", "x_time.png", "x_roofline.png"]
    assert plots.save(file, facts, []) == []


@pytest.mark.parametrize("file", sorted(RESULTS.glob("bench_*.json")), ids=lambda p: p.name)
def test_kept_results_are_complete_and_right(file: Path) -> None:
    facts, measured = rows.load(file)
    assert facts["date"] and facts["command"] and facts["torch"] and "/" not in facts["command"].split("--json")[0]
    ours = [row for row in measured if row.variant.startswith("shardsum")]
    assert ours and not any(row.wrong for row in ours)


def test_the_documentation_shows_what_was_kept() -> None:
    text = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text()
    table = text.split("## Local sums, two CPU cores")[1].split("\n\nWhat was tried")[0].splitlines()
    shown = [line.split("|")[2:5] for line in table if line.startswith("| ") and not line.startswith("| lengths")]
    kept = rows.load(RESULTS / "bench_cpu.json")[1]
    known = {(row.dtype, f"{row.us:.0f}", f"{row.speedup:.2f}") for row in kept if row.speedup is not None}
    assert len(shown) == 5 and {tuple(cell.strip() for cell in cells) for cells in shown} <= known
