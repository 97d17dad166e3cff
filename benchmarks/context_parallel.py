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
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from context_cases import packed_borders
from context_main import main
from context_meter import Meter
from context_ways import Layer

from shardsum.core import bits
from shardsum.tools.bench.rows import environment
from shardsum.tools.bench.timing import Timing

SEED = 3  # of the documents
MEANS = (1, 8, 32, 128, 512)  # positions over the mean length
MOST_ERROR = 2e-2  # a few times what bf16 loses here
HOST_LAYERS = 4
HEADER = "| documents | processes | placement | way | ms | of user | host ms | alone | peak MB | difference |"


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
    ms = [1e3 * t for t in (row.step.median, row.step.p20, row.step.p80, row.host, row.host_alone)]
    cells = [row.documents, row.processes, row.placement, row.way, f"{ms[0]:.4g} [{ms[1]:.4g}, {ms[2]:.4g}]"]
    cells += [f"{row.of_user:.3f}", f"{ms[3]:.3g}", f"{ms[4]:.3g}", f"{row.peak / 1e6:.1f}", f"{row.difference:.1e}"]
    return f"| {' | '.join(map(str, cells))} |"


def run(args: argparse.Namespace, device: torch.device) -> list[Row]:
    real = dist.get_world_size() if dist.is_initialized() else 1
    first = real == 1 or dist.get_rank() == 0
    say = partial(print, flush=True) if first else lambda *_: None
    facts = environment([sys.executable, *sys.argv])
    say("; ".join(f"{n} {facts[n]}" for n in ("gpu", "cpu", "cores", "torch", "nccl", "date", "command") if n in facts))
    say(f"{args.size} positions, {args.heads} query and {args.key_heads} key heads of {args.head_dim}, bf16")
    say(f"\n{HEADER}\n{'|---' * 10}|")
    meter, rows = Meter(device, args.samples, MOST_ERROR), []
    for processes in [real] if real > 1 else args.processes:
        for part in args.parts:
            borders = packed_borders(args.size, args.size // part, SEED)
            for placement in ("contiguous", "zigzag"):
                layer = Layer(device, borders, processes, placement, args.heads, args.key_heads, args.head_dim)
                found = measure(layer, meter, processes, placement)
                rows += found
                say("\n".join(map(line, found)))
                if first and args.json:  # as far as it has come
                    data = {**facts, "real processes": real, "rows": [asdict(row) for row in rows]}
                    args.json.write_text(json.dumps(data, indent=1) + "\n")
    return rows


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", type=int, default=65536, help="positions")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--parts", type=int, nargs="+", default=MEANS, help="positions over the documents' mean length")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="whose chunks one process runs")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where process 0 writes the rows")
    return parser.parse_args(words)


if __name__ == "__main__":
    main(arguments(), run)
