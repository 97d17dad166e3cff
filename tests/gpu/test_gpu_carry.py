"""Carried accumulators over NCCL: two GPUs that are declared two domains, against the CPU's loops bit for bit."""

from __future__ import annotations

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import intervals_of, split_evenly
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def sums(rank: int, world: int, ranks: int, placement: str) -> None:
    group = ShardGroup(ranks, transport="carry", domains=["a", "b"], placement=placement)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32):
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


@pytest.mark.parametrize(("ranks", "placement"), [(4, "contiguous"), (8, "zigzag"), (16, "contiguous")])
def test_the_bits_of_the_definition(ranks: int, placement: str) -> None:
    run_processes(sums, 2, ranks, placement, backend="nccl", timeout=150)


def captured(rank: int, world: int) -> None:
    """Point-to-point transfers inside a CUDA graph: replays follow the shards that they find."""
    group = ShardGroup(8, transport="carry", domains=["a", "b"])
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


def test_a_cuda_graph_replays_it() -> None:
    run_processes(captured, 2, backend="nccl", timeout=150)
