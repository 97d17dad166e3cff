"""What it costs that transfers on the CPU carry tags: a whole call of 64 KiB over gloo with them and without.

    torchrun --nproc-per-node=2 benchmarks/tag_cost.py [--rounds 400] [--json FILE]
    torchrun --nproc-per-node=4 benchmarks/tag_cost.py

Both variants are one plan on one set of connections (two sets differ by more than tags cost). "without": the wire is
not told that an exchange begins, so its transfers have no number but their order. They take turns in one run, in
alternating order. Figures are microseconds a call of the slowest process: medians over the rounds, and the median of
what a round's two differ by. Rounds come in blocks. A block counts where the processors had little else to do: less
than ``--others`` of their time (Linux); the others are repeated, for a while. "begin" is what the beginning of
an exchange takes inside these calls, where its code and data are in no near cache, with tags less without, on process
0; "host" the processor time of the wire's part of it, repeated with warm caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.tools.bench.rows import environment
from shardsum.tools.bench.timing import Processes
from shardsum.tools.launcher import launched
from shardsum.transports import Stamp

BYTES = 64 << 10
BURST = 5
BLOCK = 25  # rounds
ATTEMPTS = 5  # blocks for each that is to count


def busy_seconds() -> float:
    """Processor time of the whole machine since it started, without idle time; 0 where it is not known."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for disks


def host_us(wire: Any) -> float:
    """Microseconds of an exchange's beginning."""
    stamp, times = Stamp(1234567, "all_reduce"), []
    for _ in range(51):
        begin = time.process_time()
        for _ in range(2000):
            wire.begin(stamp, 1)
        times.append((time.process_time() - begin) / 2000 * 1e6)
    return statistics.median(times)


class Comparison:
    """Calls with tags and without, in turns. ``name``: all_reduce or reduce_scatter."""

    def __init__(self, name: str, transport: str, processes: Processes) -> None:
        self.group, n = ShardGroup(transport=transport), BYTES // 4
        lengths = [n - 37 * r for r in range(self.group.num_virtual_ranks)]
        self._x, self._processes = torch.randn(lengths[self.group.rank]), processes
        self._plan: Any = self.group.plan(name, lengths, size=n, dtype=torch.float32)
        self._plan(self._x)
        self._stamps = {True: self._plan._prepared._stamp, False: None}
        assert bits.equal(*[self._call(tagged) for tagged in (True, False)])

    def _call(self, tagged: bool) -> Any:
        self._plan._prepared._stamp = self._stamps[tagged]
        return self._plan(self._x)

    def _sample(self, tagged: bool) -> float:
        self._call(tagged)
        self._processes.slowest(0)
        begin = time.perf_counter()
        for _ in range(BURST):
            self._plan(self._x)
        return self._processes.slowest((time.perf_counter() - begin) / BURST) * 1e6

    def block(self) -> tuple[list[tuple[float, float]], float]:
        """Pairs (with, without), and the part of the processors' time that other work took."""
        begin, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        pairs = []
        for i in range(BLOCK):
            found = {tagged: self._sample(tagged) for tagged in (bool(i % 2), not i % 2)}
            pairs.append((found[True], found[False]))
        seconds, own = time.perf_counter() - begin, time.process_time() - own
        others = busy_seconds() - busy - self._processes.slowest(own) * dist.get_world_size()
        return pairs, self._processes.slowest(others / seconds / (os.cpu_count() or 1))

    def begin_us(self, calls: int = 2000) -> float:
        """What the beginning of an exchange takes inside a call, with tags less without."""
        executor, found = self.group._planner.executor, []
        begin, spent = executor.begin, list[int]()

        def timed(*args: Any) -> None:
            started = time.perf_counter_ns()
            begin(*args)
            spent.append(time.perf_counter_ns() - started)

        executor.begin = timed  # type: ignore[method-assign]
        for tagged in (True, False):
            for _ in range(calls):
                self._call(tagged)
            found.append(statistics.median(spent) / 1e3)
            spent.clear()
        executor.begin = begin  # type: ignore[method-assign]
        return found[0] - found[1]

    def row(self, rounds: int, most: float) -> dict[str, float]:
        blocks: list[tuple[list[tuple[float, float]], float]] = []
        wanted = -(-rounds // BLOCK)
        for _ in range(ATTEMPTS * wanted):
            blocks.append(self.block())
            if sum(others <= most for _, others in blocks) == wanted:
                break
        quiet = sorted(blocks, key=lambda block: block[1])[:wanted]
        pairs = [pair for block, _ in quiet for pair in block]
        with_tags, without = (statistics.median(side) for side in zip(*pairs))
        apart = statistics.median(a - b for a, b in pairs)
        least = {f"least {text}": min(side) for text, side in zip(("with", "without"), zip(*pairs))}
        return {
            "with": with_tags,
            "without": without,
            "difference": apart,
            "percent": 100 * apart / without,
            **least,
            "begin": self.begin_us(),
            "others percent": 100 * max(others for _, others in quiet),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--others", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with launched("cpu", 120):
        processes = Processes(dist.new_group(backend="gloo"))
        rows: dict[str, dict[str, float]] = {}
        for transport, name in (
            ("gather", "all_reduce"),
            ("all_to_all", "all_reduce"),
            ("all_to_all", "reduce_scatter"),
        ):
            comparison = Comparison(name, transport, processes)
            rows[f"{name} by {transport}"] = comparison.row(args.rounds, args.others)
        rows["host"] = {"exchange": host_us(comparison.group.wire)}
        if dist.get_rank() == 0:
            print(
                f"{dist.get_world_size()} processes, {BYTES >> 10} KiB of fp32, {args.rounds} rounds of {BURST} calls"
            )
            for case, row in rows.items():
                print(f"  {case:28}", ", ".join(f"{k} {v:.2f}" for k, v in row.items()))
            if args.json:
                args.json.write_text(json.dumps({**environment(), "us": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
