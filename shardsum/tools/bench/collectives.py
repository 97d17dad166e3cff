"""Collectives between the launched processes: every transport against what one would call.

all_reduce, every process holding the first rows of a padded buffer. Profiles: full; even, half of it each; uneven,
0.7 of it on the first process down to 0.3 on the last. all_gather of as many rows. reduce_scatter into even chunks:
causal, virtual rank r holding the first (r + 1) / R of the positions; zigzag, the same on two chunks a process;
documents, packed ones of mean length S/16 (long: S/8), a chunk's gradient reaching back to the start of its oldest
one.
Variants:

shardsum T           ShardGroup(transport=T).all_reduce, .exchange or .all_gather; "out=" into a given tensor; "device
                     lengths" of a padded shard, never read by the host
dist.X bf16, fp32    torch.distributed on the padded buffer, all_reduce in place; fp32 moves twice the bytes
broadcasts           one of each process's rows into its part of the result
symm one-shot, two-shot    torch.ops.symm_mem on the padded buffer (:mod:`.symmetric`)

What shardsum moves is what is valid; rates count the padded result, as nccl-tests do, alike for all variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import reference
from ...core.layout import intervals_of, owners_of, split_evenly
from ...core.words import Placement, TransportName
from ...training.shard_group import ShardGroup
from .cases import held_by
from .jobs import Bench, Job, Variant, first_line, rounding
from .symmetric import Symmetric
from .timing import rotation, sampler

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
Profile = Literal["full", "even", "uneven", "causal", "zigzag", "documents", "long documents"]
SCATTERED = ("causal", "zigzag", "documents", "long documents")  # profiles of reduce_scatter
_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
_MOST_COPIES = 4
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collective on ``bytes`` of bf16 a process, padded."""

    bytes: int
    profile: Profile
    operation: Operation = "all_reduce"

    def __str__(self) -> str:
        return f"{self.operation} {self.profile} bf16 {self.bytes} bytes"

    @property
    def width(self) -> int:
        return 512 if self.bytes >= 64 << 10 else 64


def _cases(num_bytes: int, *profiles: Profile) -> list[Case]:
    return [
        Case(bytes=num_bytes, profile=p, operation="reduce_scatter" if p in SCATTERED else "all_reduce")
        for p in profiles
    ]


def quick() -> list[Case]:
    return [case for n in (16 << 10, 256 << 10) for case in _cases(n, "full", "uneven", "documents")]


def full(device: str) -> list[Case]:
    sizes = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] if device == "cuda" else [64 << 10, 1 << 20, 8 << 20]
    cases = []
    for n in sizes:
        cases += _cases(n, "full")
        if n >= 1 << 20:
            cases += _cases(n, "even", "uneven", "documents")
    cases += _cases(sizes[-1], "causal", "zigzag")
    return [*cases, *(Case(bytes=sizes[-1], profile=p, operation="all_gather") for p in ("full", "uneven"))]


class Suite:
    """The groups, the shared memory and the wire's rate of one run. Collective, like all its methods."""

    def __init__(self, bench: Bench, transports: Sequence[str], most_bytes: int) -> None:
        self.bench = bench
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        on_gpu = bench.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        #: By transport and virtual ranks a process.
        self.groups: dict[tuple[str, int], ShardGroup] = {}
        for transport in transports:
            try:
                self._group(transport, 1)
            except (ValueError, RuntimeError) as error:
                bench.report.say(f"transport {transport} is left out: {' '.join(str(error).split())}")
        self.transports = [transport for transport, _ in self.groups]
        self.symmetric: Symmetric | None = None
        try:
            self.symmetric = Symmetric(most_bytes, self.device, bench.processes)
        except RuntimeError as error:
            bench.report.say(f"torch.ops.symm_mem is left out: {first_line(error)}")
        self.wire_rate, how = self._wire_rate()
        bench.report.facts |= {"processes": self.world_size, "wire_gbps": self.wire_rate, "wire": how}
        bench.report.say(f"wire     {self.wire_rate:.2f} GB/s ({how})")

    def _wire_rate(self) -> tuple[float, str]:
        """GB/s that a process sends while it receives as much: the ceiling."""
        if self.symmetric is not None:
            return self.symmetric.load_rate(), "loads from a peer's memory, both ways at once"
        each = _WIRE_BYTES[self.device.type] // self.world_size
        data = torch.zeros(each * self.world_size, dtype=torch.uint8, device=self.device)
        out = torch.empty_like(data)
        call = lambda: dist.all_to_all_single(out, data)  # noqa: E731
        sample = sampler(call, device=self.device.type, processes=self.bench.processes)
        seconds = sorted(sample() for _ in range(5))[2]
        return each * (self.world_size - 1) / seconds / 1e9, "all_to_all of bytes"

    def _group(self, transport: str, hosted: int) -> ShardGroup:
        if (transport, hosted) not in self.groups:
            placement: Placement = "zigzag" if hosted > 1 else "contiguous"
            ranks, name = hosted * self.world_size, cast(TransportName, transport)
            self.groups[transport, hosted] = ShardGroup(ranks, placement=placement, transport=name)
        return self.groups[transport, hosted]

    def prepare(self, case: Case) -> Job:
        """The job of a case."""
        one = Collective(self, case)
        ours = [v for name in self.transports for v in one.ours(name, self._group(name, len(one.mine)))]
        return one.job(ours)

    def close(self) -> None:
        """Drop what holds device memory or graphs before the process group goes."""
        self.groups.clear()
        self.symmetric = None


class Collective:
    """One case between the launched processes: inputs, what is right, and what others call.

    Attributes:
        size: positions, those of the case cut to a multiple of all chunks.
        held, chunks: by virtual rank, the rows that it holds and those that it gets in a reduce_scatter.
        lengths: rows of every virtual rank.
        mine: the hosted shards.
        inputs: copies of them, that take turns.
        out: where a variant may write.
        want: the result of this process.
    """

    def __init__(self, suite: Suite, case: Case) -> None:
        self.suite, self.case, self.device, self.width = suite, case, suite.device, case.width
        world, placement = suite.world_size, "zigzag" if case.profile == "zigzag" else "contiguous"
        ranks = 2 * world if placement == "zigzag" else world
        owners = owners_of(ranks, world, placement)
        self.size = case.bytes // (2 * self.width) // (2 * world) * (2 * world)
        self.chunks = intervals_of(split_evenly(self.size, ranks))
        self.held = held_by(case.profile, ranks, self.size)
        self.lengths = [end - begin for begin, end in self.held]
        self.hosted = [r for r, owner in enumerate(owners) if owner == suite.rank]
        self.order = sorted(range(ranks), key=lambda r: (owners[r], r))
        self.shards = [self._random(n, r) for r, n in enumerate(self.lengths)]
        self.mine = [self.shards[r] for r in self.hosted]
        copies, self.cold = rotation(self.device.type, sum(x.nbytes for x in self.mine), _MOST_COPIES)
        self.inputs = [[x.clone() for x in self.mine] for _ in range(copies)]
        self.out = self.mine[0].new_empty((self.size, self.width))
        self.want = self._sum(torch.bfloat16, self.shards)
        self.magnitude = self._sum(torch.float32, [s.abs() for s in self.shards])

    def _random(self, rows: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn((rows, self.width), generator=generator, device=self.device).to(torch.bfloat16)

    def _sum(self, dtype: torch.dtype, shards: list[Tensor]) -> Tensor:
        """What this process should get."""
        if self.case.operation == "all_gather":
            return torch.cat(shards).to(dtype)
        scattered = self.case.operation == "reduce_scatter"
        sinks = [self.chunks[r] for r in self.hosted] if scattered else [(0, self.size)]
        return torch.cat(reference.exchange(shards, self.held, sinks, out_dtype=dtype))

    def job(self, ours: Sequence[Variant]) -> Job:
        """Of the given variants, and those of others."""
        case, suite = self.case, self.suite
        variants, baseline = [*ours], f"dist.{case.operation} bf16"
        if case.operation == "all_gather":
            baseline = "broadcasts"
            variants.append(self._broadcasts())
        else:
            variants += [self._theirs(torch.bfloat16, "bf16"), self._theirs(torch.float32, "fp32")]
        if case.operation == "all_reduce" and suite.symmetric is not None:
            tolerance = self._tolerance(torch.bfloat16)
            variants += suite.symmetric.variants(self.padded(torch.bfloat16), self.want, tolerance)
        facts = {
            "case": str(case),
            "operation": case.operation,
            "profile": case.profile,
            "dtype": "bf16",
            "fill": sum(self.lengths) / (len(self.lengths) * self.size),
            "num_virtual_ranks": len(self.lengths),
            "size": self.size,
            "width": self.width,
            "processes": suite.world_size,
            "bytes": self.want.nbytes if case.operation == "all_gather" else self.size * self.width * 2,
            "cold": self.cold,
        }
        poison = lambda: self.out.fill_(float("nan"))  # noqa: E731
        return Job(facts, variants, poison, [baseline], suite.wire_rate)

    def _tolerance(self, dtype: torch.dtype) -> Tensor:
        return rounding(self.want, self.magnitude, len(self.held), dtype)

    def _ring(self, rounds: int, num_bytes: int) -> tuple[int, int]:
        """The bytes that each process of a ring sends, and all."""
        each = rounds * (self.suite.world_size - 1) * num_bytes // self.suite.world_size
        return each, each * self.suite.world_size

    # Ours

    def ours(self, name: str, group: ShardGroup) -> list[Variant]:
        lengths, size = self.lengths, self.size
        if self.case.operation == "reduce_scatter":
            return [self._variant(name, group, lambda x: group.exchange(x, self.held, self.chunks, size=size))]
        if self.case.operation == "all_gather":
            return [self._variant(name, group, lambda x: group.all_gather(x, lengths))]
        reduce = partial(group.all_reduce, lengths=lengths, size=size)
        variants = [self._variant(name, group, reduce)]
        if name in ("auto", "peer"):
            variants.append(self._variant(f"{name}, out=", group, partial(reduce, out=self.out)))
        if name in ("gather", "peer"):
            padded, length = self.padded(torch.bfloat16), torch.tensor([lengths[self.suite.rank]], device=self.device)
            on_device = lambda _: group.all_reduce(padded, length, size=size)  # noqa: E731
            variants.append(self._variant(f"{name}, device lengths", group, on_device))
        return variants

    def _variant(self, name: str, group: ShardGroup, call: Callable[[Any], Any]) -> Variant:
        def traffic() -> tuple[int, int]:
            stats = group.stats()
            return stats.route.busiest, stats.total

        calls = [partial(call, x[0] if len(x) == 1 else x) for x in self.inputs]
        return Variant(f"shardsum {name}", calls, self.want, traffic=traffic)

    # Theirs

    def padded(self, dtype: torch.dtype) -> Tensor:
        """This process's buffer of all positions, with the hosted shards added in; zigzag chunks in the order in which
        a reduce_scatter gives them out."""
        padded = torch.zeros((self.size, self.width), dtype=dtype, device=self.device)
        for r, shard in zip(self.hosted, self.mine):
            padded[slice(*self.held[r])] += shard.to(dtype)
        if self.order == sorted(self.order):
            return padded
        return torch.cat([padded[slice(*self.chunks[r])] for r in self.order])

    def _theirs(self, dtype: torch.dtype, name: str) -> Variant:
        """On the padded buffer; its bytes are the ring's."""
        padded, tolerance = self.padded(dtype), self._tolerance(dtype)
        if self.case.operation == "reduce_scatter":
            out = padded.new_full(self.want.shape, float("nan"))
            scatter = lambda: (_reduce_scatter(out, padded), out)[1]  # noqa: E731
            sent = self._ring(1, padded.nbytes)
            return Variant(f"dist.reduce_scatter {name}", [scatter], self.want, tolerance, wire_bytes=sent)
        work = padded.clone()

        def once() -> Tensor:
            dist.all_reduce(work)
            return work

        reduce, sent = partial(dist.all_reduce, work), self._ring(2, padded.nbytes)
        return Variant(f"dist.all_reduce {name}", [reduce], self.want, tolerance, once=once, wire_bytes=sent)

    def _broadcasts(self) -> Variant:
        out, rank = torch.full_like(self.want, float("nan")), self.suite.rank
        views = list(out.split(self.lengths))

        def call() -> Tensor:
            views[rank].copy_(self.mine[0])
            works = [dist.broadcast(view, r, async_op=True) for r, view in enumerate(views) if len(view)]
            for work in works:
                work.wait()
            return out

        row, others = self.width * 2, self.suite.world_size - 1
        sent = max(self.lengths) * others * row, sum(self.lengths) * others * row
        return Variant("broadcasts", [call], self.want, wire_bytes=sent)
