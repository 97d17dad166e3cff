"""Does even work give even time? Attention of every process's chunks, one process after the other, on one device.

    python benchmarks/context_balance.py --device cuda

Documents of log-normal lengths (mean 1024, sigma 1.2), 16 a process; 32 query and 8 key heads of 128, bf16. Equal
chunks, contiguous and zigzag, against ShardGroup.balanced_lengths with a position_cost of 0, and with one for what
kernels do for a query beside its pairs. Predicted: query-key pairs of the busiest process over the mean. Measured:
forward and backward of its chunks, keys and values at hand, the slowest process over the mean of all; medians of
samples taken in turns.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from common import Meter, parser, report_of, start

from shardsum.core.layout import owners_of, split_evenly
from shardsum.tools.bench.rows import markdown, markdown_header
from shardsum.training.context_balance import balanced_lengths
from shardsum.training.context_chunks import Chunk
from shardsum.training.context_kernels import backward, forward
from shardsum.training.context_plan import SequencePlan


@dataclass
class Row:
    """Seconds; ``predicted`` and ``measured`` are the busiest process over the mean."""

    processes: int
    chunks: str
    predicted: float
    measured: float
    slowest: float
    mean: float


def log_normal_borders(documents: int, mean: int, sigma: float = 1.2) -> list[int]:
    draw, borders = random.Random(0), [0]
    for _ in range(documents):
        borders.append(borders[-1] + max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
    return borders


def work(chunks: list[Chunk], heads: int, key_heads: int, dim: int, device: torch.device) -> None:
    """One layer's attention of one process, forward and backward, on values of no meaning."""
    for chunk in chunks:
        q, out = (torch.zeros(chunk.rows, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.zeros(chunk.keys, key_heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        found, lse = forward(q, k, v, chunk, None)
        backward(out, q, k, v, found, lse, chunk, None)


def measure(args: argparse.Namespace, meter: Meter, processes: int) -> list[Row]:
    borders = log_normal_borders(16 * processes, args.mean)
    contiguous, zigzag = owners_of(processes, processes, "contiguous"), owners_of(2 * processes, processes, "zigzag")
    ways = {
        "equal, contiguous": (contiguous, split_evenly(borders[-1], processes)),
        "equal, zigzag": (zigzag, split_evenly(borders[-1], 2 * processes)),
    }
    for cost in (0, 256):
        ways[f"balanced, {cost} a position"] = contiguous, balanced_lengths(contiguous, borders, position_cost=cost)
    calls, totals = {}, {}
    for name, (owners, lengths) in ways.items():
        for process in range(processes):
            plan = SequencePlan(owners, process, meter.device, lengths, borders, True, None, None)
            shape = args.heads, args.key_heads, args.head_dim, meter.device
            calls[name, process] = partial(work, plan.chunks, *shape)
            totals[name] = plan.work
    for call in calls.values():
        call()
    times = meter.times(calls)
    rows = []
    for name, pairs in totals.items():
        seconds = [times[name, process].median for process in range(processes)]
        ratios = [max(x) / fmean(x) for x in (pairs, seconds)]
        rows.append(Row(processes, name, *ratios, max(seconds), fmean(seconds)))
    return rows


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__, samples=7, heads=32, key_heads=8, head_dim=128, mean=1024)
    options.add_argument("--processes", type=int, nargs="+", default=[4, 8])
    return options.parse_args(words)


def run(args: argparse.Namespace, device: torch.device) -> list[Row]:
    report, meter = report_of(args), Meter(device, args.samples)
    report.say(markdown_header("processes", "chunks", "predicted", "measured", "slowest ms", "mean ms"))
    for processes in args.processes:
        for row in measure(args, meter, processes):
            ratios = [f"{x:.2f}" for x in (row.predicted, row.measured)]
            times = [f"{1e3 * t:.3g}" for t in (row.slowest, row.mean)]
            report.add([row], markdown(processes, row.chunks, *ratios, *times))
    return report.rows


if __name__ == "__main__":
    start(arguments(), run)
