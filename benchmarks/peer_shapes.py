"""The peer transport between two processes on calls that are no plain bf16 all_reduce, in CUDA graphs.

    torchrun --nproc-per-node=2 benchmarks/peer_shapes.py

Means and scales, rows and results off their alignment, dtypes, several rows a process in one and two rounds,
reduce_scatter, zigzag. Every call is verified bit for bit against reference.py before it is timed: microseconds per
call, the slower process, the median over replays. No baselines: those are in peer_bench.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardsum.core import bits, reference
from shardsum.core.layout import ExchangePlan, intervals_of, owners_of, split_evenly
from shardsum.native import loader as native
from shardsum.tools.bench.timing import Processes, sampler, turns
from shardsum.tools.launcher import launched
from shardsum.transports.peer.transport import PeerTransport

WIDTH, MIB = 512, 1 << 20


class Shapes:
    def __init__(self, device: torch.device) -> None:
        self.rank, self.device, self.processes = dist.get_rank(), device, Processes.launched()
        self.transports: dict[tuple[int, str], PeerTransport] = {}

    def transport(self, num_ranks: int, placement: str) -> PeerTransport:
        if (num_ranks, placement) not in self.transports:
            owners, world = owners_of(num_ranks, 2, placement), dist.distributed_c10d._get_default_group()
            made = self.transports[num_ranks, placement] = PeerTransport(world, owners, self.device, timeout=20)
            made.set_up()
        return self.transports[num_ranks, placement]

    def case(
        self,
        name: str,
        plan: ExchangePlan,
        placement: str = "contiguous",
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
        op: str = "sum",
        scale: float | None = None,
        shard_shift: int = 0,
        out_shift: int = 0,
        two_shot: bool | None = None,
    ) -> None:
        """Shifts are in elements. Two copies of everything rotate."""
        transport, out_dtype = self.transport(len(plan.sources), placement), out_dtype or dtype
        hosted, sinks = plan.hosted_sources(self.rank), plan.hosted_sinks(self.rank)
        shards = [self._shard(r, end - begin, dtype) for r, (begin, end) in enumerate(plan.sources)]
        mine = [[self._placed(shards[r], shard_shift) for r in hosted] for _ in range(2)]
        outs = [[self._empty(plan.sinks[q], out_dtype, out_shift) for q in sinks] for _ in range(2)]
        whole = transport.layout
        if two_shot is not None:
            rounds = {0: -(1 << 60) if two_shot else 1 << 60}
            tuning = replace(whole.tuning, push_bytes={0: 0}, two_shot_bytes=rounds)
            transport.layout = replace(whole, tuning=tuning)
        transport._calls.clear()
        call = transport.prepare(plan, WIDTH, dtype, out_dtype, op, scale)
        transport.layout = whole
        bounds = [n for r in hosted for n in (plan.sources[r][0], plan.sources[r][1] - plan.sources[r][0])]

        def run(i: int) -> None:
            call(outs[i % 2], mine[i % 2], bounds)

        for i in range(2):
            run(i)
            for q, out in zip(sinks, outs[i]):
                begin, end = plan.sinks[q]
                starts = [held[0] - begin for held in plan.sources]
                want = reference.ragged_sum(shards, starts, end - begin, op=op, scale=scale, out_dtype=out_dtype)
                assert bits.equal(out, want), f"{name}: {bits.first_difference(out, want)}"
        sample = sampler([partial(run, i) for i in range(2)], device="cuda", processes=self.processes)
        us = turns({name: sample}, 10)[name].median * 1e6
        way = "two rounds" if call.shape.two_shot else "pushed" if call.shape.push else "written"
        if self.rank == 0:
            elements = max(end for _, end in plan.sinks) * WIDTH
            launches = -(-elements // call.shape.chunk)
            print(f"{name:44} {us:8.2f} us  {way}, {launches} launch(es)", flush=True)

    def _shard(self, rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(rank)
        return torch.randn((length, WIDTH), generator=generator, device=self.device).to(dtype)

    def _placed(self, shard: torch.Tensor, shift: int) -> torch.Tensor:
        memory = torch.empty(shard.numel() + shift, dtype=shard.dtype, device=self.device)
        return memory[shift:].view(shard.shape).copy_(shard)

    def _empty(self, sink: tuple[int, int], dtype: torch.dtype, shift: int) -> torch.Tensor:
        count = (sink[1] - sink[0]) * WIDTH
        return torch.full((count + shift,), float("nan"), dtype=dtype, device=self.device)[shift:].view(-1, WIDTH)


def all_reduce(num_ranks: int, num_bytes: int) -> ExchangePlan:
    size, owners = num_bytes // (2 * WIDTH), owners_of(num_ranks, 2, "contiguous")
    return ExchangePlan(((0, size),) * num_ranks, owners, ((0, size),) * 2, (0, 1), 2)


def reduce_scatter(lengths: list[int], size: int, placement: str) -> ExchangePlan:
    owners = owners_of(len(lengths), 2, placement)
    parts = tuple(intervals_of(split_evenly(size, len(lengths))))
    return ExchangePlan(tuple((0, n) for n in lengths), owners, parts, owners, 2)


def main() -> None:
    native.load()
    with launched("cuda", 60) as device:
        shapes, plan = Shapes(device), all_reduce(2, 16 * MIB)
        options: dict[str, dict[str, Any]] = {
            "sum": {},
            "mean": dict(op="mean"),
            "scaled": dict(scale=0.3),
            "shard off by an element": dict(shard_shift=1),
            "result off by an element": dict(out_shift=1),
            "to fp32": dict(out_dtype=torch.float32),
        }
        for name, option in options.items():
            shapes.case(f"16 MiB, {name}", plan, **option)
        shapes.case("16 MiB of fp32", all_reduce(2, 8 * MIB), dtype=torch.float32)
        for mib in (1, 2, 4, 16):
            for two_shot in (False, True):
                shapes.case(f"{mib} MiB, R=4", all_reduce(4, mib * MIB), two_shot=two_shot)
        size = 64 * MIB // (2 * WIDTH)
        for part in (16, 4, 1):
            plan = reduce_scatter([size // part] * 2, size // part, "contiguous")
            shapes.case(f"reduce_scatter of {64 // part} MiB", plan)
        causal = [size * (r + 1) // 4 for r in range(4)]
        shapes.case("zigzag reduce_scatter, causal, R=4", reduce_scatter(causal, size, "zigzag"), "zigzag")
        shapes.case("zigzag reduce_scatter, full, R=4", reduce_scatter([size] * 4, size, "zigzag"), "zigzag")


if __name__ == "__main__":
    main()
