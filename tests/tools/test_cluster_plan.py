"""``shardsum plan``: predictions for clusters, from the same router that a group uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardsum import ShardGroup
from shardsum.tools import cli
from shardsum.tools.plan import PlanConfig, held, predict
from shardsum.transports.costs import Costs, save
from tests.processes import run_processes


def explained(rank: int, world: int, costs: str) -> list[tuple]:
    group = ShardGroup(8, domains=[0, 0, 1, 1], costs=costs)
    routes = [
        group.explain(
            [64 * (r + 1) for r in range(8)], size=512, row_shape=(32,), dtype=torch.bfloat16, collective=name
        )
        for name in ("all_reduce", "reduce_scatter")
    ]
    return [(e.route.transport, e.route.microseconds, e.route.load.between_out) for e in routes]


def test_it_predicts_what_a_group_explains(tmp_path: Path) -> None:
    file = str(tmp_path / "costs.json")  # without a limit of CPUs, which the two domains of one machine would share
    save({"cpu": Costs(1200.0, 0.6, 10.0, 1200.0, 1.1, 1.1)}, file)
    config = PlanConfig(
        hosts=2,
        gpus=2,
        ranks=8,
        size=512,
        row=32,
        lengths="causal",
        device="cpu",
        step={"all_reduce": 1, "reduce_scatter": 1},
        costs=file,
    )
    planned = [(p.route.transport, p.route.microseconds, p.route.load.between_out) for p in predict(config)]
    for found in run_processes(explained, 4, file):
        assert found == planned


def test_carried_bytes_grow_with_the_hosts_and_not_with_the_ranks() -> None:
    step = {"all_reduce": 1}
    for hosts in (2, 4, 8):
        for ranks in (hosts * 8, hosts * 32):
            (p,) = predict(PlanConfig(hosts=hosts, gpus=4, ranks=ranks, size=1 << 16, row=4096, step=step))
            carried = p.route.load if p.route.transport == "carry" else None
            assert carried is not None and carried.between == (hosts - 1) * (1 << 28) * (4 + 2)


def test_lengths_of_every_form(tmp_path: Path) -> None:
    assert held("full", 2, 5) == [(0, 5), (0, 5)]
    assert held("causal", 4, 10) == [(0, 2), (0, 5), (0, 7), (0, 10)]
    documents = held("documents:3", 4, 40)
    assert [end for _, end in documents] == [10, 20, 30, 40] and all(b <= e - 10 for b, e in documents)
    (tmp_path / "a.json").write_text("[3, 0, 2]")
    (tmp_path / "b").write_text("3\n0\n2\n")
    for name in ("a.json", "b"):
        assert held(str(tmp_path / name), 3, 5) == [(0, 3), (0, 0), (0, 2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "nowhere"], "'nowhere' is no form of lengths and no file"),
        (["--lengths", "documents:no"], "expected a mean length"),
        (["--ranks", "3"], "ranks: 3 is less than the 4 processes"),
        (["--hosts", "0"], "hosts: expected at least 1"),
        (["--step", '{"broadcast": 1}'], "step: 'broadcast'"),
        (["--plot", "x.png"], "add --grow"),
    ],
)
def test_bad_options_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--hosts", "2", "--gpus", "2", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = [
        "--hosts",
        "4",
        "--gpus",
        "2",
        "--ranks",
        "16",
        "--size",
        "1024",
        "--row",
        "64",
        "--lengths",
        "documents:100",
        "--grow",
    ]
    assert cli.main(["plan", *arguments, "--json", str(file), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert (
        "16 virtual ranks on 4 hosts" in printed and "a step on 4 hosts" in printed and "a step on 1 host (" in printed
    )
    data = json.loads(file.read_text())
    assert [row["hosts"] for row in data["rows"][::3]] == [1, 2, 4] and data["setup"]["ranks"] == 16
    assert all(row["us"] == min(row["us_by_transport"].values()) for row in data["rows"])
    assert all(row["bytes_between"] == 0 for row in data["rows"][:3])
    assert picture.read_bytes()[:4] == b"\x89PNG"
