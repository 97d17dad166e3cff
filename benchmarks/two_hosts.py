"""Bytes over the link between two hosts and time of each call, flat and carried, beside gloo's own ring.

    RATE=1gbit benchmarks/two_hosts.sh benchmarks/two_hosts.py --json benchmarks/results/two_hosts_1gbit.json
    torchrun --nproc-per-node=2 benchmarks/two_hosts.py --device cuda --size 4096 65536

Run on two emulated hosts (benchmarks/two_hosts.sh), or on whatever hosts the launcher started it. With --device cuda
the GPUs of one host are declared hosts, --members of them each, and NCCL's ring takes the place of gloo's. Bits are
compared with the definition before anything is timed. The ways of a case are called in turns, so that all meet the same
machine; times are medians over the slowest process of each call, on GPUs until they have done it. "graph" is the time
of a call among many in one CUDA graph, which is what is predicted on GPUs, and "host" what the host takes to enqueue an
eager call among many. Bytes are what the kernel counted on the link's device, both ways, with all
headers; on GPUs what was handed to NCCL, without. The constants of the cost model are measured first, so the predicted
times are those of this link (--costs: from a file). "auto" is marked: it is one of the others, on GPUs what would be
taken without peer memory between the hosts. At the end comes how far predictions are off.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Meter, parser, report_of, start

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.core.layout import intervals_of, split_evenly
from shardsum.group.routes import best_of
from shardsum.tools.bench.calibrate import calibrate
from shardsum.tools.bench.cases import held_by
from shardsum.tools.bench.timing import host_seconds, sampler, turns
from shardsum.transports import costs
from shardsum.transports.domains import host

COUNTERS = ("rx_bytes", "tx_bytes")


def link_bytes() -> int:
    """Bytes that have crossed this host's end of the link, both ways; 0 where no link is named."""
    device = os.environ.get("LINK")
    if device is None:
        return 0
    return sum(int(Path(f"/sys/class/net/{device}/statistics/{name}").read_text()) for name in COUNTERS)


def measure(ways: Mapping[str, Callable[[], object]], meter: Meter) -> dict[str, dict[str, Any]]:
    """Of each way, called in turns: milliseconds of the slowest process, and megabytes over the link a call."""
    samplers, moved = {name: meter.sampler(fn) for name, fn in ways.items()}, {name: [] for name in ways}

    def sample(name: str) -> float:
        before = link_bytes()  # before anybody can begin
        seconds = samplers[name]()
        moved[name].append((link_bytes() - before) / 1e6)
        return seconds

    timings = turns({name: partial(sample, name) for name in ways}, meter.samples)
    return {
        name: {
            "ms": round(t.median * 1e3, 3), "ms_20": round(t.p20 * 1e3, 3), "ms_80": round(t.p80 * 1e3, 3),
            "link_mb": round(statistics.median(moved[name]), 3),
        }
        for name, t in timings.items()
    }  # fmt: skip


def in_graphs(
    ways: Mapping[str, Callable[[], object]], meter: Meter, check: Callable[[str, object], None]
) -> dict[str, float]:
    """Milliseconds of each way in a CUDA graph; ``check`` gets its name and what a replay gave."""
    ready = {name: sampler(fn, device="cuda", processes=meter.processes) for name, fn in ways.items()}
    for name, sample in ready.items():
        sample()
        check(name, sample.output)
    return {name: round(timing.median * 1e3, 4) for name, timing in turns(ready, meter.samples).items()}


def predicted_of(row: dict) -> float:
    """The milliseconds that a prediction is about."""
    return row.get("graph_ms", row["ms"])


def hosts(device: str, members: int) -> list[str]:
    """The host of every process: the emulated one, as namespaces of one machine look alike otherwise."""
    if device == "cuda":
        return [f"host {p // members}" for p in range(dist.get_world_size())]
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, os.environ.get("TWO_HOSTS", host()))
    return found


def compare(name: str, got: object, wanted: list[torch.Tensor]) -> None:
    """AssertionError unless the results of this process have the bits that are wanted."""
    results = got if isinstance(got, list) else [got]
    assert len(results) == len(wanted), name
    for a, b in zip(results, wanted):
        assert bits.equal(a, b), f"{name}: {bits.first_difference(a, b)}"


class Bench:
    """The cases on one set of processes."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.meter = args, args.device, Meter(device, args.samples)
        self.domains = hosts(args.device, args.members)
        if args.costs:
            constants = costs.load(args.costs)[args.device]
        else:
            constants = calibrate(ShardGroup(domains=self.domains, device=self.device))
        self.table = {args.device: constants}
        facts = {name: getattr(args, name) for name in ("size", "width", "members")}
        processes, rate = dist.get_world_size(), os.environ.get("RATE")
        self.report = report_of(args, **facts, rate=rate, processes=processes, dtype="bfloat16", costs=vars(constants))
        self.report.say(str(constants))

    def case(self, name: str, profile: str, ranks: int, size: int) -> None:
        """Verify and time one collective."""
        args, held = self.args, held_by(profile, ranks, size)
        lengths = [end for _, end in held]
        shards = [
            torch.randn(n, args.width, generator=torch.Generator(self.device).manual_seed(r), device=self.device).to(
                torch.bfloat16
            )
            for r, n in enumerate(lengths)
        ]
        sinks = [(0, size)] if name == "all_reduce" else intervals_of(split_evenly(size, ranks))
        want = reference.exchange(shards, held, sinks, out_dtype=torch.bfloat16)
        transports = ("gather", "all_to_all", "carry") if self.device == "cuda" else ("all_to_all", "carry")
        setting = {"costs": self.table, "domains": self.domains, "device": self.device}
        groups = {t: ShardGroup(ranks, transport=t, **setting) for t in transports}
        hosted = groups["carry"].virtual_ranks
        mine = [shards[v] for v in hosted]
        wanted = want if name == "all_reduce" else [want[v] for v in hosted]
        del shards, want
        ways: dict[str, Callable[[], object]] = {}
        if name == "all_reduce" and profile == "full":
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.zeros(size, args.width, dtype=dtype, device=self.device)
                ways[f"{dist.get_backend()} ring {str(dtype)[6:]}"] = partial(dist.all_reduce, x)
        handed = {}
        label = f"{name} {profile} R={ranks}"
        for transport, group in groups.items():
            ways[transport] = partial(getattr(group, name), mine, lengths, size=size)
            compare(f"{label} {transport}", ways[transport](), wanted)
            sent = torch.tensor([group.stats().sent])
            dist.all_reduce(sent, group=self.meter.processes.group)
            handed[transport] = round(sent.item() / 1e6, 3)
        found = measure(ways, self.meter)
        routes = {t: group.stats().route for t, group in groups.items()}
        if self.device == "cuda":
            auto = best_of(routes).transport
            for way, ms in self.graphs(label, ways, groups, wanted).items():
                busy = host_seconds([ways[way]], self.meter.processes, ms / 1e3)
                found[way] |= {"graph_ms": ms, "host_ms": round(busy * 1e3, 4)}
        else:
            auto = ShardGroup(ranks, **setting).explain(
                lengths, size=size, collective=name, row_shape=(args.width,), dtype=torch.bfloat16
            ).route.transport  # fmt: skip
        for way, row in found.items():
            case = {"collective": name, "profile": profile, "ranks": ranks, "size": size, "variant": way, **row}
            if way in groups:
                route = routes[way]
                case |= {
                    "predicted_ms": round(route.microseconds / 1e3, 3), "chunks": route.chunks,
                    "predicted_mb": round(route.load.between / 1e6, 3), "auto": auto == way,
                }  # fmt: skip
                if self.device == "cuda":
                    case["link_mb"] = handed[way]
            self.add(case)
        for group in groups.values():
            group.close()

    def graphs(self, label: str, ways: dict, groups: dict, wanted: list[torch.Tensor]) -> dict[str, float]:
        def check(way: str, got: object) -> None:
            if way in groups:
                compare(f"{label} {way} in a graph", got, wanted)

        return in_graphs(ways, self.meter, check)

    def add(self, row: dict) -> None:
        graph = ""
        if "graph_ms" in row:
            graph = f", in a graph {row['graph_ms']:8.3f}, host {row['host_ms']:6.3f}"
        predicted = ""
        if "predicted_ms" in row:
            off = 100 * (row["predicted_ms"] / predicted_of(row) - 1)
            predicted = f", predicted {row['predicted_ms']:.3f} ({off:+.0f} %){', auto' * row['auto']}"
        case = f"{row['collective']:15} {row['profile']:7} R={row['ranks']:<3} {row['size']:6} {row['variant']:20}"
        measured = f"{row['link_mb']:8.2f} MB {row['ms']:9.3f} ms [{row['ms_20']:.3f}, {row['ms_80']:.3f}]"
        self.report.add([row], f"{case} {measured}{graph}{predicted}")

    def summary(self) -> dict[str, float]:
        """Of each way: how far the predictions are off at most, and how much slower what "auto" takes is than the best
        way; both as a part of the measured time."""
        predicted = [row for row in self.report.rows if "predicted_ms" in row]
        off = {way: 0.0 for way in dict.fromkeys(row["variant"] for row in predicted)}
        best: dict[tuple, float] = {}
        for row in predicted:
            took = predicted_of(row)
            off[row["variant"]] = max(off[row["variant"]], abs(row["predicted_ms"] / took - 1))
            case = row["collective"], row["profile"], row["ranks"], row["size"]
            best[case] = min(best.get(case, took), took)
        behind = [
            predicted_of(row) / best[row["collective"], row["profile"], row["ranks"], row["size"]] - 1
            for row in predicted if row["auto"]
        ]  # fmt: skip
        return {way: round(value, 3) for way, value in off.items()} | {"auto is behind": round(max(behind), 3)}


def run(args: argparse.Namespace, device: torch.device) -> None:
    bench = Bench(args, device)
    for size in args.size:
        for name in ("all_reduce", "reduce_scatter"):
            for profile in args.profiles:
                for ranks in args.ranks:
                    bench.case(name, profile, ranks, size)
    bench.report.facts["off"] = bench.summary()
    bench.report.say(f"off at most, of the measured time: {bench.report.facts['off']}")
    bench.report.save()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__, samples=9)
    options.add_argument("--members", type=int, default=1, help="GPUs that are declared one host")
    options.add_argument("--size", type=int, nargs="+", default=[4096], help="positions")
    options.add_argument("--width", type=int, default=512, help="elements of a position")
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    options.add_argument("--profiles", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    options.add_argument("--costs", help="cost file; default: measured first")
    return options.parse_args(words)


if __name__ == "__main__":
    start(arguments(), run)
