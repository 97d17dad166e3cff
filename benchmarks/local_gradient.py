"""Forward and backward of a local sum, as a training step runs it, against masking by multiplication.

    python benchmarks/local_gradient.py [--device cuda] [--json FILE]

ragged_sum   shardsum.ragged_sum(x, lengths)
MaskedSum    shardsum.MaskedSum.from_lengths(lengths, S)(x)
eager        (x * m).sum(0) with the mask m (R, S, 1) in x's dtype: what one writes without this library
compile      torch.compile of it

x is (R, S, F) with lengths that fall from S to S / R. Every gradient is compared with the cotangent copied to the valid
positions first, bit for bit for this library. Microseconds of a call with its backward, median, in turns in one run; on
CUDA until the GPU is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shardsum import MaskedSum, ragged_sum
from shardsum.core import bits
from shardsum.tools.bench.rows import environment

SHAPES = {"small": (4, 8, 16), "8 MiB": (4, 1024, 1024), "1 GiB": (8, 16384, 4096)}  # bf16: 2 bytes


def ways(num_ranks: int, size: int, width: int, device: str) -> dict[str, Callable[[], Tensor]]:
    x = torch.randn(num_ranks, size, width, device=device, dtype=torch.bfloat16).requires_grad_()
    lengths = [size * (num_ranks - r) // num_ranks for r in range(num_ranks)]
    valid = torch.arange(size)[None] < torch.tensor(lengths)[:, None]
    mask = valid[:, :, None].to(device, x.dtype)
    cotangent = torch.randn(size, width, device=device, dtype=x.dtype)
    held, compiled = MaskedSum.from_lengths(lengths, size), torch.compile(lambda x, m: (x * m).sum(0))

    def with_backward(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            x.grad = None
            forward().backward(cotangent)
            assert x.grad is not None
            return x.grad

        return call

    calls = {
        "ragged_sum": with_backward(lambda: ragged_sum(x, lengths)),
        "MaskedSum": with_backward(lambda: held(x)),
        "eager": with_backward(lambda: (x * mask).sum(0)),
        "compile": with_backward(lambda: compiled(x, mask)),
    }
    want = torch.where(valid[:, :, None].to(device), cotangent, torch.zeros((), device=device, dtype=x.dtype))
    for name, call in calls.items():
        got = call()
        same = torch.equal(got, want) if name in ("eager", "compile") else bits.equal(got, want)
        assert same, f"{name}: the gradient is not the cotangent at the valid positions"
    return calls


def microseconds(call: Callable[[], Tensor], calls: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for shape, (num_ranks, size, width) in SHAPES.items():
        if args.device == "cpu" and shape == "1 GiB":
            continue
        calls, samples = (50, 30) if shape == "small" else (5, 10)
        run = ways(num_ranks, size, width, args.device)
        times: dict[str, list[float]] = {name: [] for name in run}
        for _ in range(samples):
            for name, call in run.items():
                times[name].append(microseconds(call, calls, args.device))
        results[shape] = {name: round(statistics.median(values), 1) for name, values in times.items()}
        print(f"{shape:6}", *(f"{name} {value}" for name, value in results[shape].items()), sep="  ")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "microseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
