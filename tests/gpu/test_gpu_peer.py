"""The peer transport on GPUs, against reference.py bit for bit.

The `gpu` tests run four processes on however many GPUs there are (where several share one, kernels that wait for each
other take turns, so every call costs milliseconds); the `multi_gpu` tests two processes, each on a GPU. The protocol
itself is put under load by tests/peer/cuda/peer_stress.cu.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum.core import reference
from shardsum.core.layout import ExchangePlan, intervals_of, length, owners_of, split_evenly
from shardsum.core.numerics import accumulator_dtype
from shardsum.transports.peer.transport import PeerTransport
from shardsum.transports.peer.tuning import Tuning
from tests.gpus import needs_gpus
from tests.processes import run_processes
from tests.values import assert_same, random_values

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CALLS = int(os.environ.get("SHARDSUM_PEER_CALLS", "120"))


def open_transport(rank: int, num_ranks: int, placement: Any = "contiguous", **options: Any) -> PeerTransport:
    device = torch.device("cuda", torch.cuda.current_device())
    owners = owners_of(num_ranks, dist.get_world_size(), placement)
    transport = PeerTransport(dist.group.WORLD, owners, device, timeout=60, **options)
    transport.set_up()  # not amid a capture
    return transport


class RandomCalls:
    """The same random collectives on every process, each compared with reference.py."""

    def __init__(self, transport: PeerTransport, seed: int) -> None:
        self.t, self.random = transport, random.Random(seed)
        self.ranks = len(transport.owners)

    def run(self) -> None:
        pick = self.random
        kind = pick.choice(["all_reduce", "all_reduce", "reduce_scatter", "exchange", "all_gather"])
        dtype = pick.choice([torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int16, torch.bool])
        width = pick.choice([1, 3, 8, 64, 200])
        size = pick.randrange(1, 2 + pick.choice([50, 5000, 60000]) // width)
        op = pick.choice(["sum", "mean"]) if dtype.is_floating_point else "sum"
        scale = pick.choice([None, 0.3]) if dtype.is_floating_point else None
        out_dtype = torch.int64 if not dtype.is_floating_point else dtype
        if accumulator_dtype(dtype) == torch.float32:
            out_dtype = pick.choice([dtype, torch.float32, torch.bfloat16])
        on_device = kind == "all_reduce" and pick.random() < 0.3
        sources = [self._interval(size) for _ in range(self.ranks)]
        if on_device:
            sources = [(0, end) for _, end in sources]
        sinks, sink_owners = [(0, size)] * self.t.world_size, tuple(range(self.t.world_size))
        if kind in ("reduce_scatter", "exchange"):
            sinks, sink_owners = intervals_of(split_evenly(size, self.ranks)), self.t.owners
        if kind == "exchange":
            sinks = [self._interval(size) for _ in range(self.ranks)]
        if kind == "all_gather":
            op, scale, out_dtype = "copy", None, dtype
            sources = intervals_of([length(i) for i in sources])
            sinks = [(0, sources[-1][1])] * self.t.world_size
        plan = ExchangePlan(tuple(sources), self.t.owners, tuple(sinks), sink_owners, self.t.world_size)
        shards = [random_values((length(i), width), dtype, pick.randrange(1 << 30)) for i in sources]
        if dtype.is_floating_point and pick.random() < 0.3:  # NaNs like words that have not come
            for s in shards:
                s.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[s.itemsize])[
                    torch.rand(s.shape, generator=torch.Generator().manual_seed(size)) < 0.2
                ] = -1
        self._call(plan, shards, dtype, out_dtype, op, scale, on_device, pick.randrange(4))

    def _interval(self, size: int) -> tuple[int, int]:
        a, b = sorted(self.random.randrange(size + 1) for _ in range(2))
        return self.random.choice([(a, b), (0, b), (0, size)])

    def _call(
        self, plan: ExchangePlan, shards: list[torch.Tensor], dtype: torch.dtype, out_dtype: torch.dtype, op: str,
        scale: float | None, on_device: bool, shift: int,
    ) -> None:  # fmt: skip
        t, hosted, width = self.t, plan.hosted_sources(self.t.rank), shards[0].shape[1]
        mine = [self._place(shards[r], shift) for r in hosted]
        sinks = plan.hosted_sinks(t.rank)
        flat = [torch.empty(length(plan.sinks[q]) * width + shift, dtype=out_dtype, device=t.device) for q in sinks]
        outs = [x[shift:].view(-1, width) for x in flat]
        lengths = None
        if on_device:
            lengths = torch.tensor([length(plan.sources[r]) for r in hosted], device=t.device)
        t.exchange(plan, mine, outs, op=op, scale=scale, lengths=lengths)
        for q, out in zip(sinks, outs):
            assert_same(out.cpu(), self._expected(plan, shards, plan.sinks[q], out_dtype, op, scale))

    def _place(self, shard: torch.Tensor, shift: int) -> torch.Tensor:
        moved = torch.empty(shard.numel() + shift, dtype=shard.dtype, device=self.t.device)
        return moved[shift:].view(shard.shape).copy_(shard)

    @staticmethod
    def _expected(
        plan: ExchangePlan, shards: list[torch.Tensor], wanted: tuple[int, int], out_dtype: torch.dtype, op: str,
        scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        begin, end = wanted
        if op == "copy":
            return torch.cat(shards)[begin:end]
        starts = [i[0] - begin for i in plan.sources]
        return reference.ragged_sum(shards, starts, end - begin, op=op, scale=scale, out_dtype=out_dtype)


def _random_calls(rank: int, world_size: int, num_ranks: int, placement: Any, calls: int, options: dict) -> int:
    t = open_transport(rank, num_ranks, placement, **options)
    tests = RandomCalls(t, num_ranks)
    for _ in range(calls):
        tests.run()
    launches = int(t.set_up()._control[0])
    t.close()
    return launches


#: Small slots, pieces and inboxes, so that all happens at test sizes: rows are read, in two shots as soon as that saves
#: anything; or they are written; or, of floats, pushed while they are summed.
PIECES = Tuning(
    small_bytes=4096, blocks=4, push_bytes={0: 8192}, stretches=4, columns=2, write_stretches=2, stream_processes=0,
    one_producer_bytes=32768,
)  # fmt: skip
READ = dict(staging_bytes=1 << 18, tuning=replace(PIECES, two_shot_bytes={0: 2000}, write_processes=0))
WRITE = dict(staging_bytes=1 << 18, tuning=replace(PIECES, two_shot_bytes={0: 1 << 60}, write_processes=64))
STREAM = dict(
    staging_bytes=1 << 18,
    tuning=replace(PIECES, two_shot_bytes={0: 1 << 60}, write_processes=64, stream_processes=64),
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "num_ranks, placement, options", [(4, "contiguous", READ), (7, "zigzag", WRITE), (5, "zigzag", STREAM)]
)
def test_random_calls_of_processes_that_share_gpus(num_ranks: int, placement: str, options: dict) -> None:
    launches = run_processes(_random_calls, 4, num_ranks, placement, CALLS, options, backend="cpu:gloo", timeout=240)
    assert len(set(launches)) == 1 and launches[0] >= CALLS


@needs_gpus(2)
@pytest.mark.parametrize("num_ranks, options", [(2, {}), (8, READ), (5, WRITE), (2, STREAM), (5, STREAM)])
def test_random_calls_one_process_a_gpu(num_ranks: int, options: dict) -> None:
    run_processes(_random_calls, 2, num_ranks, "zigzag", 4 * CALLS, options, backend="cpu:gloo", timeout=240)


def _graph(rank: int, world_size: int, replays: int) -> int:
    """Capture, then replays whose lengths change on the device; captured calls cross streams and need a warm-up."""
    t = open_transport(rank, world_size)
    size, width = 300, 16
    plan = ExchangePlan(((0, size),) * world_size, t.owners, ((0, size),) * world_size, t.owners, world_size)
    shards = [random_values((size, width), torch.bfloat16, r) for r in range(world_size)]
    mine, lengths = shards[rank].to(t.device), torch.zeros(1, dtype=torch.int64, device=t.device)
    out = torch.empty((size, width), dtype=torch.bfloat16, device=t.device)

    def call() -> None:
        t.exchange(plan, [mine], [out], lengths=lengths)

    with pytest.raises(RuntimeError, match="one eager call first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()
    call()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    history = torch.empty((3, size, width), dtype=torch.bfloat16, device=t.device)
    with torch.cuda.graph(graph):
        call()
        call()  # begins while the one before it ends
        history[0] = out
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            history[1] = out
        torch.cuda.current_stream().wait_stream(side)
        call()
        history[2] = out
    pick, wrong = random.Random(5), 0
    for _ in range(replays):
        chosen = [pick.randrange(-3, size + 9) for _ in range(world_size)]
        lengths.fill_(chosen[rank])
        if pick.random() < 0.1:
            time.sleep(pick.random() * 1e-3 * (rank + 1))
        graph.replay()
        rows = [s[: max(0, n)] for s, n in zip(shards, chosen)]
        expected = reference.ragged_sum(rows, [0] * world_size, size, out_dtype=torch.bfloat16).to(t.device)
        for found in history:  # NaN may differ in its bits, as may nothing else
            wrong += int(not torch.equal(found.nan_to_num(7e7), expected.nan_to_num(7e7)))
    call()  # eager again, after the capture
    torch.cuda.synchronize()
    t.check()
    t.close()
    return wrong


@pytest.mark.gpu
@needs_gpu
def test_graph_replays_follow_device_lengths() -> None:
    assert run_processes(_graph, 4, 100, backend="cpu:gloo", timeout=240) == [0] * 4


@needs_gpus(2)
def test_a_thousand_graph_replays_follow_device_lengths() -> None:
    assert run_processes(_graph, 2, 1000, backend="cpu:gloo", timeout=240) == [0] * 2


def _streams(rank: int, world_size: int) -> None:
    """Calls from changing streams come one after another, and after a call its input may be rewritten."""
    t = open_transport(rank, world_size)
    n = 1 << 18
    plan = ExchangePlan(((0, n),) * world_size, t.owners, ((0, n),) * world_size, t.owners, world_size)
    x, streams = torch.empty(n, device=t.device), [torch.cuda.Stream() for _ in range(3)]
    outs = [torch.empty(n, device=t.device) for _ in range(30)]
    x.zero_()
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        stream = streams[i % 3]
        stream.wait_stream(streams[(i - 1) % 3])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20000 * (i % 2 == rank % 2))
            x.fill_(i + rank)
            t.exchange(plan, [x], [out])
            x.fill_(-1e9)  # at once
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert_same(out.cpu(), torch.full((n,), float(world_size * i + sum(range(world_size)))))
    t.close()


@pytest.mark.gpu
@needs_gpu
def test_calls_on_changing_streams() -> None:
    run_processes(_streams, 4, backend="cpu:gloo", timeout=240)


@needs_gpus(2)
def test_calls_on_changing_streams_on_two_gpus() -> None:
    run_processes(_streams, 2, backend="cpu:gloo", timeout=240)


def _absent(rank: int, world_size: int) -> str:
    """The last process skips the second call: everybody hears who is missing, soon, and nothing is wrong or hangs."""
    device = torch.device("cuda", torch.cuda.current_device())
    t = PeerTransport(dist.group.WORLD, tuple(range(world_size)), device, timeout=3)
    n = 10000
    plan = ExchangePlan(((0, n),) * world_size, t.owners, ((0, n),) * world_size, t.owners, world_size)
    x, out = torch.ones(n, device=device), torch.zeros(n, device=device)
    t.exchange(plan, [x], [out])
    torch.cuda.synchronize()
    assert bool((out == world_size).all())
    begin = time.monotonic()
    if rank == world_size - 1:
        time.sleep(6)
        t.exchange(plan, [x], [out])  # too late
        torch.cuda.synchronize()
    else:
        t.exchange(plan, [x], [out])
        torch.cuda.synchronize()
    assert time.monotonic() - begin < 20 and bool(out.isnan().all())
    with pytest.raises(RuntimeError, match=f"process {world_size - 1} did not come within 3 s.*of launch 2"):
        t.exchange(plan, [x], [out])
    with pytest.raises(RuntimeError) as caught:
        t.check()
    t.close()
    return str(caught.value)


@pytest.mark.gpu
@needs_gpu
def test_a_process_that_never_comes_is_named() -> None:
    for message in run_processes(_absent, 3, backend="cpu:gloo", timeout=120):
        assert "process 2 did not come" in message


@needs_gpus(2)
def test_a_process_that_never_comes_is_named_on_two_gpus() -> None:
    run_processes(_absent, 2, backend="cpu:gloo", timeout=120)
