"""Where the host's time of one context-parallel attention layer goes, for one document and for 108.

    torchrun --nproc-per-node=2 benchmarks/context_host.py --device cuda
    python benchmarks/context_host.py --size 512 --heads 2 --key-heads 1 --head-dim 8      # CPU: operators only

The layers are those of context_parallel.py. For each: milliseconds until forward and backward return (medians of nine,
the device idle before), the same by layer of four in a row, how often the device's allocator asked the driver for
memory in those runs, and what the profiler counts as the host's own time, by operator and by call of the driver.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from context_cases import packed_borders
from context_main import main
from context_parallel import SEED
from context_ways import Layer
from torch.profiler import ProfilerActivity, profile

LAYERS = 4


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(device: torch.device, *parts: Callable[..., Any]) -> list[float]:
    """Medians of the time until each of the parts returns; each gets the result of the one before it."""
    found = []
    for _ in range(9):
        result, times = None, []
        sync(device)
        for part in parts:
            begin = time.perf_counter()
            result = part(result)
            times.append(time.perf_counter() - begin)
        found.append(times)
    sync(device)
    return [median(column) for column in zip(*found)]


def driver_allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0


def describe(layer: Layer, device: torch.device) -> list[str]:
    (qs, ks, vs), gs = ([[x.detach().requires_grad_() for x in xs] for xs in layer.inputs], layer.gs)
    step, model = layer.ways()["shardsum"], layer.ways(LAYERS)["shardsum"]
    for _ in range(3):
        step(), model()
    before = driver_allocations(device)
    forward, backward = seconds(
        device,
        lambda _: layer.cp.attention(qs, ks, vs),
        lambda outs: torch.autograd.grad(outs, [*qs, *ks, *vs], gs),
    )
    (row,) = seconds(device, lambda _: model())
    asked = driver_allocations(device) - before
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as run:
        step()
        sync(device)
    sent_again = "K and V sent again" if layer.cp.recompute_exchange else "K and V kept"
    said = f"forward {1e3 * forward:.3f} ms, backward {1e3 * backward:.3f} ms, in a row {1e3 * row / LAYERS:.3f} ms"
    events = sorted(run.key_averages(), key=lambda e: -e.self_cpu_time_total)
    lines = [f"  {e.self_cpu_time_total:8.0f} us {e.count:4d} x {e.key[:70]}" for e in events[:25]]
    return [f"{said}; {sent_again}; the driver was asked for memory {asked} times", *lines]


def run(args: argparse.Namespace, device: torch.device) -> None:
    processes = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 2
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for part in (1, 128):
        borders = packed_borders(args.size, args.size // part, SEED)
        for placement in ("contiguous", "zigzag"):
            layer = Layer(device, borders, processes, placement, args.heads, args.key_heads, args.head_dim)
            lines = describe(layer, device)
            if first:
                print(f"\n{len(borders) - 1} documents, {placement}:", *lines, sep="\n", flush=True)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name, value in (("size", 65536), ("heads", 32), ("key-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(words)


if __name__ == "__main__":
    main(arguments(), run)
