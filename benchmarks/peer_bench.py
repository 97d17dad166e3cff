"""The peer transport against NCCL and torch's symmetric-memory operations, one process a GPU, in one run.

    torchrun --nproc-per-node=2 benchmarks/peer_bench.py --json benchmarks/results/peer_h200x2.json
    torchrun --nproc-per-node=2 benchmarks/peer_bench.py --sweep          # launch shapes, for peer_plan.Tuning

Every row is verified before it is timed: ours bit for bit against reference.py, the others within their own rounding.
Times are microseconds per call inside a CUDA graph of many calls, buffers rotating, the slowest process of the median
over replays; "host" is the time one eager call with out= takes on the host. Profiles give each process's valid share of
the padded buffer; NCCL and torch move the padded buffer, ours what is valid. "documents" is a reduce_scatter of packed
documents (a chunk's gradient reaches back to the start of its oldest document), against the padded reduce_scatter.
"load rate" is what multiprocessors read from a peer's memory, both ways at once: the ceiling of what ours can reach.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from shardsum.core import bits, reference
from shardsum.core.layout import ExchangePlan, Interval, intervals_of, split_evenly
from shardsum.local.functional import ragged_sum
from shardsum.native import loader as native
from shardsum.transports.peer.operators import peer_call
from shardsum.transports.peer.transport import PeerTransport, Tuning

WIDTH = 512  # bf16 elements a position: 1 KiB
SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


@dataclass
class Row:
    bytes: int
    profile: str
    variant: str
    us: float
    host_us: float | None
    gbps: float  # bytes of the busiest link over the time
    wrong: str


class Bench:
    def __init__(self, sizes: Sequence[int], repeat: int, tuning: Tuning) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.sizes, self.repeat = torch.device("cuda", self.rank), sizes, repeat
        self.side = dist.new_group(backend="gloo")
        self.owners = tuple(range(self.world_size))
        self.peer = PeerTransport(dist.group.WORLD, self.owners, self.device, timeout=20, tuning=tuning)
        self.peer.set_up()
        self.rows: list[Row] = []

    # Timing

    def us(self, fn: Callable[[int], None], moved: int) -> float:
        """Microseconds a call in a CUDA graph; ``fn(i)`` is the i-th call."""
        calls = max(4, min(40, int(2e9 / max(moved, 1 << 20) / 10)))
        for i in range(3):
            fn(i)
        torch.cuda.synchronize()
        dist.barrier(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                fn(i)
        times = []
        for i in range(self.repeat + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier(self.side)
            graph.replay()  # brings the processes together
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end) * 1e3 / calls)
        return self.slowest(statistics.median(times))

    def host_us(self, fn: Callable[[int], None], calls: int = 50) -> float:
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            dist.barrier(self.side)
            begin = time.perf_counter()
            for i in range(calls):
                fn(i)
            times.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
        return self.slowest(statistics.median(times))

    def slowest(self, value: float) -> float:
        everyone = torch.zeros(self.world_size, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, torch.tensor([value], dtype=torch.float64), group=self.side)
        return float(everyone.max())

    def add(
        self, size: int, profile: str, variant: str, fn: Callable[[int], None], moved: int, wrong: str = "0",
        host: bool = False,
    ) -> float:  # fmt: skip
        us = self.us(fn, moved)
        row = Row(size, profile, variant, us, self.host_us(fn) if host else None, moved / us / 1e3, wrong)
        self.rows.append(row)
        if self.rank == 0:
            eager = "" if row.host_us is None else f"{row.host_us:7.1f}"
            print(f"{size:>10} {profile:10} {variant:28} {us:9.2f} {eager:>7} {row.gbps:8.1f} {wrong:>8}", flush=True)
        return us

    # Ours

    def shard(self, rows: int, rank: int, seed: int = 0) -> Tensor:
        g = torch.Generator(device=self.device).manual_seed(1000 * seed + rank)
        return torch.randn((rows, WIDTH), generator=g, device=self.device).to(torch.bfloat16)

    def differing(self, actual: Tensor, expected: Tensor) -> str:
        found = bits.first_difference(actual, expected)
        return "0" if found is None else f"{found.count}!"

    def ours(
        self, size: int, profile: str, lengths: list[int], variant: str, two_shot: bool | None, host: bool
    ) -> None:
        """all_reduce of rows of ``lengths``, inputs rotating over several buffers."""
        positions = size // (2 * WIDTH)
        plan = ExchangePlan(
            tuple((0, n) for n in lengths), self.owners, ((0, positions),) * self.world_size, self.owners,
            self.world_size,
        )  # fmt: skip
        call = self.peer.prepare(plan, WIDTH, torch.bfloat16, torch.bfloat16, two_shot=two_shot)
        copies = 3
        mine = [self.shard(lengths[self.rank], self.rank, s) for s in range(copies)]
        outs = [torch.empty((positions, WIDTH), dtype=torch.bfloat16, device=self.device) for _ in range(copies)]
        bounds = (0, lengths[self.rank])
        wrong = "0"
        for s in range(copies):
            outs[s].fill_(float("nan"))
            call([outs[s]], [mine[s]], bounds)
            rows = [self.shard(n, r, s) for r, n in enumerate(lengths)]
            expected = reference.ragged_sum(rows, [0] * len(lengths), positions, out_dtype=torch.bfloat16)
            wrong = self.differing(outs[s], expected) if wrong == "0" else wrong
        row_bytes = max(lengths) * WIDTH * 2
        moved = (self.world_size - 1) * row_bytes
        if call.shape.two_shot:
            moved = 2 * (self.world_size - 1) * row_bytes // self.world_size  # zeros do not travel
        bound = call.bind(bounds, (WIDTH,))
        run = lambda i: peer_call(outs[i % copies], mine[i % copies], bound)  # noqa: E731
        self.add(size, profile, f"peer {variant}", run, moved, wrong, host)

    # Theirs

    def padded(self, size: int, lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """This process's padded buffer, and the sum in float64."""
        positions = size // (2 * WIDTH)
        rows = [self.shard(n, r) for r, n in enumerate(lengths)]
        mine = torch.zeros((positions, WIDTH), dtype=dtype, device=self.device)
        mine[: lengths[self.rank]] = rows[self.rank].to(dtype)
        exact = torch.zeros((positions, WIDTH), dtype=torch.float64, device=self.device)
        for row in rows:
            exact[: row.shape[0]] += row.double()
        return mine, exact

    def close(self, actual: Tensor, exact: Tensor) -> str:
        """The largest error, which must be rounding."""
        error = float((actual.double() - exact).abs().max()) if exact.numel() else 0.0
        assert error < 0.1 * self.world_size, error
        return f"{error:.0e}"

    def theirs(self, size: int, profile: str, lengths: list[int], host: bool) -> None:
        ring = 2 * (self.world_size - 1) * size // self.world_size
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            x, exact = self.padded(size, lengths, dtype)
            check = x.clone()
            dist.all_reduce(check)
            wrong, work = self.close(check, exact), torch.zeros_like(x)
            run = lambda i, w=work: dist.all_reduce(w)  # noqa: E731
            self.add(size, profile, f"NCCL all_reduce {name}", run, ring * dtype.itemsize // 2, wrong, host)
        self.gather_and_sum(size, profile, lengths)
        self.all_to_all_and_sum(size, profile, lengths)
        self.torch_symmetric(size, profile, lengths, ring, host)

    def gather_and_sum(self, size: int, profile: str, lengths: list[int]) -> None:
        x, exact = self.padded(size, lengths, torch.bfloat16)
        everyone = x.new_empty((self.world_size, *x.shape))
        out = torch.empty_like(x)

        def run(i: int) -> None:
            dist.all_gather_into_tensor(everyone.view(-1, WIDTH), x)
            ragged_sum(everyone, lengths, out=out)

        run(0)
        wrong = self.differing(out, exact.float().to(torch.bfloat16)) if self.world_size == 2 else "-"
        self.add(size, profile, "NCCL all_gather + kernel", run, (self.world_size - 1) * size, wrong)

    def all_to_all_and_sum(self, size: int, profile: str, lengths: list[int]) -> None:
        x, exact = self.padded(size, lengths, torch.bfloat16)
        if x.shape[0] % self.world_size:
            return
        part = x.shape[0] // self.world_size
        received, out = torch.empty_like(x), torch.empty_like(x)
        mine = out[self.rank * part : (self.rank + 1) * part]
        whole = [part] * self.world_size

        def run(i: int) -> None:
            dist.all_to_all_single(received, x)
            ragged_sum(received.view(self.world_size, part, WIDTH), whole, out=mine)
            dist.all_gather_into_tensor(out, mine)

        run(0)
        wrong = self.differing(out, exact.float().to(torch.bfloat16)) if self.world_size == 2 else "-"
        moved = 2 * (self.world_size - 1) * size // self.world_size
        self.add(size, profile, "NCCL all_to_all + kernel + ag", run, moved, wrong)

    def torch_symmetric(self, size: int, profile: str, lengths: list[int], ring: int, host: bool) -> None:
        x, exact = self.padded(size, lengths, torch.bfloat16)
        buffer, out, name = self.torch_buffer[: x.numel()], torch.empty_like(x).view(-1), dist.group.WORLD.group_name
        buffer.copy_(x.view(-1))
        ops = torch.ops.symm_mem
        one = lambda i: ops.one_shot_all_reduce_out(buffer, "sum", name, out)  # noqa: E731
        copy = lambda i: ops.one_shot_all_reduce_copy_out(buffer, x.view(-1), "sum", name, out)  # noqa: E731
        two = lambda i: ops.two_shot_all_reduce_(buffer, "sum", name)  # noqa: E731
        for label, run, moved, result in (
            ("torch one-shot", one, (self.world_size - 1) * size, out),
            ("torch one-shot copy", copy, (self.world_size - 1) * size, out),
            ("torch two-shot (in place)", two, ring, buffer),
        ):
            try:
                dist.barrier(self.side)
                run(0)
                torch.cuda.synchronize()
                wrong = self.close(result, exact.view(-1))
                buffer.zero_()
                self.add(size, profile, label, run, moved, wrong, host)
            except (RuntimeError, TypeError) as error:
                if self.rank == 0:
                    print(f"{label} does not run: {str(error).splitlines()[0]}", flush=True)

    # Runs

    def load_rate(self, size: int = 256 << 20) -> float:
        """GB/s that an elementwise kernel reads from a peer while it is read from."""
        n = size // 4
        memory = symmetric.empty(n, dtype=torch.int32, device=self.device).zero_()
        handle = symmetric.rendezvous(memory, dist.group.WORLD)
        peer = handle.get_buffer((self.rank + 1) % self.world_size, (n,), torch.int32)
        out = torch.empty(n, dtype=torch.int32, device=self.device)
        us = self.us(lambda i: torch.bitwise_not(peer, out=out), size)
        rate = size / us / 1e3
        if self.rank == 0:
            print(f"load rate: {rate:.1f} GB/s a direction", flush=True)
        return rate

    def documents(self, size: int) -> None:
        """Packed documents of a mean length of an eighth of the sequence; R = G chunks."""
        positions = size // (2 * WIDTH)
        pick, cuts, at = random.Random(7), [0], 0
        while at < positions:
            at = min(positions, at + max(1, int(pick.expovariate(8 / positions))))
            cuts.append(at)
        chunks = intervals_of(split_evenly(positions, self.world_size))
        held = [(max(c for c in cuts if c <= b), e) for b, e in chunks]
        self.reduce_scatter(size, "documents", held, chunks)

    def reduce_scatter(self, size: int, profile: str, held: list[Interval], chunks: list[Interval]) -> None:
        plan = ExchangePlan(tuple(held), self.owners, tuple(chunks), self.owners, self.world_size)
        call = self.peer.prepare(plan, WIDTH, torch.bfloat16, torch.bfloat16)
        rows = [self.shard(e - b, r) for r, (b, e) in enumerate(held)]
        (begin, end), mine = held[self.rank], chunks[self.rank]
        out = torch.empty((mine[1] - mine[0], WIDTH), dtype=torch.bfloat16, device=self.device)
        run = lambda i: call([out], [rows[self.rank]], (begin, end - begin))  # noqa: E731
        run(0)
        expected = reference.exchange(rows, held, chunks, out_dtype=torch.bfloat16)[self.rank]
        moved = max(plan.egress(a) for a in self.owners) * 2 * WIDTH
        self.add(size, profile, "peer reduce_scatter", run, max(moved, 1), self.differing(out, expected))
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            padded = torch.zeros((chunks[-1][1], WIDTH), dtype=dtype, device=self.device)
            part = torch.empty((padded.shape[0] // self.world_size, WIDTH), dtype=dtype, device=self.device)
            whole = padded[: part.shape[0] * self.world_size]
            scatter = lambda i, p=part, w=whole: dist.reduce_scatter_tensor(p, w)  # noqa: E731
            moved = part.numel() * dtype.itemsize * (self.world_size - 1)
            self.add(size, profile, f"NCCL reduce_scatter {name}", scatter, moved, "-")

    def run(self) -> float:
        most = max(self.sizes)
        self.torch_buffer = symmetric.empty(most // 2, dtype=torch.bfloat16, device=self.device)
        symmetric.rendezvous(self.torch_buffer, dist.group.WORLD)
        rate = self.load_rate()
        for size in self.sizes:
            positions = size // (2 * WIDTH)
            host = size <= 1 << 20
            for profile, shares in (("1.0", [1.0]), ("0.5 even", [0.5]), ("0.7, 0.3", [0.7, 0.3])):
                if profile != "1.0" and not 4 << 20 <= size <= 64 << 20:
                    continue
                lengths = [int(positions * shares[r % len(shares)]) for r in range(self.world_size)]
                if size <= self.peer.layout.push_limit:
                    self.ours(size, profile, lengths, "pushed", None, host)
                elif self.peer.layout.streams:
                    self.ours(size, profile, lengths, "streamed", None, host)
                elif self.world_size == 2:
                    self.ours(size, profile, lengths, "read", None, host)
                if self.world_size > 2:
                    self.ours(size, profile, lengths, "one-shot", False, False)
                    self.ours(size, profile, lengths, "two-shot", True, host)
                if profile == "1.0":
                    self.theirs(size, profile, lengths, host)
            if 4 << 20 <= size <= 64 << 20:
                self.documents(size)
        return rate

    def sweep(self) -> None:
        """Times of ours over launch shapes."""
        for size in self.sizes:
            lengths = [size // (2 * WIDTH)] * self.world_size
            writes = self.peer.layout.writes or self.world_size > 2
            for producers, pieces, stretches in product((1, 2, 3), (4, 8, 16) if writes else (0,), (2, 4, 8, 16)):
                shape = dict(write_pieces=pieces, write_stretches=stretches) if writes else dict(stretches=stretches)
                tuning = Tuning(producer_warps=producers, one_producer_bytes=0, **shape)
                self.peer.layout = replace(self.peer.layout, tuning=tuning)
                self.peer._calls.clear()
                self.ours(size, f"{producers}/{pieces}/{stretches}", lengths, "shape", None, False)
        for size in (64 << 10, 256 << 10, 1 << 20):
            self.peer.layout = replace(self.peer.layout, tuning=Tuning())
            lengths = [size // (2 * WIDTH)] * self.world_size
            self.ours(size, "1.0", lengths, "pushed", None, False)
            self.ours(size, "1.0", lengths, "one-shot", False, False)
            if self.world_size > 2:
                self.ours(size, "1.0", lengths, "two-shot", True, False)


def write(path: Path, bench: Bench, rate: float) -> None:
    properties = torch.cuda.get_device_properties(bench.device)
    facts = {
        "date": date.today().isoformat(),
        "gpu": properties.name,
        "gpus": bench.world_size,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"),
        "tuning": repr(bench.peer.layout.tuning),
        "load_rate_gbps": rate,
        "rows": [asdict(row) for row in bench.rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--tuning", default="{}", help="fields of peer_plan.Tuning as a JSON object")
    args = parser.parse_args()
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit("peer_bench: needs a GPU for every process")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    native.load()
    tuning = Tuning(**json.loads(args.tuning))
    bench = Bench(args.sizes, args.repeat, tuning)
    if bench.rank == 0:
        print(f"{'bytes':>10} {'profile':10} {'variant':28} {'us':>9} {'host':>7} {'GB/s':>8} {'wrong':>8}", flush=True)
    rate = 0.0
    if args.sweep:
        bench.sweep()
    else:
        rate = bench.run()
    if args.json is not None and bench.rank == 0:
        write(args.json, bench, rate)
    bench.peer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
