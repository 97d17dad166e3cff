"""Attention over a chunk's own documents while the keys of the one that straddles its border travel: what it gives.

    RATE=1gbit NPROC=1 benchmarks/two_hosts.sh benchmarks/context_overlap.py

One attention layer, forward and backward, contiguous chunks, one a process, on two emulated hosts
(benchmarks/two_hosts.sh). "in turn" is what the library does: K and V arrive, then all documents attend; all dK and dV,
then those of others leave. "overlapped": documents that lie wholly in the chunk attend while K and V travel, and their
backward runs while dK and dV of the first document travel. Both have the same bits, which is checked. "exchanges" and
"own documents" are timed alone: less than the smaller of the two can be gained. Milliseconds, medians of the slowest
process, ways in turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from context_cases import packed_borders
from context_main import main
from context_meter import Meter
from torch import Tensor

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.tools.bench.timing import turns
from shardsum.training.context_kernels import backward, forward
from shardsum.training.context_plan import Chunk
from shardsum.training.documents import CAUSAL, ChunkPlan


class Layer:
    """q, k, v and a cotangent of this process's chunk, and the ways to run it. K and V travel as one."""

    def __init__(self, size: int, mean: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.group = ShardGroup()
        self.cp = self.group.context_parallel(None, packed_borders(size, mean))
        (self.chunk,), generator = self.cp.chunks, torch.Generator().manual_seed(self.group.rank)
        shapes = [(self.chunk.rows, heads, dim), (self.chunk.rows, 2, key_heads, dim), (self.chunk.rows, heads, dim)]
        self.q, self.kv, self.g = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
        plan = self.cp.plan
        common = {"row_shape": self.kv.shape[1:], "dtype": dtype, "size": size}
        self.keys = self.group.plan("exchange", in_intervals=plan.owned, out_intervals=plan.needed, **common)
        # Of each chunk's first document, where it began before the chunk: what arrives, and what goes back.
        first = [(n, min(o[0], n + p.segments[0][1])) for (n, _), o, p in zip(plan.needed, plan.owned, plan.plans)]
        self.first = self.group.plan("exchange", in_intervals=plan.owned, out_intervals=first, **common)
        self.back = self.first.adjoint
        (n, m), begin = self.chunk.plan.segments[0], self.chunk.plan.chunk[0]
        self.straddles = m > n
        self.cut = n if self.straddles else 0
        parts = [((begin, begin + n), (begin + n - m, begin + n), ((n, m),))] if self.straddles else []
        own = (begin + self.cut, self.chunk.plan.chunk[1])
        parts.append((own, own, self.chunk.plan.segments[1 if self.straddles else 0 :]))
        self.parts = [Chunk(ChunkPlan(*part), CAUSAL) for part in parts]

    def in_turn(self) -> list[Tensor]:
        keys = self.keys(self.kv)
        out, lse = forward(self.q, *keys.unbind(1), self.chunk, None)
        dq, dk, dv = backward(self.g, self.q, *keys.unbind(1), out, lse, self.chunk, None)
        return [out, dq, self.keys.adjoint(torch.stack([dk, dv], 1))]

    def own_documents(self) -> tuple[Tensor, ...]:
        rows = slice(self.cut, None)
        k, v = self.kv[rows].unbind(1)
        out, lse = forward(self.q[rows], k, v, self.parts[-1], None)
        return out, *backward(self.g[rows], self.q[rows], k, v, out, lse, self.parts[-1], None)

    def exchanges(self) -> None:
        self.back(self.first(self.kv))

    def overlapped(self) -> list[Tensor]:
        rows, first = slice(self.cut, None), slice(self.cut)
        k, v = self.kv[rows].unbind(1)
        arriving = self.first.start(self.kv)
        out, lse = forward(self.q[rows], k, v, self.parts[-1], None)
        before = arriving.wait()
        outs, grads, received = [out], [], before
        if self.straddles:
            keys = torch.cat([before, self.kv[first]])
            some, log = forward(self.q[first], *keys.unbind(1), self.parts[0], None)
            dq, dk, dv = backward(self.g[first], self.q[first], *keys.unbind(1), some, log, self.parts[0], None)
            both = torch.stack([dk, dv], 1)
            outs, grads, received = [some, out], [dq], both[: len(before)]
        leaving = self.back.start(received.contiguous())
        dq, dk, dv = backward(self.g[rows], self.q[rows], k, v, out, lse, self.parts[-1], None)
        own = torch.stack([dk, dv], 1)
        own = torch.cat([both[len(before) :], own]) if self.straddles else own
        return [torch.cat(outs), torch.cat([*grads, dq]), leaving.wait().add_(own)]


def run(args: argparse.Namespace, device: torch.device) -> None:
    meter = Meter(device, args.samples, 0)
    for mean in args.means:
        layer = Layer(args.size, mean, args.heads, args.key_heads, args.head_dim, torch.float32)
        for a, b in zip(layer.in_turn(), layer.overlapped()):
            assert bits.equal(a, b), bits.first_difference(a, b)
        ways: dict[str, Callable[[], object]] = {
            name: getattr(layer, name.replace(" ", "_"))
            for name in ("in turn", "overlapped", "exchanges", "own documents")
        }
        times = turns({name: partial(meter.seconds, way) for name, way in ways.items()}, args.samples)
        if dist.get_rank() == 0:
            said = "; ".join(f"{n} {1e3 * t.median:.1f} [{1e3 * t.least:.1f}]" for n, t in times.items())
            print(f"{os.environ.get('RATE', 'no limit')}, documents of mean {mean}: {said}", flush=True)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--size", type=int, default=2048, help="positions")
    parser.add_argument("--means", type=int, nargs="+", default=[64, 256, 1024], help="mean lengths of the documents")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=15)
    return parser.parse_args(words)


if __name__ == "__main__":
    main(arguments(), run)
