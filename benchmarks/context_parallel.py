"""One layer of context-parallel attention over packed documents: shardsum against what users write, in one run.

    python benchmarks/context_parallel.py --device cuda                          # one GPU: 2 and 4 processes' chunks
    torchrun --nproc-per-node=2 benchmarks/context_parallel.py --device cuda     # NCCL, a GPU a process
    python benchmarks/context_parallel.py --size 2048 --heads 4 --key-heads 2    # CPU

65,536 positions, 32 query and 8 key heads of 128, bf16, causal, forward and backward of one layer, with 1, 11, 32, 108
and 524 documents (exponentially distributed lengths of mean 65536, 8192, 2048, 512, 128). The ways are those of
context_ways.py. Contiguous chunks are one a process, zigzag ones two. In one process all chunks are here: times are the
sum over the processes, and nothing travels; what is compared is all but the links.

Verified before timed: shardsum's two forms have the same bits, and repeat them under deterministic algorithms; the
others are within rounding of them. Times: medians [20 %, 80 %] of the slowest process, ways in turns, up to five layers
a sample on a GPU. Host: until the calls of four layers return, as of a model (all forward, then one backward), by
layer; GPU idle before. Alone: until those of one layer return; waking the host's threads after a long wait is a good
part of that. Peak: what torch allocates during the layer, results included.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import Meter, ms, parser, report_of, start
from context_ways import Layer

from shardsum.core import bits
from shardsum.tools.bench.cases import packed_borders
from shardsum.tools.bench.rows import markdown, markdown_header
from shardsum.tools.bench.timing import Timing

SEED = 3  # of the documents
MEANS = (1, 8, 32, 128, 512)  # positions over the mean length
MOST_ERROR = 2e-2  # a few times what bf16 loses here
HOST_LAYERS = 4
COLUMNS = ["documents", "processes", "placement", "way", "ms", "of user", "host ms", "alone", "peak MB", "difference"]


@dataclass
class Row:
    """One way in one case. Seconds and bytes; ``difference`` is relative to the user's way, outputs and gradients."""

    documents: int
    processes: int
    placement: str
    way: str
    step: Timing
    of_user: float
    host: float
    host_alone: float
    peak: int
    difference: float


def verify(layer: Layer, meter: Meter) -> dict[str, float]:
    """The relative difference of every way from the user's."""
    torch.use_deterministic_algorithms(True)
    ways = layer.ways()
    found = {name: step() for name, step in ways.items()}
    again = ways["shardsum"]()
    torch.use_deterministic_algorithms(False)
    for a, b, c in zip(found["shardsum"], found["one call"], again):
        assert bits.equal(a, b), f"one call: {bits.first_difference(a, b)}"
        assert bits.equal(a, c), f"again: {bits.first_difference(a, c)}"
    return {name: meter.error(results, found["user"]) for name, results in found.items()}


def measure(layer: Layer, meter: Meter, processes: int, placement: str) -> list[Row]:
    differences = verify(layer, meter)
    ways, model = layer.ways(), layer.ways(HOST_LAYERS)
    times = meter.times(ways)
    hosts = {name: (meter.host(model[name]) / HOST_LAYERS, meter.host(step)) for name, step in ways.items()}
    peaks = {name: meter.peak(step) for name, step in ways.items()}
    user, documents = times["user"].median, len(layer.borders) - 1
    return [
        Row(documents, processes, placement, name, t, t.median / user, *hosts[name], peaks[name], differences[name])
        for name, t in times.items()
    ]


def line(row: Row) -> str:
    host = [f"{1e3 * t:.3g}" for t in (row.host, row.host_alone)]
    cells = [f"{row.of_user:.3f}", *host, f"{row.peak / 1e6:.1f}", f"{row.difference:.1e}"]
    return markdown(row.documents, row.processes, row.placement, row.way, ms(row.step), *cells)


def run(args: argparse.Namespace, device: torch.device) -> list[Row]:
    real = dist.get_world_size() if dist.is_initialized() else 1
    report, meter = report_of(args, **{"real processes": real}), Meter(device, args.samples, MOST_ERROR)
    report.say(f"{args.size} positions, {args.heads} query and {args.key_heads} key heads of {args.head_dim}, bf16")
    report.say(markdown_header(*COLUMNS))
    for processes in [real] if real > 1 else args.processes:
        for part in args.parts:
            borders = packed_borders(args.size, args.size // part, SEED)
            for placement in ("contiguous", "zigzag"):
                layer = Layer(device, borders, processes, placement, args.heads, args.key_heads, args.head_dim)
                found = measure(layer, meter, processes, placement)
                report.add(found, *map(line, found))
    return report.rows


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__, samples=5, size=65536, heads=32, key_heads=8, head_dim=128)
    parts = "positions over the documents' mean length"
    options.add_argument("--parts", type=int, nargs="+", default=MEANS, help=parts)
    options.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="whose chunks one process runs")
    return options.parse_args(words)


if __name__ == "__main__":
    start(arguments(), run)
