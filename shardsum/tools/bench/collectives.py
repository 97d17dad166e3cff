"""Collectives between the launched processes, one virtual rank each: every transport against what one would call.

all_reduce, every process holding the first rows of a padded buffer. Profiles: full; even, half of it each; uneven,
0.7 of it on the first process down to 0.3 on the last. reduce_scatter of packed documents of mean length S/16: a
chunk's gradient reaches back to the start of its oldest document. Variants:

shardsum T           ShardGroup(transport=T).all_reduce or .exchange; "out=" into a given tensor; "device lengths" of
                     a padded shard, never read by the host; "zero-copy" from a shard that peers map
dist.X bf16, fp32    torch.distributed on the padded buffer, all_reduce in place; fp32 moves twice the bytes
symm one-shot, two-shot    torch.ops.symm_mem on the padded buffer (:mod:`.symmetric`)

What shardsum moves is what is valid; rates count the padded result, as nccl-tests do, alike for all variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import reference
from ...core.layout import intervals_of, split_evenly
from ...core.words import TransportName
from ...training.shard_group import ShardGroup
from .buffers import rotation
from .collective_cases import Case, lengths_of, packed_documents
from .jobs import Bench, Job, Variant, first_line, rounding
from .symmetric import Symmetric
from .timing import sampler

_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
_MOST_COPIES = 4
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it


class Suite:
    """The groups, the shared memory and the wire's rate of one run. Collective, like all its methods."""

    def __init__(self, bench: Bench, transports: Sequence[str], most_bytes: int) -> None:
        self.bench = bench
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = (
            torch.device("cpu") if bench.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
        )
        self.groups: dict[str, ShardGroup] = {}
        for transport in transports:
            try:
                self.groups[transport] = ShardGroup(transport=cast(TransportName, transport))
            except (ValueError, RuntimeError) as error:
                bench.report.say(f"transport {transport} is left out: {' '.join(str(error).split())}")
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

    def prepare(self, case: Case) -> Job:
        """The job of a case; ``size`` is cut to a multiple of the processes."""
        return _Collective(self, case).job()

    def close(self) -> None:
        """Drop what holds device memory or graphs before the process group goes."""
        self.groups.clear()
        self.symmetric = None


class _Collective:
    def __init__(self, suite: Suite, case: Case) -> None:
        self.suite, self.case, self.device = suite, case, suite.device
        count, width = suite.world_size, case.width
        self.size = case.bytes // (2 * width) // count * count
        self.chunks = intervals_of(split_evenly(self.size, count))
        if case.operation == "reduce_scatter":
            self.held = packed_documents(count, self.size, max(1, self.size // 16))
        else:
            self.held = [(0, n) for n in lengths_of(case.profile, count, self.size)]
        self.lengths = [end - begin for begin, end in self.held]
        self.shards = [self._random(n, r) for r, n in enumerate(self.lengths)]
        self.mine = self.shards[suite.rank]
        copies, self.cold = rotation(self.device.type, self.mine.nbytes, _MOST_COPIES)
        self.inputs = [self.mine.clone() for _ in range(copies)]
        self.out = self.mine.new_empty((self.size, width))
        self.want = self._sum(torch.bfloat16, self.shards)
        self.magnitude = self._sum(torch.float32, [s.abs() for s in self.shards])

    def _random(self, rows: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn((rows, self.case.width), generator=generator, device=self.device).to(torch.bfloat16)

    def _sum(self, dtype: torch.dtype, shards: list[Tensor]) -> Tensor:
        """What this process should get."""
        whole = [(0, self.size)] if self.case.operation == "all_reduce" else [self.chunks[self.suite.rank]]
        return reference.exchange(shards, self.held, whole, out_dtype=dtype)[0]

    def job(self) -> Job:
        case, suite = self.case, self.suite
        variants = [v for name, group in suite.groups.items() for v in self._ours(name, group)]
        variants += [self._theirs(dtype, name) for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"))]
        if case.operation == "all_reduce" and suite.symmetric is not None:
            padded, tolerance = self._padded(torch.bfloat16), self._tolerance(torch.bfloat16)
            variants += suite.symmetric.variants(padded, self.want, tolerance)
        facts = {
            "case": str(case),
            "operation": case.operation,
            "profile": case.profile,
            "dtype": "bf16",
            "fill": sum(self.lengths) / (suite.world_size * self.size),
            "num_virtual_ranks": suite.world_size,
            "size": self.size,
            "width": case.width,
            "processes": suite.world_size,
            "bytes": self.size * case.width * 2,
            "cold": self.cold,
        }
        poison = lambda: self.out.fill_(float("nan"))  # noqa: E731
        return Job(facts, variants, poison, [f"dist.{case.operation} bf16"], suite.wire_rate)

    def _tolerance(self, dtype: torch.dtype) -> Tensor:
        return rounding(self.want, self.magnitude, self.suite.world_size, dtype)

    # Ours

    def _ours(self, name: str, group: ShardGroup) -> list[Variant]:
        if self.case.operation == "reduce_scatter":
            scatter = lambda x: group.exchange(x, self.held, self.chunks, size=self.size)  # noqa: E731
            return [self._variant(f"shardsum {name}", group, scatter)]
        busiest = lambda: group.stats().route.busiest  # noqa: E731
        reduce = lambda x, **out: group.all_reduce(x, self.lengths, size=self.size, **out)  # noqa: E731
        variants = [self._variant(f"shardsum {name}", group, reduce)]
        if name in ("auto", "peer"):
            variants.append(self._variant(f"shardsum {name}, out=", group, lambda x: reduce(x, out=self.out)))
        if name in ("gather", "peer"):
            padded, length = self._padded(torch.bfloat16), torch.tensor([self.mine.shape[0]], device=self.device)
            on_device = lambda: group.all_reduce(padded, length, size=self.size)  # noqa: E731
            variants.append(Variant(f"shardsum {name}, device lengths", [on_device], self.want, traffic=busiest))
        return variants

    def _variant(self, name: str, group: ShardGroup, call: Callable[[Tensor], Any]) -> Variant:
        calls = [lambda x=x: call(x) for x in self.inputs]
        return Variant(name, calls, self.want, traffic=lambda: group.stats().route.busiest)

    # Theirs

    def _padded(self, dtype: torch.dtype) -> Tensor:
        begin, end = self.held[self.suite.rank]
        padded = torch.zeros((self.size, self.case.width), dtype=dtype, device=self.device)
        padded[begin:end] = self.mine.to(dtype)
        return padded

    def _theirs(self, dtype: torch.dtype, name: str) -> Variant:
        """On the padded buffer; its bytes are the ring's."""
        padded, others = self._padded(dtype), self.suite.world_size - 1
        part = padded.nbytes // self.suite.world_size
        tolerance = self._tolerance(dtype)
        if self.case.operation == "reduce_scatter":
            out = padded.new_full(self.want.shape, float("nan"))
            scatter = lambda: (_reduce_scatter(out, padded), out)[1]  # noqa: E731
            return Variant(f"dist.reduce_scatter {name}", [scatter], self.want, tolerance, wire_bytes=others * part)
        work = padded.clone()

        def once() -> Tensor:
            dist.all_reduce(work)
            return work

        return Variant(
            f"dist.all_reduce {name}",
            [lambda: dist.all_reduce(work)],
            self.want,
            tolerance,
            once=once,
            wire_bytes=2 * others * part,
        )
