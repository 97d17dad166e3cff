"""Runs under a launcher that restarts what fails, killed at random: they end in the hash of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shardsum.tools import launcher
from shardsum.tools.train.interrupt import SIGNALS, interruptible
from tests.tools.runs import children

ROOT = Path(__file__).parents[2]
SMALL = ["--train.sequence_length", "120", "--train.save_every", "3", "--model.width", "32", "--model.layers", "1"]


def command(processes: int, *options: str) -> list[str]:
    run = [f"--nproc-per-node={processes}", "--max-restarts=3", "-m", "shardsum", "train"]
    return [sys.executable, "-m", "torch.distributed.run", *run, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def metrics(folder: Path) -> int:
    """Steps that the run in ``folder``/runs has written."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl"))


@pytest.mark.slow
def test_random_kills_end_in_the_same_hash(text: str, tmp_path: Path) -> None:
    """One kill; three with SHARDSUM_LONG_TESTS, which take two minutes."""
    steps, kills = (60, 3) if os.environ.get("SHARDSUM_LONG_TESTS") else (24, 1)
    options = [*SMALL, "--train.steps", str(steps), "--data", text]
    alone = [sys.executable, "-m", "shardsum", "train", *options, "--folder", str(tmp_path / "alone")]
    whole = subprocess.Popen(alone, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    generator = random.Random(0)
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        run = subprocess.Popen(command(2, *options), cwd=tmp_path, env=environment(), stdout=out, stderr=err)
        for after in sorted(generator.sample(range(4, steps - 10), kills)):
            while metrics(tmp_path) < after and run.poll() is None:
                time.sleep(0.02)
            assert run.poll() is None, (tmp_path / "err").read_text()
            workers = children(run.pid)
            os.kill(generator.choice(workers), signal.SIGKILL)
            while set(workers) & set(children(run.pid)):
                time.sleep(0.02)
        assert run.wait(timeout=180) == 0, (tmp_path / "err").read_text()
    undisturbed, errors = whole.communicate(timeout=120)
    expected = re.findall(r"^hash \w+$", undisturbed, re.MULTILINE)
    assert len(expected) == 1, errors
    printed = (tmp_path / "out").read_text()
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert len(re.findall(r"^context: 4 virtual ranks on 2 processes", printed, re.MULTILINE)) == 1 + kills
    assert re.findall(r"^hash \w+$", printed, re.MULTILINE) == expected


def test_runs_in_another_thread_catch_no_signals() -> None:
    def run() -> bool:
        with interruptible() as interrupt:
            return interrupt.requested

    before = [signal.getsignal(number) for number in SIGNALS]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result() is False
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_end_jobs_save_a_checkpoint_first(text: str, tmp_path: Path, number: signal.Signals) -> None:
    assert number in SIGNALS
    folder = tmp_path / "run"
    options = [*SMALL, "--train.steps", "100000", "--train.save_every", "0", "--data", text, "--folder", str(folder)]
    with open(tmp_path / "out", "w") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "shardsum", "train", *options], env=environment(), stdout=out, stderr=out
        )
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert run.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.02)
        run.send_signal(number)
        assert run.wait(timeout=60) == 130
    assert "interrupted; go on with" in (tmp_path / "out").read_text()
    assert (folder / "checkpoint.safetensors").exists()


# -- the store of an attempt ------------------------------------------------------------------------------------------


def _attempt(store: dist.Store, world_size: int, values: list[dist.Store | None]) -> None:
    def join(rank: int) -> None:
        values[rank] = launcher.attempt_store(store, rank, world_size, 10)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in random.Random(world_size).sample(threads, len(threads)):
        thread.start()
        time.sleep(0.02)  # late ones find the names that the attempt before left
    for thread in threads:
        thread.join()


def test_every_attempt_has_a_store_of_its_own_that_all_its_processes_share() -> None:
    store = dist.HashStore()
    seen = set()
    for attempt in range(4):
        stores: list[dist.Store | None] = [None] * 4
        _attempt(store, 4, stores)
        assert all(s is not None and not s.check(["key"]) for s in stores)
        stores[attempt].set("key", str(attempt))  # type: ignore[union-attr]
        assert {s.get("key") for s in stores} == {str(attempt).encode()}  # type: ignore[union-attr]
        seen.add(stores[0].get("key"))  # type: ignore[union-attr]
    assert len(seen) == 4


def test_a_process_that_does_not_start_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"after 0\.3 s, process 1, 2 of 3 did not start"):
        launcher.attempt_store(store, 0, 3, 0.3)


def test_the_default_folder_of_a_launch_is_that_of_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher.launch_name() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = launcher.launch_name()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launcher.launch_name() == first and str(os.getppid()) in str(first)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launcher.launch_name() == "job 7"
