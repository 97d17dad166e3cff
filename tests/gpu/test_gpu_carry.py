"""Carried accumulators on GPUs, against the CPU's loops bit for bit.

Over NCCL on two GPUs that are declared two domains, and on four, where each domain folds over peer memory; or four
processes on one GPU, in two domains that do so: what travels between them goes through the host there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import intervals_of, length, split_evenly
from shardsum.transports import Stamp, TaggedWire, Wire
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)


def gpus(count: int) -> Any:
    few = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
    return lambda test: pytest.mark.multi_gpu(few(test))


def sums(rank: int, world: int, ranks: int, placement: str, domains: list) -> None:
    group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement)
    for dtype in DTYPES:
        for size, features in ((33, (5,)), (5000, (64,))):
            lengths = [size if r % 3 else size * r // ranks for r in range(ranks)]
            shards = [random_values((n, *features), dtype, r) for r, n in enumerate(lengths)]
            op = "mean" if dtype.is_floating_point else "sum"
            out_dtype = dtype if dtype.is_floating_point else torch.int64
            sinks = intervals_of(split_evenly(size, ranks))
            sources = [(0, n) for n in lengths]
            want = reference.exchange(shards, sources, [(0, size), *sinks], op=op, out_dtype=out_dtype)
            mine = [shards[v].cuda() for v in group.virtual_ranks]
            assert_same(group.all_reduce(mine, lengths, size=size, op=op), want[0])
            assert group.stats().route.transport == "carry"
            for v, y in zip(group.virtual_ranks, group.reduce_scatter(mine, lengths, size=size, op=op)):
                assert_same(y, want[1 + v])
    group.close()


@gpus(2)
@pytest.mark.parametrize(("ranks", "placement"), [(4, "contiguous"), (8, "zigzag"), (16, "contiguous")])
def test_the_bits_of_the_definition(ranks: int, placement: str) -> None:
    run_processes(sums, 2, ranks, placement, ["a", "b"], backend="nccl", timeout=150)


@gpus(4)
@pytest.mark.parametrize(("ranks", "placement"), [(4, "contiguous"), (8, "zigzag"), (16, "contiguous")])
def test_the_bits_of_domains_that_fold_over_peer_memory(ranks: int, placement: str) -> None:
    run_processes(sums, 4, ranks, placement, [0, 0, 1, 1], backend="nccl", timeout=150)


def captured(rank: int, world: int, domains: list) -> None:
    """Point-to-point transfers inside a CUDA graph: replays follow the shards that they find."""
    group = ShardGroup(8, transport="carry", domains=domains)
    lengths = [4000] * 8
    mine = [torch.zeros(4000, 16, dtype=torch.bfloat16, device="cuda") for _ in group.virtual_ranks]
    plan = group.plan("all_reduce", lengths, row_shape=(16,), dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            plan(mine)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan(mine)
    for i in range(20):
        shards = [random_values((4000, 16), torch.bfloat16, 100 * i + r) for r in range(8)]
        for x, v in zip(mine, group.virtual_ranks):
            x.copy_(shards[v])
        graph.replay()
        assert_same(out, reference.ragged_sum(shards, [0] * 8, 4000, out_dtype=torch.bfloat16))


@gpus(2)
def test_a_cuda_graph_replays_it() -> None:
    run_processes(captured, 2, ["a", "b"], backend="nccl", timeout=150)


@gpus(4)
def test_a_cuda_graph_replays_folds_over_peer_memory() -> None:
    run_processes(captured, 4, [0, 0, 1, 1], backend="nccl", timeout=150)


class ThroughTheHost(Wire):
    """Transfers of a step between processes that share a GPU, which NCCL refuses: by way of a CPU wire."""

    def __init__(self, cpu: TaggedWire) -> None:
        super().__init__(cpu.group, cpu.rank, cpu.world_size, cpu.timeout)
        self.cpu = cpu

    def begin(self, stamp: Stamp, call: int) -> None:
        self.cpu.begin(stamp, call)

    def meet(self, device: torch.device) -> None:
        """They have met."""

    def batch(
        self, sends: Sequence[tuple[torch.Tensor, int, int]], receives: Sequence[tuple[torch.Tensor, int, int]]
    ) -> list[Any]:
        here = [(torch.empty_like(x, device="cpu"), p, n) for x, p, n in receives]
        works = self.cpu.batch([(x.cpu(), p, n) for x, p, n in sends], here)
        into = [None] * len(sends) + [(x, buffer) for (x, _, _), (buffer, _, _) in zip(receives, here)]
        return list(zip(works, into))

    def wait(self, transfer: Any, device: torch.device) -> None:
        work, into = transfer
        self.cpu.wait(work, torch.device("cpu"))
        if into is not None:
            into[0].copy_(into[1])


def on_one_gpu(ranks: int, placement: str | list[int], domains: list) -> ShardGroup:
    torch.cuda.set_device(0)
    group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement, device="cuda", timeout=60)
    executor = group._planner.executor
    assert executor.inside is not None
    executor.wire = ThroughTheHost(group._planner.agreement.side.wire)
    return group


def random_sums(rank: int, world: int, ranks: int, placement: str | list[int], domains: list, calls: int) -> None:
    """Random intervals, dtypes and widths; sums and means; gradients."""
    group, pick = on_one_gpu(ranks, placement, domains), random.Random(ranks)
    for call in range(calls):
        dtype = pick.choice(DTYPES)
        floats = dtype.is_floating_point
        size, width = pick.choice([(1, 3), (40, 8), (300, 5), (5000, 16), (60000, 8)])
        op = pick.choice(["sum", "mean"]) if floats else "sum"
        scale = pick.choice([None, 0.3]) if floats else None
        out_dtype = pick.choice([dtype, torch.float32]) if floats and dtype != torch.float64 else None

        def interval(size: int = size) -> tuple[int, int]:
            a, b = sorted(pick.randrange(size + 1) for _ in range(2))
            return pick.choice([(a, b), (0, b), (0, size), (0, size)])

        sources, sinks = [interval() for _ in range(ranks)], [interval() for _ in range(ranks)]
        if pick.random() < 0.5:
            sinks = intervals_of(split_evenly(size, ranks))
        shards = [random_values((length(i), width), dtype, 100 * call + r) for r, i in enumerate(sources)]
        requires_grad = floats and call % 3 == 0
        mine = [shards[v].cuda().requires_grad_(requires_grad) for v in group.virtual_ranks]
        common: dict[str, Any] = dict(size=size, op=op, scale=scale, out_dtype=out_dtype)
        want = reference.exchange(
            shards, sources, sinks, op=op, scale=scale, out_dtype=out_dtype or (dtype if floats else torch.int64)
        )
        got = group.exchange(mine, sources, sinks, **common)
        assert group.stats().route.carry is not None
        for v, y in zip(group.virtual_ranks, got):
            assert_same(y, want[v])
        if requires_grad:
            cotangents = [random_values(tuple(y.shape), y.dtype, 7 * call + q) for q, y in enumerate(want)]
            torch.autograd.backward(got, [cotangents[v].cuda() for v in group.virtual_ranks])
            adjoint = reference.exchange_adjoint(cotangents, sources, sinks, op=op, scale=scale, dtype=dtype)
            for v, x in zip(group.virtual_ranks, mine):
                assert_same(x.grad, adjoint[v])
    group.close()


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")


@pytest.mark.parametrize(
    ("ranks", "placement", "domains", "calls"),
    [
        (4, "contiguous", [0, 0, 1, 1], 30), (16, "contiguous", [0, 0, 1, 1], 15), (9, "zigzag", [0, 0, 1, 1], 15),
        (8, "contiguous", [0, 1, 1, 1], 15), (7, [3, 0, 1, 2, 2, 1, 0], ["a", "b", "b", "a"], 15),
    ],
)  # fmt: skip
def test_two_domains_on_one_gpu_fold_over_peer_memory(
    shared_gpu: None, ranks: int, placement: str | list[int], domains: list, calls: int
) -> None:
    run_processes(random_sums, 4, ranks, placement, domains, calls, backend="cpu:gloo", timeout=240)
