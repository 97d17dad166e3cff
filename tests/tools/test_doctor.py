"""``shardsum doctor``: its report, its self-test, and which pair of processes it blames."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardsum.tools import cli, doctor, selftest
from tests.processes import run_processes

ROOT = Path(__file__).parents[2]


def captured(arguments: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(arguments)
    return code, out.getvalue()


@pytest.fixture(scope="module", autouse=True)
def only_one_process() -> object:
    """Starting two processes takes ten seconds; one test does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            selftest, "alone", lambda device, timeout: iter([selftest._transport("local", torch.device("cpu"), 9)])
        )
        yield


def test_ends_with_the_path_that_runs_and_lists_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardsum.native import loader as native

    monkeypatch.setenv("MAX_JOBS", "3")
    code, out = captured(["doctor"])
    lines = out.splitlines()
    assert code == 0
    assert any(line.startswith("torch") and torch.__version__ in line for line in lines)
    assert any(line.startswith("  MAX_JOBS=3 ") for line in lines)
    assert any(line.startswith("local") and line.endswith("the same bits") for line in lines)
    expected = "ok: native CPU kernel (" if native.status().backend == "native" else "ok: plain torch"
    assert lines[-1].startswith(expected)


@pytest.mark.parametrize(
    ("backend", "code", "last"), [("torch", 0, "ok: plain torch"), ("fortran", 1, "not ok: SHARDSUM_BACKEND")]
)
def test_says_why_when_a_path_is_forced(backend: str, code: int, last: str) -> None:
    results = run_processes(_doctor, 1, backend)  # a process of its own: which path runs is decided once
    assert results[0][0] == code
    assert results[0][1].splitlines()[-1].startswith(last)


def test_a_gpu_that_was_asked_for_and_is_not_there_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = captured(["doctor", "--device", "cuda"])
    assert code == 1
    assert out.splitlines()[-1] == "not ok: device: cuda, but torch finds no CUDA device"


def _doctor(rank: int, world_size: int, backend: str) -> tuple[int, str]:
    from shardsum.native import loader as native

    native._status = None  # forked from a process that has decided
    os.environ["SHARDSUM_BACKEND"] = backend
    return captured(["doctor"])


@pytest.mark.slow
def test_json_of_a_lone_process_has_the_transports_between_two() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardsum", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"] is True and found["torch"] == torch.__version__, done.stderr
    trials = {trial["name"]: trial["ok"] for trial in found["trials"]}
    ran = ("local", *(f"two processes, {name}" for name in ("gather", "all_to_all", "carry")))
    assert all(trials[name] is True for name in ran), trials
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert "trying every transport that can run here" in done.stderr


# -- between processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_tournament_has_every_pair_once(world_size: int) -> None:
    partners = [list(selftest._partners(rank, world_size)) for rank in range(world_size)]
    for rank, own in enumerate(partners):
        assert sorted(own) == [r for r in range(world_size) if r != rank]
    if world_size % 2 == 0:  # nobody pauses: the same round has the same pairs
        assert all(
            partners[own[turn]][turn] == rank for rank, own in enumerate(partners) for turn in range(world_size - 1)
        )


def _together(rank: int, world_size: int, fault: str) -> tuple[int, str]:
    honest = selftest.pattern
    if fault == "bytes" and rank == 1:
        selftest.pattern = lambda a, b: honest(a, b) ^ (1 if (a, b) == (1, 2) else 0)
    if fault == "bits" and rank == 2:
        selftest.reference = type("Wrong", (), {"ragged_sum": lambda *args, **_: torch.zeros(20, 96)})
    return captured(["doctor", "--timeout", "3"])


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("none", "6 pairs of 4 processes               the same bits"),
        ("bytes", "processes 1 and 2                    FAILED: process 2: 4096 of 4096 bytes came wrong"),
        ("bits", "gather                               FAILED: process 2: other bits, tensor["),
    ],
)
def test_processes_name_the_pair_and_the_process_that_fail(fault: str, line: str) -> None:
    results = run_processes(_together, 4, fault)
    assert {code for code, _ in results} == {0 if fault == "none" else 1}
    assert line in results[0][1], results[0][1]
    assert all(out == "" for _, out in results[1:])
    last = results[0][1].splitlines()[-1]
    assert last.startswith("ok: ") if fault == "none" else last.startswith("not ok: ") and last.endswith(" failed")


def test_pairs_with_a_process_that_never_comes_are_named() -> None:
    found = run_processes(_absent, 3, may_die=(2,))[0]
    assert sorted(found) == [(0, 2), (1, 2)]
    assert all(sentence for sentence in found.values())


def _absent(rank: int, world_size: int) -> dict[tuple[int, int], str]:
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank == 2:
        os._exit(1)
    dist.destroy_process_group = lambda: os._exit(0)  # its destructors may wait for the dead
    return selftest.try_pairs(store, torch.device("cpu"), 3)


def test_every_variable_has_a_sentence() -> None:
    assert all(len(meaning) > 8 for meaning in doctor.ENVIRONMENT.values())
