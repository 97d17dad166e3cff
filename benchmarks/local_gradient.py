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
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from common import Meter, parser, report_of, start
from torch import Tensor

from shardsum import MaskedSum, ragged_sum
from shardsum.core import bits


@dataclass
class Row:
    """Microseconds of a call with its backward."""

    shape: str
    ragged_sum: float
    MaskedSum: float
    eager: float
    compile: float


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


def run(args: argparse.Namespace, device: torch.device) -> None:
    report = report_of(args)
    for shape, (num_ranks, size, width) in SHAPES.items():
        if device.type == "cpu" and shape == "1 GiB":
            continue
        calls, samples = (50, args.samples) if shape == "small" else (5, args.samples // 3)
        times = Meter(device, samples).times(ways(num_ranks, size, width, device.type), calls)
        row = Row(shape, **{name: round(timing.median * 1e6, 1) for name, timing in times.items()})
        report.add([row], "  ".join(f"{name} {value}" for name, value in asdict(row).items()))


if __name__ == "__main__":
    start(parser(__doc__, samples=30).parse_args(), run)
