"""Ragged collectives against padded ones: bytes on the wire and time, verified before timed, both in one run.

    torchrun --nproc-per-node=4 benchmarks/collectives.py                      # gloo, CPU
    torchrun --nproc-per-node=2 benchmarks/collectives.py --device cuda        # NCCL, a GPU a process

Profiles: mean fills 1.0, 0.75, 0.5, 0.25 (lengths spread evenly around the mean); causal, virtual rank r's gradient
being valid on [0, (r+1) S/R), contiguous (R = G) and zigzag (R = 2G); packed documents of mean length S/16, where a
chunk's gradient reaches back to the start of its oldest document.

Bytes of ours are those of the plan (checked against what the process handed to the backend); bytes of padded
collectives are the ring's: all_reduce 2 (G-1)/G, reduce_scatter and all_gather (G-1)/G of the buffer, every process
alike. Times are medians over repetitions, the slowest process of each, with the 20 % and 80 % quantiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.core.layout import Interval, intervals_of, split_evenly
from shardsum.tools.bench.collective_cases import packed_documents


@dataclass
class Row:
    collective: str
    profile: str
    variant: str
    total_bytes: int
    busiest_bytes: int
    us: float
    us_20: float
    us_80: float
    wrong: int | str


class Bench:
    def __init__(self, device: torch.device, size: int, width: int, repeat: int) -> None:
        self.device, self.size, self.width, self.repeat = device, size, width, repeat
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.rows: list[Row] = []
        self.transports = ["auto", "gather", "all_to_all"]

    def measure(self, fn: Callable[[], object]) -> tuple[float, float, float]:
        """Median, 20 % and 80 % quantile in microseconds of the slowest process."""
        times = []
        for i in range(self.repeat + 3):
            dist.barrier()
            self.sync()
            begin = time.perf_counter()
            fn()
            self.sync()
            took = torch.tensor([time.perf_counter() - begin], device=self.device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 3:
                times.append(took.item() * 1e6)
        times.sort()
        return statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5]

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(
        self, name: str, profile: str, variant: str, bytes_: tuple[int, int], fn: Callable, wrong: int | str
    ) -> None:
        row = Row(name, profile, variant, *bytes_, *self.measure(fn), wrong)
        self.rows.append(row)
        if self.rank == 0:
            print(
                f"{name:15} {profile:20} {variant:22} {row.total_bytes / 1e6:9.2f} {row.busiest_bytes / 1e6:9.2f} "
                f"{row.us:10.0f} {row.us_20:9.0f} {row.us_80:9.0f} {wrong:>6}",
                flush=True,
            )

    def shard(self, r: int, rows: int) -> Tensor:
        g = torch.Generator().manual_seed(r)
        return torch.randn(rows, self.width, generator=g).to(torch.bfloat16).to(self.device)

    def wrong(self, actual: Tensor, expected: Tensor) -> int:
        found = bits.first_difference(actual, expected)
        return 0 if found is None else found.count

    def ring(self, factor: float, dtype: torch.dtype, rows: int) -> tuple[int, int]:
        """(total, each process) bytes of a padded ring collective."""
        each = int(factor * (self.world_size - 1) / self.world_size * rows * self.width * dtype.itemsize)
        return each * self.world_size, each

    # One collective and its padded counterparts

    def ours(
        self, name: str, profile: str, group: ShardGroup, variant: str, call: Callable, expected: list[Tensor]
    ) -> None:
        outs = call()
        outs = outs if isinstance(outs, list) else [outs]
        wrong = sum(self.wrong(a, b) for a, b in zip(outs, expected))
        stats = group.stats()
        if stats.route.transport != "peer":  # whose kernel reads, and hands no bytes to a backend
            assert (stats.sent, stats.received) == (stats.route.egress[self.rank], stats.route.ingress[self.rank])
        label = variant if variant != "auto" else f"auto ({stats.route.transport})"
        self.add(name, profile, f"shardsum {label}", (stats.total, stats.route.busiest), call, wrong)

    def all_reduce(self, profile: str, lengths: list[int]) -> None:
        shards = [self.shard(r, n) for r, n in enumerate(lengths)]
        expected = reference.ragged_sum(shards, [0] * len(lengths), self.size, out_dtype=torch.bfloat16)
        for transport in self.transports:
            group = ShardGroup(len(lengths), transport=transport)
            mine = [shards[v] for v in group.virtual_ranks]
            call = lambda g=group, m=mine: g.all_reduce(m, lengths, size=self.size)  # noqa: E731
            self.ours("all_reduce", profile, group, transport, call, [expected])
        for dtype in (torch.bfloat16, torch.float32):
            padded = torch.zeros(self.size, self.width, dtype=dtype, device=self.device)
            padded[: lengths[self.rank]] = shards[self.rank].to(dtype)
            check = padded.clone()
            dist.all_reduce(check)
            error = (check.double() - sum_exact(shards, self.size)).abs().max().item()
            call = lambda p=padded: dist.all_reduce(p)  # noqa: E731
            self.add(
                "all_reduce", profile, f"padded {short(dtype)}", self.ring(2, dtype, self.size), call, f"{error:.0e}"
            )

    def reduce_scatter(self, profile: str, held: list[Interval], placement: str) -> None:
        """Gradients valid on ``held`` go to the owners of even chunks."""
        chunks = intervals_of(split_evenly(self.size, len(held)))
        shards = [self.shard(r, e - b) for r, (b, e) in enumerate(held)]
        expected = reference.exchange(shards, held, chunks, out_dtype=torch.bfloat16)
        for transport in self.transports:
            group = ShardGroup(len(held), transport=transport, placement=placement)
            mine = [shards[v] for v in group.virtual_ranks]
            call = lambda g=group, m=mine: g.exchange(m, held, chunks, size=self.size)  # noqa: E731
            self.ours("reduce_scatter", profile, group, transport, call, [expected[v] for v in group.virtual_ranks])
        for dtype in (torch.bfloat16, torch.float32):
            padded = torch.zeros(self.size, self.width, dtype=dtype, device=self.device)
            for v in group.virtual_ranks:  # several hosted chunks are summed locally first, as users do
                padded[held[v][0] : held[v][1]] += shards[v].to(dtype)
            out = torch.empty(self.size // self.world_size, self.width, dtype=dtype, device=self.device)
            call = lambda o=out, p=padded: dist.reduce_scatter_tensor(o, p)  # noqa: E731
            self.add("reduce_scatter", profile, f"padded {short(dtype)}", self.ring(1, dtype, self.size), call, "-")

    def all_gather(self, profile: str, lengths: list[int]) -> None:
        shards = [self.shard(r, n) for r, n in enumerate(lengths)]
        expected = torch.cat(shards)
        for transport in self.transports:
            group = ShardGroup(len(lengths), transport=transport)
            mine = [shards[v] for v in group.virtual_ranks]
            call = lambda g=group, m=mine: g.all_gather(m, lengths)  # noqa: E731
            self.ours("all_gather", profile, group, transport, call, [expected])
        out = torch.empty_like(expected)
        views = list(out.split(lengths))

        def grouped_broadcasts() -> None:
            views[self.rank].copy_(shards[self.rank])
            works = [dist.broadcast(v, src, async_op=True) for src, v in enumerate(views) if v.shape[0]]
            for work in works:
                work.wait()

        grouped_broadcasts()
        row = self.width * 2
        bytes_ = (sum(lengths) * (self.world_size - 1) * row, max(lengths) * (self.world_size - 1) * row)
        self.add("all_gather", profile, "grouped broadcasts", bytes_, grouped_broadcasts, self.wrong(out, expected))


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def sum_exact(shards: list[Tensor], size: int) -> Tensor:
    return reference.ragged_sum([s.double() for s in shards], [0] * len(shards), size, out_dtype=torch.float64)


def spread_lengths(fill: float, count: int, size: int) -> list[int]:
    """Lengths spread evenly over [fill - d, fill + d] of the size, as wide as fits."""
    d = min(fill, 1 - fill)
    steps = [2 * r / max(1, count - 1) - 1 for r in range(count)]
    return [round(size * (fill + d * s)) for s in steps]


def print_table(result: dict) -> None:
    """Ours (auto) beside the padded collectives: bytes of the busiest process, and time."""
    print(
        f"{result['hardware']}, {result['backend']}, {result['processes']} processes, torch {result['torch']},", end=" "
    )
    print(f"{result['date']}; S = {result['size']}, width {result['width']}, bf16. MB: total (busiest process).\n")
    print("| collective | profile | shardsum | MB | us | padded bf16 MB | us | padded fp32 MB | us |")
    print("|---|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in result["rows"]:
        groups.setdefault((row["collective"], row["profile"]), {})[row["variant"]] = row
    for (collective, profile), variants in groups.items():
        ours = next(v for name, v in variants.items() if name.startswith("shardsum auto"))
        cells = [collective, profile, ours["variant"].split("(")[1].rstrip(")"), *_cells(ours)]
        if "grouped broadcasts" in variants:
            cells += [*_cells(variants["grouped broadcasts"]), "(grouped broadcasts)", ""]
        else:
            cells += [*_cells(variants["padded bf16"]), *_cells(variants["padded fp32"])]
        print("| " + " | ".join(cells) + " |")


def _cells(row: dict) -> list[str]:
    return [f"{row['total_bytes'] / 1e6:.2f} ({row['busiest_bytes'] / 1e6:.2f})", f"{row['us']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", type=int, help="positions S (default 4096 on the CPU, 16384 on GPUs)")
    parser.add_argument("--width", type=int, help="elements a position (default 256 on the CPU, 2048 on GPUs)")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where rank 0 writes the rows")
    parser.add_argument(
        "--table", type=Path, help="print a JSON file as a table for docs/engineering/collectives.md; measures nothing"
    )
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.table.read_text()))
        return
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    size, width = args.size or (16384 if cuda else 4096), args.width or (2048 if cuda else 256)
    bench, count = Bench(device, size, width, args.repeat), dist.get_world_size()
    if bench.rank == 0:
        print(f"S {size}, width {width}, bf16, {count} processes; MB total, MB busiest, us median 20 % 80 %, #wrong")
    for fill in (1.0, 0.75, 0.5, 0.25):
        lengths = spread_lengths(fill, count, size)
        bench.all_reduce(f"fill {fill}", lengths)
        bench.reduce_scatter(f"fill {fill}", [(0, n) for n in lengths], "contiguous")
        bench.all_gather(f"fill {fill}", lengths)
    for placement, ranks in (("contiguous", count), ("zigzag", 2 * count)):
        held = [(0, (r + 1) * size // ranks) for r in range(ranks)]
        bench.reduce_scatter(f"causal {placement}", held, placement)
    bench.reduce_scatter("documents S/16", packed_documents(count, size, size // 16), "contiguous")
    if bench.rank == 0 and args.json:
        hardware = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
        about = {"date": str(date.today()), "hardware": hardware, "torch": torch.__version__, "processes": count}
        about |= {"backend": dist.get_backend(), "size": size, "width": width, "dtype": "bfloat16"}
        args.json.write_text(json.dumps({**about, "rows": [asdict(r) for r in bench.rows]}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
