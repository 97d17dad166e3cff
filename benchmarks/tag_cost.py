"""What it costs that transfers on the CPU carry tags: a whole call of 64 KiB over gloo with them and without.

    torchrun --nproc-per-node=2 benchmarks/tag_cost.py [--rounds 400] [--json FILE]
    torchrun --nproc-per-node=4 benchmarks/tag_cost.py

Both variants are the same plan of two groups. "without" has a wire whose exchanges have no numbers and whose transfers
all carry tag 0, so that gloo pairs them by their order, and that no thread watches. They take turns in one run, in
alternating order. Figures are microseconds a call of the slowest process: medians over the rounds, and the median of
what a round's two differ by. "host" is the processor time of the tags alone, which other programs on the machine
disturb less: of an exchange's number and hash, and of one transfer's tag.
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
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.tools.bench.rows import environment
from shardsum.tools.bench.timing import Processes
from shardsum.tools.launcher import launched
from shardsum.transports import Stamp, TaggedWire

BYTES = 64 << 10
BURST = 5


class UntaggedWire(TaggedWire):
    """Pairs transfers by the order in which they start."""

    def begin(self, stamp: Stamp, call: int) -> None:
        self.close()
        self._tags = 0

    def _next_tag(self) -> int:
        return 0


def untagged(group: ShardGroup) -> ShardGroup:
    """The group, on a wire without tags."""
    planner = group._planner
    limit, name = planner.agreement.timeout, planner.agreement.side.name
    store = dist.PrefixStore(f"untagged/{name}", _get_default_store())
    wire = UntaggedWire(dist.ProcessGroupGloo(store, group.rank, group.world_size, limit), limit)
    planner.executor.wire = planner.agreement._wire = wire
    return group


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


def compare(name: str, groups: dict[str, ShardGroup], processes: Processes, rounds: int) -> dict[str, float]:
    """``name``: all_reduce or reduce_scatter."""
    n = BYTES // 4
    lengths = [n - 37 * r for r in range(groups["with"].num_virtual_ranks)]
    x = torch.randn(lengths[groups["with"].rank])
    plans = {k: g.plan(name, lengths, size=n, dtype=torch.float32) for k, g in groups.items()}
    results: dict[str, Tensor] = {k: plan(x) for k, plan in plans.items()}
    assert bits.equal(results["with"], results["without"])

    def sample(variant: str) -> float:
        plan = plans[variant]
        processes.slowest(0)
        begin = time.perf_counter()
        for _ in range(BURST):
            plan(x)
        return processes.slowest((time.perf_counter() - begin) / BURST) * 1e6

    measured: dict[str, list[float]] = {"with": [], "without": []}
    for i in range(rounds):
        for variant in sorted(measured, reverse=bool(i % 2)):
            measured[variant].append(sample(variant))
    apart = [a - b for a, b in zip(measured["with"], measured["without"])]
    found = {k: statistics.median(v) for k, v in measured.items()} | {"difference": statistics.median(apart)}
    found |= {"percent": 100 * found["difference"] / found["without"], "least with": min(measured["with"])}
    return found | {"least without": min(measured["without"])}


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
            groups = {"with": ShardGroup(transport=transport), "without": untagged(ShardGroup(transport=transport))}
            rows[f"{name} by {transport}"] = compare(name, groups, processes, args.rounds)
        begin, tag = host_us(groups["with"].wire)
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
