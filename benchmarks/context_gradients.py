"""The reduction of dK and dV of context-parallel attention: shardsum against what users run, in one run.

    torchrun --nproc-per-node=4 benchmarks/context_gradients.py                      # gloo, CPU
    torchrun --nproc-per-node=2 benchmarks/context_gradients.py --device cuda        # NCCL, a GPU a process

One sequence of S positions: a single causal document, or packed documents of mean length S/4 and S/16. Chunks are
contiguous (R = G) or zigzag (R = 2G). Ways to bring the partial dK and dV of every chunk to those who hold the keys:

    shardsum            the adjoint of the exchange that brought K and V, in bf16, added in fp32
    padded bf16, fp32   zeros of S positions, the chunks of a process added into them, dist.reduce_scatter_tensor
    padded by hand      the same bf16 buffer by dist.all_to_all_single, then added in fp32
    torch CP            torch.distributed.tensor.experimental.context_parallel: a ring of its own, where it runs

All but the last run the same attention kernels on the same chunks; the padded ways gather K and V by one all_gather.
Verified before timed: shardsum's reduction and step have the bits of the reference, the others are within rounding.

Bytes: shardsum's are its plan's, checked against what was handed to the backend; the padded ways' are a ring's,
(G-1)/G of the buffer a process; torch CP's are counted where it sends. Error: norm of the difference from float64 over
its norm; of the reduction: the same partial gradients added in float64; of the step: attention in float64 on the same
inputs. Peak: what torch allocates during the call, on the process that needs most (not the backend's own buffers).
Times: medians [20 %, 80 %] of the slowest process, ways in turns.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, quantiles
from typing import Any

import torch
import torch.distributed as dist
from common import Meter, ms, parser, report_of, start
from context_cases import BF16, SEED, Case, Padded, Shardsum, TorchContextParallel, share_of_padded
from torch import Tensor

from shardsum.tools.bench.cases import packed_borders
from shardsum.tools.bench.rows import markdown, markdown_header
from shardsum.tools.bench.timing import Timing

MOST_ERROR = 2e-2  # a few times what bf16 loses here


@dataclass
class Row:
    """One way in one case. Bytes; None is unknown: where the reduction cannot be told from the step."""

    profile: str
    placement: str
    way: str
    total: int | None
    busiest: int | None
    of_padded: float | None
    reduction: Timing | None = None
    reduction_peak: int | None = None
    reduction_error: float | None = None
    step: Timing | None = None
    step_peak: int | None = None
    step_error: float | None = None


def measure(meter: Meter, case: Case, profile: str) -> tuple[list[Row], str]:
    """All ways in one case, and why one of them is missing."""
    ours = Shardsum(case)
    torch.use_deterministic_algorithms(True)
    partials = case.partials()
    transport, total, busiest = ours.verified(partials)
    torch.use_deterministic_algorithms(False)
    exact, exact_sum = case.exact_gradients(), case.exact_sum(partials)
    ways: dict[str, Any] = {f"shardsum ({transport})": ours}
    ways |= {"padded bf16": Padded(case, BF16), "padded fp32": Padded(case, torch.float32)}
    ways["padded by hand"] = Padded(case, BF16, by_hand=True)
    base, rows = ways["padded bf16"].sent * dist.get_world_size(), []
    for name, way in ways.items():
        everyone, each = (total, busiest) if way is ours else (way.sent * dist.get_world_size(), way.sent)
        row = Row(profile, case.placement, name, everyone, each, everyone / base)
        reduce = partial(way.reduce, partials)
        row.reduction_error, row.step_error = meter.error(reduce(), exact_sum), meter.error(way.step(), exact)
        row.reduction_peak, row.step_peak = meter.peak(reduce), meter.peak(way.step)
        rows.append(row)
    reductions = meter.times({name: partial(way.reduce, partials) for name, way in ways.items()})
    steps = meter.times({name: way.step for name, way in ways.items()})
    for row in rows:
        row.reduction, row.step = reductions[row.way], steps[row.way]
    if len(case.borders) > 2:
        return rows, "torch CP: no documents in its scaled_dot_product_attention"
    try:
        return [*rows, measure_torch(meter, case, profile, exact, base)], ""
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        return rows, f"torch CP does not run here: {type(error).__name__}: {' '.join(str(error).split())}"


def measure_torch(meter: Meter, case: Case, profile: str, exact: list[Tensor], base: int) -> Row:
    """By itself, right behind the others: its context changes attention for everybody."""
    with TorchContextParallel(case) as ring:
        error = meter.error(ring.step(), [torch.cat(exact)])
        sent = ring.sent() or None
        total = sent and sent * dist.get_world_size()
        row = Row(profile, case.placement, "torch CP", total, sent, total and total / base, step_error=error)
        row.step_peak, row.step = meter.peak(ring.step), meter.times({"": ring.step})[""]
    return row


COLUMNS = ["placement", "way", "total MB", "of padded bf16", "busiest MB", "reduction ms", "peak MB", "error"]
COLUMNS += ["step ms", "peak MB", "error"]


def line(row: Row) -> str:
    def mb(n: int | None) -> str:
        return "-" if n is None else f"{n / 1e6:.2f}"

    def number(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    sent = [mb(row.total), number(row.of_padded, ".2f"), mb(row.busiest)]
    times = ["-" if t is None else ms(t) for t in (row.reduction, row.step)]
    reduction = [times[0], mb(row.reduction_peak), number(row.reduction_error, ".1e")]
    step = [times[1], mb(row.step_peak), number(row.step_error, ".1e")]
    return markdown(row.placement, row.way, *sent, *reduction, *step)


def arguments() -> argparse.Namespace:
    options = parser(__doc__, samples=11)
    options.add_argument("--size", type=int, help="S, a multiple of 2 G (default 4096 on the CPU, 32768 on GPUs)")
    options.add_argument("--heads", type=int, help="of queries, keys and values (default 4 on the CPU, 8 on GPUs)")
    options.add_argument("--head-dim", type=int, help="default 64 on the CPU, 128 on GPUs")
    args = options.parse_args()
    for name, (cpu, cuda) in {"size": (4096, 32768), "heads": (4, 8), "head_dim": (64, 128)}.items():
        if getattr(args, name) is None:
            setattr(args, name, cuda if args.device == "cuda" else cpu)
    if args.size % (2 * int(os.environ["WORLD_SIZE"])):
        options.error(f"--size: {args.size} is not a multiple of twice the number of processes")
    return args


def run(args: argparse.Namespace, device: torch.device) -> None:
    count, report, meter = dist.get_world_size(), report_of(args), Meter(device, args.samples, MOST_ERROR)
    report.say(f"G = {count}, S = {args.size}, {args.heads} heads of {args.head_dim}, bf16")
    for profile, part in (("one causal sequence", 1), ("documents of mean S/4", 4), ("documents of mean S/16", 16)):
        borders = packed_borders(args.size, args.size // part, SEED)
        report.say(f"\n{profile}: lengths {[b - a for a, b in pairwise(borders)]}", markdown_header(*COLUMNS))
        notes: list[str] = []
        for placement in ("contiguous", "zigzag"):
            if part > 1:
                shares = share_of_padded(args.size, args.size // part, count, placement, range(1000))
                low, mid, high = quantiles(shares, n=20)[0], fmean(shares), quantiles(shares, n=20)[-1]
                notes.append(f"{placement}: {mid:.2f} of padded bf16 over 1000 draws (5 % {low:.2f}, 95 % {high:.2f})")
            found, note = measure(meter, Case(device, borders, args.heads, args.head_dim, placement), profile)
            report.add(found, *map(line, found))
        report.say("", *notes, note)


if __name__ == "__main__":
    start(arguments(), run)
