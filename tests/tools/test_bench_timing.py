"""How shardsum bench times: variants in turns, graphs of whole rounds, and the constants of transport="auto"."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from shardsum.tools.bench import calibrate, timing
from shardsum.transports import costs
from tests.processes import run_processes
from tests.tools.test_bench import bench


def test_calibrate_writes_a_table_that_groups_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibrate._ROW_BYTES, "cpu", 1 << 16)
    file = tmp_path / "costs.json"
    assert bench("--calibrate", str(file)) == 0
    assert costs.load(file)["cpu"].memory_gbps == json.loads(file.read_text())["cpu"]["memory_gbps"] > 0


def calibrated(rank: int, world: int) -> costs.Costs:
    calibrate._ROW_BYTES["cpu"] = calibrate._WIRE_BYTES["cpu"] = 1 << 16
    return calibrate.calibrate(ShardGroup(domains=["a", "a", "b"]), repeat=2)


def test_both_kinds_of_links_are_calibrated() -> None:
    found = run_processes(calibrated, 3)
    assert found[0] == found[1] == found[2]
    values = [found[0].between_latency_us, found[0].between_gbps, found[0].domain_gbps, found[0].wire_gbps]
    assert all(value is not None and value > 0 for value in values)


def calibrated_as_gpus(rank: int, world: int, domains: list[str]) -> costs.Costs:
    calibrate._WIRE_BYTES["cuda"] = 1 << 16
    calibrate.host_seconds = lambda calls, together, seconds: together.slowest(float(rank))
    group = ShardGroup(domains=domains)
    return calibrate._of_gpus(calibrate._Transfers(group, group.wire, 2), 1.0)


@pytest.mark.parametrize("domains", [["a", "a", "b"], ["a", "b", "c"], ["a", "a", "a"]])
def test_the_transfers_that_are_timed_on_gpus(domains: list[str]) -> None:
    """Over gloo, whose processes would wait for each other for ever if they did not all make the same ones."""
    found = run_processes(calibrated_as_gpus, 3, domains)
    assert found[0] == found[1] == found[2] and found[0].enqueue_us == 2e6
    measured = {name for name, value in vars(found[0]).items() if value is not None}
    between = {"between_latency_us", "between_gbps", "domain_gbps"}
    names = {field.name for field in fields(costs.Costs)} - {"host_gbps"}
    assert measured == names - (between if len(set(domains)) == 1 else set())


def test_variants_take_turns() -> None:
    order: list[str] = []
    samplers = {name: lambda name=name: order.append(name) or len(order) for name in ("a", "b")}
    found = timing.turns(samplers, 3)
    assert order == ["a", "b"] * 3
    assert found["a"] == timing.Timing(median=3, least=1, p20=1, p80=5, samples=3)


def test_calls_on_several_buffers_go_round_and_short_ones_are_repeated() -> None:
    calls = {name: 0 for name in "ab"}

    def call(name: str) -> str:
        calls[name] += 1
        return name

    sample = timing.sampler([lambda: call("a"), lambda: call("b")], least_seconds=1e-3)
    before = calls["a"]
    assert sample() > 0 and sample.output in "ab"
    assert abs(calls["a"] - calls["b"]) <= 1 and calls["a"] - before > 10


class _Graph:
    """Records what is called while it captures, and calls nothing when it is replayed."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1
        _Event.now += 1e-3 * 80  # milliseconds


class _Event:
    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = _Event.now

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_graphs_hold_whole_rounds_and_give_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = []

    @contextmanager
    def capture(graph: _Graph, capture_error_mode: str) -> Any:
        capturing.append(graph)
        yield

    def call() -> int:
        made.append(bool(capturing))
        _Event.now += 0.05  # 50 microseconds
        return len(made)

    made: list[bool] = []
    for name, fake in (("CUDAGraph", _Graph), ("graph", capture), ("Event", _Event), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    sample = timing.sampler([call, call], device="cuda", least_seconds=2e-3)
    assert made[:4] == [False] * 4 and made[4:] == [True] * 40
    assert sample() == pytest.approx(80e-6 / 40)
    assert sample.output == 44 and capturing[0].replays == 2
    assert timing.host_seconds([call], timing.Processes(), 1e-3) < 1e-3
