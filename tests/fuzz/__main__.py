"""``python -m tests.fuzz --seed 0 --local 100000 --processes 2000``: random calls, from the seed on; ends at the first
that is wrong, with the command that repeats it alone."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.processes import run_processes

from . import collectives, local

CALLS = 50  # of a program, that is of one launch of processes


def main(arguments: list[str] | None = None) -> int:
    """0 if all calls were right, 1 at the first that was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first local call and of the first program")
    parser.add_argument("--local", type=int, default=1000, help="local sums, a seed each")
    parser.add_argument("--processes", type=int, default=200, help=f"calls of two to four processes, {CALLS} a seed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before processes are forked
    started = time.monotonic()
    for seed in range(options.seed, options.seed + options.local):
        try:
            wrong = local.run(seed)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            return _failed(seed, f"--local 1 --processes 0: {wrong}")
    programs = -(-options.processes // CALLS)
    for seed in range(options.seed, options.seed + programs):
        try:
            run_processes(collectives.program, 2 + seed % 3, seed, CALLS)
        except AssertionError as error:
            return _failed(seed, f"--local 0 --processes {CALLS}: {error}")
    seconds = time.monotonic() - started
    print(f"{options.local} local calls and {programs * CALLS} of processes are right, {seconds:.0f} s")
    return 0


def _failed(seed: int, text: str) -> int:
    print(f"python -m tests.fuzz --seed {seed} {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
