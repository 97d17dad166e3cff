"""Where the host's time of one context-parallel attention layer goes, for one document and for 108.

    torchrun --nproc-per-node=2 benchmarks/context_host.py --device cuda
    python benchmarks/context_host.py --size 512 --heads 2 --key-heads 1 --head-dim 8      # CPU: operators only

The layers are those of context_parallel.py. For each: milliseconds until forward and backward return (medians of nine,
the device idle before), the same by layer of four in a row, how often the device's allocator asked the driver for
memory in those runs, and what the profiler counts as the host's own time, by operator and by call of the driver.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from common import Meter, parser, start
from context_parallel import SEED
from context_ways import Layer
from torch.profiler import ProfilerActivity, profile

from shardsum.tools.bench.cases import packed_borders

LAYERS = 4


def driver_allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0


def describe(layer: Layer, meter: Meter) -> list[str]:
    device, attend = meter.device, partial(layer.cp.attention, *layer.inputs)
    inputs = [x.requires_grad_() for xs in layer.inputs for x in xs]
    step, model = layer.ways()["shardsum"], layer.ways(LAYERS)["shardsum"]
    for _ in range(3):
        step(), model()
    before = driver_allocations(device)
    forward, outs = meter.host(attend), attend()
    backward = meter.host(partial(torch.autograd.grad, outs, inputs, layer.gs, retain_graph=True))
    row = meter.host(model)
    asked = driver_allocations(device) - before
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as run:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    sent_again = "K and V sent again" if layer.cp.recompute_exchange else "K and V kept"
    said = f"forward {1e3 * forward:.3f} ms, backward {1e3 * backward:.3f} ms, in a row {1e3 * row / LAYERS:.3f} ms"
    events = sorted(run.key_averages(), key=lambda e: -e.self_cpu_time_total)
    lines = [f"  {e.self_cpu_time_total:8.0f} us {e.count:4d} x {e.key[:70]}" for e in events[:25]]
    return [f"{said}; {sent_again}; the driver was asked for memory {asked} times", *lines]


def run(args: argparse.Namespace, device: torch.device) -> None:
    meter, processes = Meter(device, args.samples), dist.get_world_size() if dist.is_initialized() else 2
    for part in (1, 128):
        borders = packed_borders(args.size, args.size // part, SEED)
        for placement in ("contiguous", "zigzag"):
            layer = Layer(device, borders, processes, placement, args.heads, args.key_heads, args.head_dim)
            lines = describe(layer, meter)
            if meter.processes.first:
                print(f"\n{len(borders) - 1} documents, {placement}:", *lines, sep="\n", flush=True)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    return parser(__doc__, samples=9, size=65536, heads=32, key_heads=8, head_dim=128).parse_args(words)


if __name__ == "__main__":
    start(arguments(), run)
