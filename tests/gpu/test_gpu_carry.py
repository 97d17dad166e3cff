"""Carried accumulators over NCCL, against the definition bit for bit: two GPUs that are declared two domains, and four,
where each domain of two folds over peer memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import Interval, intervals_of, length, split_evenly
from shardsum.transports.costs import Costs
from tests.carried import DTYPES, placed, random_exchanges, sum_of_everything
from tests.gpus import needs_gpus
from tests.group.test_headers import is_spoiled
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLACES: list[tuple[int, Any]] = [(4, "contiguous"), (8, "zigzag"), (16, "contiguous"), (16, "zigzag")]
#: With steps that cost little, on slow links: many chunks.
SLOW_LINKS = {"cuda": Costs(2.0, 100.0, 1000.0, 2.0, 1.0)}


def over_gpus(rank: int, world: int, places: list[tuple[int, Any]], domains: list) -> None:
    for ranks, placement in places:
        with ShardGroup(ranks, transport="carry", domains=domains, placement=placement) as group:
            assert (group._planner.inside is not None) == (domains.count(domains[rank]) > 1)
            for seed, dtype in enumerate(DTYPES):
                sum_of_everything(group, dtype, 33 if seed % 2 else 5000, (5,), 100 * seed + ranks)
            assert random_exchanges(group, 12, ranks) > 0


def chunked(rank: int, world: int, domains: list) -> None:
    """Many chunks under way at once, on the current stream and asynchronously, in rows of an odd width."""
    for placement in ("contiguous", "zigzag"):
        with ShardGroup(8, transport="carry", domains=domains, placement=placement, costs=SLOW_LINKS) as group:
            for size, width in ((4001, 33), (60000, 64)):
                lengths = [size - 7 * r for r in range(8)]
                shards = [random_values((n, width), torch.bfloat16, r) for r, n in enumerate(lengths)]
                want = reference.ragged_sum(shards, [0] * 8, size, out_dtype=torch.bfloat16)
                mine = placed(group, shards, False)
                for _ in range(3):
                    handle = group.all_reduce(mine, lengths, size=size, async_op=True)
                    parts = group.reduce_scatter(mine, lengths, size=size)
                    assert_same(handle.wait(), want)
                    for v, part in zip(group.virtual_ranks, parts):
                        assert_same(part, want.split(split_evenly(size, 8))[v])
                route = group.stats().route
                assert route.carry is not None and route.carry.chunks > 4
                assert route.carry.domains == group.domains.of


@needs_gpus(2)
def test_all_collectives_and_gradients() -> None:
    places = [*PLACES, (9, [0, 1, 1, 0, 1, 0, 0, 1, 0])]
    run_processes(over_gpus, 2, places, ["a", "b"], backend="nccl", timeout=200)


@needs_gpus(2)
def test_many_chunks() -> None:
    run_processes(chunked, 2, ["a", "b"], backend="nccl", timeout=150)


@needs_gpus(4)
@pytest.mark.parametrize("domains", [[0, 0, 1, 1], ["a", "b", "a", "b"], [0, 1, 1, 1]])
def test_all_collectives_and_gradients_of_domains_that_fold_over_peer_memory(domains: list) -> None:
    places = [*PLACES, (9, [3, 0, 1, 2, 2, 1, 0, 3, 3])]
    run_processes(over_gpus, 4, places, domains, backend="nccl", timeout=240)


@needs_gpus(4)
def test_many_chunks_over_peer_memory() -> None:
    run_processes(chunked, 4, [0, 0, 1, 1], backend="nccl", timeout=150)


def captured(rank: int, world: int, cases: list[tuple[int, str]], domains: list) -> None:
    """Point-to-point transfers inside a CUDA graph: replays follow the shards that they find, gradients included."""
    size, row = 3001, (16,)
    for ranks, placement in cases:
        group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement, costs=SLOW_LINKS)
        lengths = [size - 100 * r for r in range(ranks)]
        sources: list[Interval] = [(0, n) for n in lengths]
        parts = intervals_of(split_evenly(size, ranks))
        windows = [(begin, min(size, end + 50 * q)) for q, (begin, end) in enumerate(parts)]
        mine = [torch.zeros(lengths[v], *row, device="cuda", requires_grad=True) for v in group.virtual_ranks]
        uses = [torch.zeros(length(windows[v]), *row, device="cuda") for v in group.virtual_ranks]
        total = group.plan("all_reduce", lengths, size=size, row_shape=row, dtype=torch.float32, op="mean")
        scattered = group.plan("reduce_scatter", lengths, size=size, row_shape=row, dtype=torch.float32)

        def step() -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, ...]]:
            outs = group.exchange(mine, sources, windows, size=size)  # noqa: B023
            gradients = torch.autograd.grad(outs, mine, uses)  # noqa: B023
            with torch.no_grad():
                return total(mine), scattered(mine), [y.detach() for y in outs], gradients  # noqa: B023

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for i in range(8):
            shards = [random_values((n, *row), torch.float32, 100 * i + r) for r, n in enumerate(lengths)]
            given = [random_values((length(w), *row), torch.float32, 999 * i + q) for q, w in enumerate(windows)]
            with torch.no_grad():
                for v, x, g in zip(group.virtual_ranks, mine, uses):
                    x.copy_(shards[v])
                    g.copy_(given[v])
            graph.replay()
            sums = reference.exchange(shards, sources, [*parts, *windows], out_dtype=torch.float32)
            mean = reference.exchange(shards, sources, [(0, size)], op="mean", out_dtype=torch.float32)
            adjoint = reference.exchange_adjoint(given, sources, windows, dtype=torch.float32)
            assert_same(found[0], mean[0])
            for k, want in enumerate((sums[:ranks], sums[ranks:], adjoint)):
                for v, y in zip(group.virtual_ranks, found[1 + k], strict=True):
                    assert_same(y, want[v])
            if i == 4:  # eager calls between replays
                assert_same(total([x.detach() for x in mine]), mean[0])
        del graph, found
        group.close()


@needs_gpus(2)
def test_cuda_graphs_replay_it() -> None:
    cases = [(4, "contiguous"), (8, "zigzag"), (16, "contiguous")]
    run_processes(captured, 2, cases, ["a", "b"], backend="nccl", timeout=200)


@needs_gpus(4)
def test_cuda_graphs_replay_folds_over_peer_memory() -> None:
    cases = [(4, "contiguous"), (8, "zigzag"), (16, "contiguous")]
    run_processes(captured, 4, cases, [0, 0, 1, 1], backend="nccl", timeout=200)


def late(rank: int, world: int, dtype: torch.dtype) -> str:
    """A process comes to a fold when the other one of its domain has given it up: no process gets a number."""
    group = ShardGroup(8, transport="carry", domains=[0, 0, 1, 1], timeout=3)
    x = [torch.ones(4000, 8, dtype=dtype, device="cuda") for _ in group.virtual_ranks]
    assert (group.all_reduce(x, [4000] * 8) == 8).all()
    if rank == 1:
        torch.cuda._sleep(8_000_000_000)  # four seconds or five; twice the timeout would be too long for others
    y = group.all_reduce(x, [4000] * 8)
    torch.cuda.synchronize()
    assert is_spoiled(y)
    with pytest.raises(RuntimeError) as caught:
        group.all_reduce(x, [4000] * 8)
    return str(caught.value)


@needs_gpus(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_sums_that_a_domain_lost_are_refused_by_all_others(dtype: torch.dtype) -> None:
    messages = run_processes(late, 4, dtype, backend="nccl", timeout=60)
    assert "did not come within 3 s" in messages[0], messages
    for message in messages[2:]:
        assert "out of step" in message and "waited for rows in vain" in message, messages
