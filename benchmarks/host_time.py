"""How long an eager call keeps the host busy: Python, dispatcher and launch, at sizes where nothing else counts.

    python benchmarks/host_time.py [--device cuda] [--json FILE]
    torchrun --nproc-per-node=2 benchmarks/host_time.py [--device cuda] [--json FILE]

One process: ragged sums of R shards padded to S positions of fp32, against torch (m: the float mask (R, S)).

MaskedSum                    MaskedSum.from_lengths called as a module, with and without out=; "forward": its forward
                             alone, without what torch.nn.Module adds; "gaps": of a mask that is no set of lengths
module eager                 a torch.nn.Module that computes (x * m).sum(0)
out=, allocating, mean       shardsum.ragged_sum with a list of lengths
new lengths, out=            the same with a list that has not come for 400 calls
tensor, out=                 the same with lengths in a tensor on the CPU
shards, out=                 the same with a list of whole shards instead of a padded tensor
masked_sum                   shardsum.masked_sum with the mask of "gaps"
eager out=, eager            torch.sum(x * m, 0, out=out), (x * m).sum(0)
stack                        torch.stack(list of padded shards).sum(0), without a mask
loop                         out.zero_(), then out[:length_r].add_(x[r, :length_r]) for every rank
compile                      torch.compile of out.copy_((x * m).sum(0))

Several: collectives of one bf16 shard a process, uneven lengths, as calls of the group and as plans that are held,
against NCCL (gloo) and torch's symmetric memory, which move the padded shard. On CUDA a call ends when its
work is enqueued; calls come in bursts short enough for the queue. Microseconds of the slowest process, in turns,
everything verified first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Meter, parser, report_of
from torch import Tensor

from shardsum import MaskedSum, ShardGroup, masked_sum, ragged_sum
from shardsum.core import bits, reference
from shardsum.native import loader as native
from shardsum.tools.bench.rows import Report
from shardsum.tools.bench.symmetric import Symmetric
from shardsum.tools.bench.timing import Processes, Timing, turns
from shardsum.tools.launcher import launched

Calls = dict[str, Callable[[], Any]]
BURST = 20  # calls before the GPU is waited for
SUMS = {
    "20 positions": [8, 12, 10, 18],
    "1024 positions": [1024, 100, 700, 0, 513, 901, 1023, 12],
    "128 positions": [2 * r for r in range(64)],
}
NEW = "new lengths, out="
POSITIONS, WIDTH = 32, 256  # of a collective: 16 KiB of bf16


@dataclass
class Row:
    case: str
    variant: str
    seconds: Timing


def local_sums(lengths: list[int], size: int, device: torch.device, skip: Sequence[str] = ()) -> Calls:
    x = torch.randn(len(lengths), size, device=device)
    mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).to(device, torch.float32)
    out, vector = torch.full((size,), float("nan"), device=device), torch.tensor(lengths)
    compiled = torch.compile(lambda x, m, out: out.copy_((x * m).sum(0)))
    others = [[i % 20, i // 20, *lengths[2:]] for i in range(400)]
    new = itertools.cycle(others)

    def loop() -> Tensor:
        out.zero_()
        for r, n in enumerate(lengths):
            out[:n].add_(x[r, :n])
        return out

    class Eager(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * mask).sum(0)

    shards, padded, module = [x[r, :n] for r, n in enumerate(lengths)], list(x), Eager()
    held = MaskedSum.from_lengths(lengths, size)
    gaps = mask.bool()
    gaps[:, ::3] = False
    gapped = MaskedSum(gaps.cpu()).to(device)
    calls: Calls = {
        "MaskedSum out=": lambda: held(x, out),
        "MaskedSum": lambda: held(x),
        "MaskedSum.forward": lambda: held.forward(x),
        "MaskedSum, gaps": lambda: gapped(x),
        "module eager": lambda: module(x),
        "out=": lambda: ragged_sum(x, lengths, out=out),
        "allocating": lambda: ragged_sum(x, lengths),
        NEW: lambda: ragged_sum(x, next(new), out=out),
        "tensor, out=": lambda: ragged_sum(x, vector, out=out),
        "shards, out=": lambda: ragged_sum(shards, size=size, out=out),
        "mean, out=": lambda: ragged_sum(x, lengths, op="mean", out=out),
        "masked_sum, gaps": lambda: masked_sum(x, gaps),
        "eager out=": lambda: torch.sum(x * mask, 0, out=out),
        "eager": lambda: (x * mask).sum(0),
        "stack": lambda: torch.stack(padded).sum(0),
        "loop": loop,
        "compile": lambda: compiled(x, mask, out),
    }
    calls = {name: call for name, call in calls.items() if name not in skip}
    for name, call in calls.items():
        op = "mean" if "mean" in name else "sum"
        rows = [x[r, :n].cpu() for r, n in enumerate(others[0] if name == NEW else lengths)]
        want = reference.ragged_sum(rows, [0] * len(rows), size, op=op, out_dtype=torch.float32)
        if "gaps" in name:
            want = reference.masked_sum(x.cpu(), gaps.cpu(), out_dtype=torch.float32)
        elif name == "stack":
            want = reference.ragged_sum(list(x.cpu()), [0] * len(rows), size, out_dtype=torch.float32)
        got = call().cpu()
        if name not in ("module eager", "eager out=", "eager", "stack", "loop", "compile"):
            assert bits.equal(got, want), f"{name}: {bits.first_difference(got, want)}"
        torch.testing.assert_close(got, want)
    return calls


def collectives(group: ShardGroup, processes: Processes) -> Calls:
    lengths = [POSITIONS - 3 * r for r in range(group.world_size)]
    shape, device = (POSITIONS, WIDTH), group.device
    padded = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(len(lengths))])
    padded = padded.bfloat16()
    for row, n in zip(padded, lengths):
        row[n:] = 0
    rows = [row[:n] for row, n in zip(padded, lengths)]
    want = reference.ragged_sum(rows, [0] * len(rows), POSITIONS, out_dtype=torch.bfloat16)
    x = padded[group.rank].to(device)
    out, work = torch.empty_like(x), torch.zeros_like(x)
    calls: Calls = {
        "all_reduce, out=": lambda: group.all_reduce(x, lengths, size=POSITIONS, out=out),
        "all_reduce": lambda: group.all_reduce(x, lengths, size=POSITIONS),
        "reduce_scatter": lambda: group.reduce_scatter(x, lengths, size=POSITIONS),
        "all_gather": lambda: group.all_gather(x, lengths),
    }
    kinds: dict[str, Any] = dict(row_shape=(WIDTH,), dtype=torch.bfloat16)
    whole = group.plan("all_reduce", lengths, size=POSITIONS, **kinds)
    parts = group.plan("reduce_scatter", lengths, size=POSITIONS, **kinds)
    joined = group.plan("all_gather", lengths, **kinds)
    intervals = [(0, n) for n in lengths]
    moved = group.plan("exchange", in_intervals=intervals, out_intervals=intervals[::-1], size=POSITIONS, **kinds)
    calls |= {
        "plan all_reduce, out=": lambda: whole(x, out=out),
        "plan all_reduce": lambda: whole(x),
        "plan reduce_scatter": lambda: parts(x),
        "plan all_gather": lambda: joined(x),
        "plan exchange": lambda: moved(x),
    }
    for name in ("all_reduce, out=", "all_reduce", "plan all_reduce, out=", "plan all_reduce"):
        for _ in range(3):
            got = calls[name]().cpu()
            assert bits.equal(got, want), f"{name}: {bits.first_difference(got, want)}"
    calls["dist.all_reduce"] = lambda: dist.all_reduce(work)
    try:
        symmetric = Symmetric(x.nbytes, device, processes)
    except (ImportError, RuntimeError):
        return calls
    for variant in symmetric.variants(x, want, want)[:2]:
        calls[variant.name] = variant.calls[0]
    return calls


def measure(name: str, calls: Calls, meter: Meter, report: Report, skip: Sequence[str]) -> None:
    samplers = {n: meter.sampler(call, BURST, wait=False) for n, call in calls.items() if n not in skip}
    timings = turns(samplers, meter.samples)
    lines = (f"  {variant:20} {timing}" for variant, timing in timings.items())
    report.add([Row(name, variant, timing) for variant, timing in timings.items()], f"\n{name}", *lines)


def main() -> None:
    options = parser(__doc__, samples=200)
    options.add_argument("--skip", nargs="*", default=(), help="variants to leave out")
    args = options.parse_args()
    native.load()
    with launched(args.device, 60) as device:
        meter, report = Meter(device, args.samples), report_of(args)
        if dist.is_initialized():
            group = ShardGroup(device=device)
            calls = collectives(group, meter.processes)
            measure(f"{group.world_size} processes, {POSITIONS} x {WIDTH} bf16", calls, meter, report, args.skip)
            report.say(f"transport: {group.stats().route.transport}")
            return
        for text, lengths in SUMS.items():
            calls = local_sums(lengths, int(text.split()[0]), device, args.skip)
            measure(f"R={len(lengths)}, {text}, fp32", calls, meter, report, args.skip)


if __name__ == "__main__":
    main()
