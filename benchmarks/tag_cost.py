"""What it costs that transfers on the CPU carry tags: a whole call of 64 KiB over gloo with them and without.

    torchrun --nproc-per-node=2 benchmarks/tag_cost.py [--rounds 400] [--json FILE]
    torchrun --nproc-per-node=4 benchmarks/tag_cost.py

Both variants are one plan on one set of connections (two sets differ by more than tags cost). "without": exchanges
have no numbers, and transfers all carry tag 0, so that gloo pairs them by their order. They take turns in one run, in
alternating order. Figures are microseconds a call of the slowest process: medians over the rounds, and the median of
what a round's two differ by. "host" is the processor time of the tags alone, with warm caches: of an exchange's number
and hash, and of one transfer's tag.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.tools.bench.rows import environment
from shardsum.tools.bench.timing import Processes
from shardsum.tools.launcher import launched
from shardsum.transports import Stamp, TaggedWire

BYTES = 64 << 10
BURST = 5


class Switched(TaggedWire):
    """The group's own wire, of which tags can be switched off: then transfers are paired by the order in which they
    start."""

    tagged = True

    def begin(self, stamp: Stamp, call: int) -> None:
        if self.tagged:
            super().begin(stamp, call)
        else:
            self.close()
            self._tags = 0

    def _next_tag(self) -> int:
        return super()._next_tag() if self.tagged else 0


def host_us(wire: Any) -> tuple[float, float]:
    """Microseconds of an exchange's beginning, and of a transfer's tag."""
    stamp, found = Stamp(1234567, "all_reduce"), []
    calls: list[Callable[[], Any]] = [lambda: TaggedWire.begin(wire, stamp, 1), lambda: TaggedWire._next_tag(wire)]
    for call in calls:
        times = []
        for _ in range(51):
            begin = time.process_time()
            for _ in range(2000):
                call()
            times.append((time.process_time() - begin) / 2000 * 1e6)
        found.append(statistics.median(times))
    return found[0], found[1]


def compare(name: str, transport: str, processes: Processes, rounds: int) -> tuple[dict[str, float], Any]:
    """A row, and the wire. ``name``: all_reduce or reduce_scatter."""
    group, n = ShardGroup(transport=transport), BYTES // 4
    wire: Any = group.wire
    wire.__class__ = Switched
    lengths = [n - 37 * r for r in range(group.num_virtual_ranks)]
    x = torch.randn(lengths[group.rank])
    plan: Any = group.plan(name, lengths, size=n, dtype=torch.float32)

    def sample(tagged: bool) -> float:
        wire.tagged = tagged
        processes.slowest(0)
        begin = time.perf_counter()
        for _ in range(BURST):
            plan(x)
        return processes.slowest((time.perf_counter() - begin) / BURST) * 1e6

    results = []
    for wire.tagged in (True, False):
        results.append(plan(x))
    assert bits.equal(*results)
    measured: dict[bool, list[float]] = {True: [], False: []}
    for i in range(rounds):
        for tagged in (bool(i % 2), not i % 2):
            measured[tagged].append(sample(tagged))
    apart = statistics.median(a - b for a, b in zip(measured[True], measured[False]))
    with_tags, without = (statistics.median(measured[tagged]) for tagged in (True, False))
    least = {f"least {text}": min(measured[tagged]) for text, tagged in (("with", True), ("without", False))}
    return {"with": with_tags, "without": without, "difference": apart, "percent": 100 * apart / without, **least}, wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with launched("cpu", 120):
        processes = Processes(dist.new_group(backend="gloo"))
        rows = {}
        for transport, name in (
            ("gather", "all_reduce"),
            ("all_to_all", "all_reduce"),
            ("all_to_all", "reduce_scatter"),
        ):
            rows[f"{name} by {transport}"], wire = compare(name, transport, processes, args.rounds)
        begin, tag = host_us(wire)
        rows["host"] = {"exchange": begin, "transfer": tag}
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
