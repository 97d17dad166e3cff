"""Groups, plans, calls and graphs leave nothing on the GPU: what torch has allocated and what the driver has given out
(peer memory and its mappings, too) levels off, with virtual ranks on one process and with two processes over peer
memory (on one GPU, or one each).

Short by default; SHARDSUM_LONG_TESTS=1 makes ten times as many of everything.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum import ShardGroup
from tests.gpu.test_gpu_plans import backends, device
from tests.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TIMES = 10 if os.environ.get("SHARDSUM_LONG_TESTS") else 1
#: How often: calls, replays of a graph, captures, and groups with all of these.
CALLS, REPLAYS, GRAPHS, GROUPS = 500 * TIMES, 500 * TIMES, 10 * TIMES, 8 * TIMES
LENGTHS, ROW, SIZE = [300, 7, 0, 512], (64,), 512
#: Bytes that the driver may have given out in between, once: it hands out memory in pages of 2 MiB, and the processes
#: of one GPU share one count.
PAGES = 8 << 20
#: Bytes that torch keeps for every rendezvous of symmetric memory: two arrays of pointers that it never frees.
RENDEZVOUS = 2 * 512


def usage() -> tuple[int, int]:
    """Bytes that torch has allocated here, and bytes that the driver has given out on this GPU, to all processes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.barrier()  # the others have let go, too
    free, total = torch.cuda.mem_get_info()
    if dist.is_initialized():
        dist.barrier()  # and nobody goes on before all have looked
    return torch.cuda.memory_allocated(), total - free


def grown(do: Callable[[], Any], times: int) -> tuple[int, int]:
    """What ``times`` more of them have left, after two that fill what is kept."""
    for _ in range(2):
        do()
    before = usage()
    for _ in range(times):
        do()
    after = usage()
    return after[0] - before[0], after[1] - before[1]


def shards(group: ShardGroup, where: torch.device) -> list[torch.Tensor]:
    return [torch.ones(LENGTHS[v], *ROW, device=where, dtype=torch.bfloat16) for v in group.virtual_ranks]


def calls(group: ShardGroup, where: torch.device) -> dict[str, tuple[Callable[[], Any], int]]:
    """Every kind of call, and how often. What is built outside of a call is kept, and so not counted."""
    xs = shards(group, where)
    leaves = [x.clone().requires_grad_() for x in xs]
    padded = [torch.ones(SIZE, *ROW, device=where, dtype=torch.bfloat16) for _ in xs]
    counts = torch.tensor([LENGTHS[v] for v in group.virtual_ranks], device=where)
    plan = group.plan("all_reduce", LENGTHS, size=SIZE, row_shape=ROW, dtype=torch.bfloat16)
    out = torch.empty(SIZE, *ROW, device=where, dtype=torch.bfloat16)
    held, wanted = [(0, n) for n in LENGTHS], [(0, SIZE)] * len(LENGTHS)

    def capture() -> torch.cuda.CUDAGraph:
        plan(xs, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan(xs, out=out)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    kept = capture()
    return {
        "all_reduce": (lambda: group.all_reduce(xs, LENGTHS, size=SIZE), CALLS),
        "all_reduce, lengths unknown": (lambda: group.all_reduce(xs, size=SIZE), CALLS),
        "all_reduce, lengths on the device": (lambda: group.all_reduce(padded, counts, size=SIZE), CALLS),
        "all_reduce, async": (lambda: group.all_reduce(xs, LENGTHS, size=SIZE, async_op=True).wait(), CALLS),
        "all_reduce, backward": (lambda: group.all_reduce(leaves, LENGTHS, size=SIZE).sum().backward(), CALLS),
        "reduce_scatter": (lambda: group.reduce_scatter(xs, LENGTHS, size=SIZE), CALLS),
        "all_gather": (lambda: group.all_gather(xs, LENGTHS), CALLS),
        "exchange": (lambda: group.exchange(xs, held, wanted, size=SIZE), CALLS),
        "a plan with out=": (lambda: plan(xs, out=out), CALLS),
        "a replay of a graph": (kept.replay, REPLAYS),
        "a graph": (capture, GRAPHS),
    }


def life(transport: str, where: torch.device) -> None:
    """A group from its construction to its end, with its plans, calls and a graph."""
    with ShardGroup(4, transport=transport, device=where) as group:
        for call, _ in calls(group, where).values():
            call()
        torch.cuda.synchronize()


def assert_level(what: str, left: tuple[int, int], of_torch: int = 0) -> None:
    print(f"\nfigure: {what}: {left[0]:,} bytes of torch, {left[1]:,} of the driver")
    assert left[0] <= of_torch, f"{what}: torch has {left[0]:,} bytes more than before"
    assert left[1] <= PAGES, f"{what}: the driver has given out {left[1]:,} bytes more than before"


def measured(transport: str, where: torch.device) -> dict[str, tuple[int, int]]:
    found = {}
    with ShardGroup(4, transport=transport, device=where) as group:
        for name, (call, times) in calls(group, where).items():
            found[name] = grown(call, times)
    found["a group"] = grown(lambda: life(transport, where), GROUPS)
    return found


@pytest.mark.timeout(3600 if TIMES > 1 else 300)
def test_virtual_ranks_leave_nothing_on_the_gpu() -> None:
    for name, left in measured("local", torch.device("cuda", torch.cuda.current_device())).items():
        assert_level(f"local, {name}", left)


def by_peers(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    return measured("peer", device())


@backends
@pytest.mark.timeout(3600 if TIMES > 1 else 600)
def test_two_processes_leave_nothing_in_peer_memory(backend: str) -> None:
    for results in run_processes(by_peers, 2, backend=backend, timeout=3000 if TIMES > 1 else 240):
        for name, left in results.items():
            assert_level(f"peer, {name}", left, GROUPS * RENDEZVOUS if name == "a group" else 0)
