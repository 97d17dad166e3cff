"""The peer transport against NCCL and torch's symmetric-memory operations, one process a GPU, in one run.

    torchrun --nproc-per-node=2 benchmarks/peer_bench.py --json benchmarks/results/peer_h200x2.json
    torchrun --nproc-per-node=2 benchmarks/peer_bench.py --sweep          # launch shapes, for tuning.Tuning

Cases, timing, verification and rows are those of ``shardsum bench`` between processes, whose text says what the
profiles are. Beside its baselines stand NCCL's all_gather and the local kernel, and NCCL's all_to_all, kernel and
all_gather. Ours are kernels of their own: where a plan would take another, too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from common import parser, report_of, start
from torch import Tensor

from shardsum.core.layout import ExchangePlan
from shardsum.local.functional import ragged_sum
from shardsum.native import loader as native
from shardsum.tools.bench.collectives import Case, Collective, Profile, Suite
from shardsum.tools.bench.jobs import Bench, Variant
from shardsum.tools.bench.timing import Processes
from shardsum.transports.peer.operators import peer_call
from shardsum.transports.peer.transport import PeerTransport
from shardsum.transports.peer.tuning import Tuning

SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


class Peers:
    """Cases by the peer transport."""

    def __init__(self, suite: Suite, tuning: Tuning) -> None:
        self.suite, self.world_size = suite, suite.world_size
        self.owners = tuple(range(self.world_size))
        self.transport = PeerTransport(dist.group.WORLD, self.owners, suite.device, timeout=20, tuning=tuning)
        self.transport.set_up()

    def measure(self, size: int, profile: Profile) -> None:
        operation = "reduce_scatter" if profile == "long documents" else "all_reduce"
        case = Collective(self.suite, Case(bytes=size, profile=profile, operation=operation))
        variants = self.scattered(case) if profile == "long documents" else self.reduced(case)
        if profile == "full":
            variants += [gather_and_sum(case), all_to_all_and_sum(case)]
        self.suite.bench.measure(case.job(variants))

    def reduced(self, case: Collective) -> list[Variant]:
        layout = self.transport.layout
        way = "pushed" if case.out.nbytes <= layout.push_limit else "streamed" if layout.streams else "read"
        ways: list[tuple[str, bool | None]] = [(way, None)] if self.world_size == 2 or way != "read" else []
        if self.world_size > 2:
            ways += [("one-shot", False), ("two-shot", True)]
        return [self.reduce(case, name, two_shot) for name, two_shot in ways]

    def reduce(self, case: Collective, name: str, two_shot: bool | None = None) -> Variant:
        bounds, row = case.held[self.suite.rank], case.width * 2
        sinks = ((0, case.size),) * self.world_size
        plan = ExchangePlan(tuple(case.held), self.owners, sinks, self.owners, self.world_size)
        tuning = self.transport.layout.tuning
        if two_shot is not None:  # at any size
            rounds = {0: -(1 << 60) if two_shot else 1 << 60}
            self.tune(replace(tuning, push_bytes={0: 0}, two_shot_bytes=rounds))
        call = self.transport.prepare(plan, case.width, torch.bfloat16, torch.bfloat16)
        self.tune(tuning)
        copies = self.world_size - 1
        if call.shape.two_shot:
            copies = 2 * copies / self.world_size  # zeros do not travel
        moved = int(copies * max(case.lengths) * row), int(copies * sum(case.lengths) * row)
        bound = call.bind(bounds, (case.width,))
        return self.variant(f"peer {name}", case, case.out, lambda x: peer_call(case.out, x, bound), moved)

    def scattered(self, case: Collective) -> list[Variant]:
        (begin, end), out = case.held[self.suite.rank], torch.empty_like(case.want)
        plan = ExchangePlan(tuple(case.held), self.owners, tuple(case.chunks), self.owners, self.world_size)
        call = self.transport.prepare(plan, case.width, torch.bfloat16, torch.bfloat16)
        sent = [plan.egress(a) * case.width * 2 for a in self.owners]
        moved = max(sent), sum(sent)
        return [self.variant("peer", case, out, lambda x: call([out], [x], (begin, end - begin)), moved)]

    def variant(
        self, name: str, case: Collective, out: Tensor, call: Callable[[Tensor], Any], moved: tuple[int, int]
    ) -> Variant:
        def run(x: Tensor) -> Tensor:
            call(x)
            return out

        out.fill_(float("nan"))
        calls = [partial(run, x) for (x,) in case.inputs]
        return Variant(name, calls, case.want, wire_bytes=moved)

    def tune(self, tuning: Tuning) -> None:
        """Launch calls that are prepared from now on so."""
        self.transport.layout = replace(self.transport.layout, tuning=tuning)
        self.transport._calls.clear()

    def sweep(self, sizes: Sequence[int]) -> None:
        """Times of ours over launch shapes."""
        writes = self.transport.layout.writes or self.world_size > 2
        for size in sizes:
            case, variants = Collective(self.suite, Case(bytes=size, profile="full")), list[Variant]()
            for producers, pieces, stretches in product((1, 2, 3), (4, 8, 16) if writes else (0,), (2, 4, 8, 16)):
                shape = dict(write_pieces=pieces, write_stretches=stretches) if writes else dict(stretches=stretches)
                self.tune(Tuning(producer_warps=producers, one_producer_bytes=0, **shape))
                variants.append(self.reduce(case, f"{producers}/{pieces}/{stretches}"))
            self.suite.bench.measure(case.job(variants))
        self.tune(Tuning())
        for size in (64 << 10, 256 << 10, 1 << 20):
            self.measure(size, "full")


def gather_and_sum(case: Collective) -> Variant:
    x, out = case.padded(torch.bfloat16), torch.full_like(case.out, float("nan"))
    everyone = x.new_empty((case.suite.world_size, *x.shape))

    def run() -> Tensor:
        dist.all_gather_into_tensor(everyone.view(-1, case.width), x)
        return ragged_sum(everyone, case.lengths, out=out)

    moved = (case.suite.world_size - 1) * x.nbytes
    return Variant("NCCL all_gather + kernel", [run], case.want, wire_bytes=(moved, moved * case.suite.world_size))


def all_to_all_and_sum(case: Collective) -> Variant:
    x, world, rank = case.padded(torch.bfloat16), case.suite.world_size, case.suite.rank
    part = x.shape[0] // world
    received, out = torch.empty_like(x), torch.full_like(x, float("nan"))
    mine = out[rank * part : (rank + 1) * part]

    def run() -> Tensor:
        dist.all_to_all_single(received, x)
        ragged_sum(received.view(world, part, case.width), [part] * world, out=mine)
        dist.all_gather_into_tensor(out, mine)
        return out

    moved = 2 * (world - 1) * x.nbytes // world
    return Variant("NCCL all_to_all + kernel + ag", [run], case.want, wire_bytes=(moved, moved * world))


def run(args: argparse.Namespace, device: torch.device) -> None:
    native.load()
    tuning = Tuning(**json.loads(args.tuning))
    report = report_of(args, tuning=repr(tuning), NCCL_NVLS_ENABLE=os.environ.get("NCCL_NVLS_ENABLE"))
    suite = Suite(Bench(report, "cuda", args.samples, Processes.launched()), [], max(args.sizes))
    peers = Peers(suite, tuning)
    if args.sweep:
        peers.sweep(args.sizes)
    else:
        for size in args.sizes:
            peers.measure(size, "full")
            if 4 << 20 <= size <= 64 << 20:
                for profile in ("even", "uneven", "long documents"):
                    peers.measure(size, profile)
    suite.close()
    peers.transport.close()


if __name__ == "__main__":
    options = parser(__doc__, samples=15)
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options.add_argument("--tuning", default="{}", help="fields of tuning.Tuning as a JSON object")
    options.set_defaults(device="cuda")
    start(options.parse_args(), run)
