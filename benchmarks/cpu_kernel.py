"""The CPU kernel against what one would write without it, each row verified before it is timed.

    python benchmarks/cpu_kernel.py [--threads N] [--samples N] [--only TEXT] [--json FILE]

Useful bytes: valid elements read once and the output written once. Baselines, all in the same run and all with the
output given, except in rows marked "allocating", where every variant allocates its result:

eager     torch.sum(x * m, 0, out=out), m the float mask (R, S_MAX, 1)
loop      out.zero_(), then out[:length_r] += x[r, :length_r] for every rank
compile   torch.compile of out.copy_((x * m).sum(0))
copy      dst.copy_(src) of as many bytes (half read, half written): the ceiling to compare rates with

Every variant's result is compared with shardsum.core.reference: ours bit for bit, the baselines within rounding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardsum import masked_sum, ragged_sum
from shardsum.core import bits, reference
from shardsum.native import loader as native
from shardsum.tools.bench.rows import environment
from shardsum.tools.bench.timing import Timing, sampler, turns

BASELINES = ("eager", "loop", "compile")


@dataclass(frozen=True)
class Case:
    """R shards padded to (S_MAX, H), filled to ``fill`` on average; ``mask``: random positions instead of lengths."""

    num_ranks: int
    capacity: int
    width: int
    dtype: torch.dtype
    fill: float
    mask: bool = False
    allocating: bool = False

    def __str__(self) -> str:
        kind = "mask" if self.mask else "ragged"
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"R={self.num_ranks} {self.capacity}x{self.width}"
        return f"{kind} {dtype} {shape} fill {self.fill:g}{' allocating' if self.allocating else ''}"


F32, BF16 = torch.float32, torch.bfloat16
CASES = (
    Case(4, 20, 1, F32, 0.6),
    Case(4, 20, 1, F32, 0.6, allocating=True),
    Case(8, 128, 8, F32, 0.5),
    Case(8, 512, 32, F32, 0.5),
    Case(8, 4096, 256, F32, 0.5),
    Case(8, 4096, 256, F32, 0.5, allocating=True),
    Case(2, 8192, 2048, F32, 0.5),
    Case(4, 8192, 2048, F32, 0.5),
    Case(8, 8192, 2048, F32, 0.5),
    Case(8, 8192, 2048, F32, 0.5, allocating=True),
    Case(8, 8192, 2048, F32, 1.0),
    Case(64, 2048, 1024, F32, 0.5),
    Case(8, 8192, 2048, BF16, 0.5),
    Case(8, 32768, 256, F32, 0.5, mask=True),
    Case(8, 1 << 22, 1, F32, 0.5, mask=True),
)


def lengths_of(case: Case) -> list[int]:
    """Lengths spread evenly about the mean fill (all the same at fill 1), in a shuffled order."""
    spread = min(case.fill, 1 - case.fill)
    steps = torch.linspace(-spread, spread, case.num_ranks, dtype=torch.float64)
    order = torch.randperm(case.num_ranks, generator=torch.Generator().manual_seed(0))
    return ((case.fill + steps[order]) * case.capacity).round().long().tolist()


@dataclass
class Job:
    """The tensors of a case and its variants."""

    useful_bytes: int
    want: Tensor
    out: Tensor
    variants: dict[str, Callable[[], Any]]


def job_of(case: Case) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.num_ranks, case.capacity, case.width, generator=generator).to(case.dtype)
    lengths = lengths_of(case)
    if case.mask:
        mask = torch.rand(case.num_ranks, case.capacity, generator=generator) < case.fill
        want = reference.masked_sum(x, mask, out_dtype=case.dtype)
    else:
        mask = torch.arange(case.capacity) < torch.tensor(lengths)[:, None]
        rows = [x[r, :n] for r, n in enumerate(lengths)]
        want = reference.ragged_sum(rows, [0] * len(rows), case.capacity, out_dtype=case.dtype)
    useful = (int(mask.sum()) + case.capacity) * case.width * x.element_size()
    out = torch.zeros_like(want)
    factor = mask[:, :, None].to(case.dtype)
    compiled = torch.compile(lambda x, m, out: out.copy_((x * m).sum(0)))
    source = torch.rand(max(1, useful // 8))
    target = torch.zeros_like(source)

    def ours() -> Tensor:
        return masked_sum(x, mask, out=out) if case.mask else ragged_sum(x, lengths, out=out)

    def loop() -> Tensor:
        out.zero_()
        for r, n in enumerate(lengths):
            out[:n].add_(x[r, :n])
        return out

    variants: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "eager": lambda: torch.sum(x * factor, 0, out=out),
        "loop": loop,
        "compile": lambda: compiled(x, factor, out),
        "copy": lambda: target.copy_(source),
    }
    if case.allocating:
        allocating = torch.compile(lambda x, m: (x * m).sum(0))
        variants["ours"] = lambda: ragged_sum(x, lengths)
        variants["eager"] = lambda: (x * factor).sum(0)
        variants["compile"] = lambda: allocating(x, factor)
        variants["copy"] = lambda: source.clone()
        del variants["loop"]
    if case.mask:
        del variants["loop"]
    return Job(useful, want, out, variants)


def verify(case: Case, job: Job) -> None:
    """Poison the output, run every variant, compare: ours in every bit, the others within rounding."""
    loose = 2e-2 if case.dtype == BF16 else 1e-5
    for name, call in job.variants.items():
        if name == "copy":
            continue
        job.out.fill_(float("nan"))
        got = call()
        if name == "ours":
            assert bits.equal(got, job.want), f"{case}: {bits.first_difference(got, job.want)}"
        else:
            torch.testing.assert_close(got, job.want, rtol=loose, atol=loose * case.num_ranks)


def measure(case: Case, samples: int) -> dict[str, Any]:
    torch._dynamo.reset()
    job = job_of(case)
    verify(case, job)
    timings = turns({name: sampler(call) for name, call in job.variants.items()}, samples)
    best = min((name for name in BASELINES if name in timings), key=lambda name: timings[name].median)
    ours = timings["ours"].median
    return {
        "case": str(case),
        "useful_bytes": job.useful_bytes,
        "useful_gb_per_s": job.useful_bytes / ours / 1e9,
        "percent_of_copy": 100 * timings["copy"].median / ours,
        "best_baseline": best,
        "speedup_over_best": timings[best].median / ours,
        "wrong": 0,
        "seconds": {name: asdict(t) for name, t in timings.items()},
    }


def print_row(row: dict[str, Any]) -> None:
    print(f"\n{row['case']}: {row['useful_bytes'] / 1e6:.3g} MB useful, #wrong {row['wrong']}")
    for name, seconds in row["seconds"].items():
        timing = Timing(**seconds)
        rate = row["useful_bytes"] / timing.median / 1e9
        print(f"  {name:8} {timing!s:56} {rate:7.2f} GB/s")
    print(
        f"  ours is {row['percent_of_copy']:.0f} % of the copy rate and "
        f"{row['speedup_over_best']:.2f} x {row['best_baseline']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="intra-op threads (default: torch's)")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--only", default="", help="cases whose line contains this text")
    parser.add_argument("--isa", help="at most this instruction set: baseline, avx2, avx512")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    native.limit_cpu_isa(args.isa)
    facts = environment()
    print(json.dumps(facts, indent=1))
    rows = []
    for case in CASES:
        if args.only in str(case):
            rows.append(measure(case, args.samples))
            print_row(rows[-1])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
