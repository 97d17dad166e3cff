"""A soak of ``shardsum train``: run after run with random kills, each of which must end in the hash of the first.

    python -m tests.tools.soak --minutes 20 [--seed 0]

A run has 1 to 4 processes and one of both placements. Under torchrun a random process is killed at random moments; a
lone process, or the launcher with all its processes, is killed and started again with --resume auto.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.runs import children, copy_text

ROOT = Path(__file__).parents[2]
STEPS = 120
OPTIONS = (
    f"--train.steps {STEPS} --train.sequence_length 200 --train.save_every 4 --model.dropout 0.1 --resume auto".split()
)


def command(processes: int, placement: str, folder: Path, text: str) -> list[str]:
    train = ["-m", "shardsum", "train", *OPTIONS, "--folder", str(folder), "--data", text]
    train += ["--group.placement", placement]
    if processes == 1:
        return [sys.executable, *train]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--max-restarts=100"]
    launcher += random.choice([[], ["--standalone"]])
    return [sys.executable, *launcher, *train]


def one_run(processes: int, placement: str, folder: Path, text: str, kills: int) -> tuple[str, int]:
    """The hash that a run prints at its end, and how often something was killed on the way."""
    killed = 0
    while True:
        with open(folder.with_suffix(".log"), "a") as log:
            run = subprocess.Popen(
                command(processes, placement, folder, text), stdout=log, stderr=log, start_new_session=True
            )
        while run.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(random.uniform(3, 25) if killed < kills else 600)
                continue
            victims = children(run.pid)
            if processes > 1 and victims and random.random() < 0.7:
                os.kill(random.choice(victims), signal.SIGKILL)
            else:
                os.killpg(run.pid, signal.SIGKILL)
                for victim in victims:
                    with contextlib.suppress(OSError):
                        os.kill(victim, signal.SIGKILL)
            killed += 1
        printed = folder.with_suffix(".log").read_text()
        if "SIGABRT" in printed or "terminate called" in printed:  # a restart would hide it
            raise SystemExit(f"a process aborted by itself:\n{printed[-4000:]}")
        if run.returncode == 0:
            return re.findall(r"^hash (\w+)$", printed, re.MULTILINE)[-1], killed
        if run.returncode != -signal.SIGKILL:
            raise SystemExit(f"a run ended with {run.returncode}:\n{printed[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    end, runs, killed = time.monotonic() + 60 * options.minutes, 0, 0
    work = Path(tempfile.mkdtemp())
    (work / "text").mkdir()
    text = copy_text(work / "text")
    expected, _ = one_run(1, "contiguous", work / "first", text, kills=0)
    while time.monotonic() < end:
        processes, placement = random.randint(1, 4), random.choice(["contiguous", "zigzag"])
        folder = work / f"run-{runs}"
        found, kills = one_run(processes, placement, folder, text, kills=random.randint(1, 4))
        runs, killed = runs + 1, killed + kills
        if found != expected:
            raise SystemExit(
                f"run {runs} on {processes} processes, {placement}: hash {found}, not {expected}; {folder}"
            )
        print(f"run {runs}: {processes} processes, {placement}, {kills} kills, the same hash", flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(work)
    print(f"{runs} runs, {killed} kills, one hash")


if __name__ == "__main__":
    main()
