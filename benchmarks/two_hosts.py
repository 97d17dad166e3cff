"""Bytes over the link between two hosts and time of each call, flat and carried, beside gloo's own ring.

    RATE=1gbit benchmarks/two_hosts.sh benchmarks/two_hosts.py --json benchmarks/results/two_hosts_1gbit.json

Run on two emulated hosts (benchmarks/two_hosts.sh) or, without --hosts, on whatever hosts the launcher started it. Bits
are compared with the definition before anything is timed. Bytes are what the kernel counted on the link's device, both
ways, with all headers. The ways of a case are called in turns, so that all meet the same machine; times are medians
over the slowest process of each call. The constants of the cost model are measured first, so the predicted times are
those of this link (--costs: from a file). "auto" is marked: it is one of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.core.layout import intervals_of, split_evenly
from shardsum.tools.bench.calibrate import calibrate
from shardsum.transports import costs
from shardsum.transports.domains import host

COUNTERS = ("rx_bytes", "tx_bytes")


def link_bytes() -> int:
    """Bytes that have crossed this host's end of the link, both ways; 0 where no link is named."""
    device = os.environ.get("LINK")
    if device is None:
        return 0
    return sum(int(Path(f"/sys/class/net/{device}/statistics/{name}").read_text()) for name in COUNTERS)


def measure(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, dict[str, float]]:
    """Of each way, called in turns: median, fastest and slowest milliseconds of the slowest process, and megabytes over
    the link a call."""
    times, moved = {name: [] for name in ways}, {name: [] for name in ways}
    for i in range(repeat + 2):
        for name, fn in ways.items():
            before = link_bytes()  # before anybody can begin
            dist.barrier()
            begin = time.perf_counter()
            fn()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 2:
                times[name].append(took.item() * 1e3)
                moved[name].append((link_bytes() - before) / 1e6)
    return {
        name: {
            "ms": round(statistics.median(times[name]), 2), "fastest_ms": round(min(times[name]), 2),
            "slowest_ms": round(max(times[name]), 2), "link_mb": round(statistics.median(moved[name]), 3),
        }
        for name in ways
    }  # fmt: skip


def hosts() -> list[str]:
    """The host of every process: the emulated one, as namespaces of one machine look alike otherwise."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, os.environ.get("TWO_HOSTS", host()))
    return found


def lengths_of(profile: str, ranks: int, size: int) -> list[int]:
    return [size * (r + 1) // ranks if profile == "causal" else size for r in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="positions")
    parser.add_argument("--width", type=int, default=512, help="elements of a position")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--costs", help="cost file; default: measured first")
    parser.add_argument("--json", help="where the results go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    domains = hosts()
    constants = costs.load(args.costs)["cpu"] if args.costs else calibrate(ShardGroup(domains=domains))
    table = {"cpu": constants}
    rows: list[dict] = []

    def add(row: dict) -> None:
        rows.append(row)
        if rank == 0:
            print(
                f"{row['collective']:15} {row['profile']:7} R={row['ranks']:<3} {row['variant']:24} "
                f"{row['link_mb']:8.2f} MB {row['ms']:8.1f} ms ({row['fastest_ms']:.1f} to {row['slowest_ms']:.1f})"
                + (f", predicted {row['predicted_ms']:.1f}{', auto' * row['auto']}" if "auto" in row else ""),
                flush=True,
            )

    rings = {
        f"gloo ring {str(d)[6:]}": torch.randn(args.size, args.width).to(d) for d in (torch.bfloat16, torch.float32)
    }
    cases = [("all_reduce", "full"), ("all_reduce", "causal"), ("reduce_scatter", "full"), ("reduce_scatter", "causal")]
    for name, profile in cases:
        for ranks in args.ranks:
            lengths = lengths_of(profile, ranks, args.size)
            shards = [
                torch.randn(n, args.width, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16)
                for r, n in enumerate(lengths)
            ]
            sinks = [(0, args.size)] if name == "all_reduce" else intervals_of(split_evenly(args.size, ranks))
            want = reference.exchange(shards, [(0, n) for n in lengths], sinks, out_dtype=torch.bfloat16)
            groups = {t: ShardGroup(ranks, transport=t, costs=table, domains=domains) for t in ("all_to_all", "carry")}
            mine = [shards[v] for v in groups["carry"].virtual_ranks]
            ways: dict[str, Callable[[], object]] = {}
            if name == "all_reduce" and profile == "full":
                ways |= {ring: partial(dist.all_reduce, x) for ring, x in rings.items()}
            for transport, group in groups.items():
                ways[transport] = partial(getattr(group, name), mine, lengths, size=args.size)
                got = ways[transport]()
                expected = want if name == "all_reduce" else [want[v] for v in group.virtual_ranks]
                for a, b in zip(got if isinstance(got, list) else [got], expected):
                    assert bits.equal(a, b), f"{name} {profile} R={ranks} {transport}: {bits.first_difference(a, b)}"
            auto = ShardGroup(ranks, costs=table, domains=domains).explain(
                lengths, size=args.size, collective=name, row_shape=(args.width,), dtype=torch.bfloat16
            )
            for way, found in measure(ways, args.repeat).items():
                row = {"collective": name, "profile": profile, "ranks": ranks, "variant": way, **found}
                if way in groups:
                    route = groups[way].stats().route
                    row |= {
                        "predicted_ms": round(route.microseconds / 1e3, 2), "chunks": route.chunks,
                        "predicted_mb": round(route.load.between / 1e6, 3), "auto": auto.route.transport == way,
                    }  # fmt: skip
                add(row)
            for group in groups.values():
                group.close()
    if rank == 0 and args.json:
        setup = {
            "command": "RATE={} benchmarks/two_hosts.sh benchmarks/two_hosts.py".format(os.environ.get("RATE", "?")),
            "rate": os.environ.get("RATE"), "processes": dist.get_world_size(), "size": args.size, "width": args.width,
            "dtype": "bfloat16", "torch": torch.__version__, "date": str(date.today()), "repeat": args.repeat,
            "cpu_count": os.cpu_count(), "costs": vars(constants),
        }  # fmt: skip
        Path(args.json).write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
