"""The GPU kernels against their goals: every row verified bit for bit, then timed beside a copy and torch.compile.

    python benchmarks/gpu_kernel.py [--json FILE] [--only PART] [--samples N]

large    ragged_sum of 100 MB and more, R in {2, 4, 8, 16, 64}, bf16 and fp32, full, random, causal and skewed lengths.
         Goals: 95 % of the rate of a copy that moves as many bytes (90 % skewed), device lengths within 3 %.
small    up to 1 MB of shards. Goal: within 5 % of torch.compile in a CUDA graph.
masked   arbitrary masks. Goals: 85 % of the rate of a copy of what the mask selects at 256 elements a position or more,
         within 5 % of torch.compile at one element.
modes    output dtypes, mean, scale, accumulate: no goal beyond no extra pass.

Timing, buffers, verification and rows are those of ``shardsum bench`` (which has fewer shapes and all baselines).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
from common import parser, report_of, start

from shardsum.native import loader as native
from shardsum.tools.bench import local
from shardsum.tools.bench.cases import DTYPES, SEED, Case, lengths_of
from shardsum.tools.bench.jobs import Bench
from shardsum.tools.bench.local import Baselines
from shardsum.tools.bench.rows import Row

PARTS = ("large", "small", "masked", "modes")
LEAST_BYTES = 100e6


def large() -> Iterator[Case]:
    for num_ranks, size in ((2, 8192), (4, 8192), (8, 8192), (16, 8192), (64, 2048)):
        for dtype in DTYPES:
            full = Case(num_ranks=num_ranks, size=size, width=4096, dtype=dtype, profile="full")
            yield full
            for profile in ("causal", "skewed"):
                yield grown(replace(full, profile=profile))
            for fill in (0.1, 0.3, 0.5, 0.7):
                yield grown(replace(full, profile="random", fill=fill))


def grown(case: Case) -> Case:
    """With twice the positions until it moves LEAST_BYTES."""
    item = DTYPES[case.dtype].itemsize * case.width
    while (sum(lengths_of(case)) + case.size) * item < LEAST_BYTES:
        case = replace(case, size=2 * case.size)
    return case


def small() -> Iterator[Case]:
    yield SEED
    for i, num_ranks in enumerate((2, 4, 8, 16, 64)):
        for width in (1, 256):
            for j, num_bytes in enumerate((1 << 14, 1 << 18, 1 << 20)):
                dtype = ("bf16", "fp32")[(i + j + width) % 2]
                size = num_bytes // (num_ranks * width * DTYPES[dtype].itemsize)
                if size > 0:
                    yield Case(num_ranks=num_ranks, size=size, width=width, dtype=dtype)


def masked() -> Iterator[Case]:
    shapes = ((8, 65536, 256), (4, 65536, 1024), (8, 65536, 320), (16, 8192, 4096), (64, 2048, 4096))
    for num_ranks, size, width in shapes:
        for fill in (0.1, 0.5, 0.9):
            case = Case(num_ranks=num_ranks, size=size, width=width, dtype="bf16", fill=fill, operation="masked_sum")
            yield case
            if fill == 0.5:
                yield replace(case, dtype="fp32")


def masked_elements() -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case(num_ranks=8, size=1 << 24, width=1, dtype=dtype, operation="masked_sum")


def modes() -> Iterator[Case]:
    yield Case(num_ranks=8, size=8192, width=4096, dtype="bf16", operation="modes")


def misses(rows: list[Row]) -> Iterator[str]:
    """What a row says of a goal it does not reach."""
    host: dict[str, Row] = {row.case: row for row in rows if row.variant == "shardsum"}
    for row in rows:
        if row.variant == "device lengths" and row.bytes >= LEAST_BYTES and row.us > 1.03 * host[row.case].us:
            yield f"{row.case}: device lengths take {row.us / host[row.case].us:.3f} of host lengths"
        if row.variant != "shardsum" or row.percent is None:
            continue
        if row.operation == "masked_sum":
            goal = 85.0 if row.width >= 256 else 0.0
        else:
            goal = (90.0 if row.profile == "skewed" else 95.0) if row.bytes >= LEAST_BYTES else 0.0
        if row.percent < goal:
            yield f"{row.case}: {row.percent:.1f} % of the copy, not {goal:.0f}"
        if row.baseline == "compile" and row.speedup is not None and row.speedup < 0.95:
            yield f"{row.case}: {row.us:.2f} us, torch.compile {row.us * row.speedup:.2f} us"


def run(args: argparse.Namespace, device: torch.device) -> None:
    if not native.status().has_cuda:
        raise SystemExit(f"gpu_kernel: needs CUDA kernels ({native.status().reason})")
    report = report_of(args)
    bench, none, compiled = Bench(report, "cuda", args.samples), Baselines(()), Baselines(("compile",))
    parts = {
        "large": [(large(), none)],
        "small": [(small(), compiled)],
        "masked": [(masked(), none), (masked_elements(), compiled)],
        "modes": [(modes(), none)],
    }
    for part in [args.only] if args.only else PARTS:
        for cases, baselines in parts[part]:
            for case in cases:
                bench.measure(local.Sums(case, "cuda", baselines).job())
                torch.cuda.empty_cache()
    report.say(
        "\nbelow a goal:", *(f"  {text}" for text in misses(report.rows)), *(f"  WRONG {n}" for n in bench.failed)
    )


if __name__ == "__main__":
    options = parser(__doc__, samples=9)
    options.add_argument("--only", choices=PARTS)
    options.set_defaults(device="cuda")
    start(options.parse_args(), run)
