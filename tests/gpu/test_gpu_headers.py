"""Headers of messages over NCCL: the kernel that checks them against its plain form, and processes out of step."""

from __future__ import annotations

import pytest
import torch

from shardsum import ShardGroup
from shardsum.native import loader as native
from shardsum.transports.headers import _check_headers, check_headers
from tests.gpus import needs_gpus
from tests.group.test_headers import is_spoiled
from tests.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("check", [check_headers, _check_headers], ids=["kernel", "plain"])
@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("bad", [None, 0, -1])
def test_the_operator(check, count: int, bad: int | None) -> None:
    assert native.status().has_cuda, native.status().reason
    header = torch.full((2,), 77, device="cuda")
    state, record = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.int64).pin_memory()
    offsets, processes = [5 + 19 * i for i in range(count)], [2 * i + 1 for i in range(count)]
    received = torch.zeros(19 * count + 30, dtype=torch.uint8, device="cuda")
    for i in offsets:
        received[i : i + 16] = header.view(torch.uint8)
    outs = [torch.ones(n, device="cuda") for n in (1, 3, 5_000_001, *[7] * 70)]
    guard = torch.ones(1000, device="cuda")
    if bad is not None:
        received[offsets[bad] + 15] = 1
    check(outs, header, state, record, received, offsets, processes)
    torch.cuda.synchronize()
    assert (guard == 1).all()
    if bad is None:
        assert (
            all((x == 1).all() for x in outs) and header.tolist() == [77, 77] and not state.any() and not record.any()
        )
    else:
        assert is_spoiled(outs) and header.tolist() == state.tolist() == [-1, -1]
        assert record[:2].tolist() == [1, processes[bad]] and record[3] == 77
        later = torch.ones(9, device="cuda")
        check([later], header, state, record, received, [], [])
        assert is_spoiled(later)


def diverge(rank: int, world: int, transport: str) -> None:
    """Calls of equal sizes, so that NCCL notices nothing: a sum and a mean, then an error at the next look."""
    group = ShardGroup(2, transport=transport, domains=range(2) if transport == "carry" else None)
    x = torch.full((4096,), 1.0 + rank, device="cuda")
    plans = [group.plan("all_reduce", [4096] * 2, op=op) for op in ("sum", "mean")]
    for _ in range(50):
        assert [plan(x)[0].item() for plan in plans] == [3.0, 1.5]
    y = plans[rank](x)
    torch.cuda.synchronize()
    assert is_spoiled(y)
    with pytest.raises(RuntimeError, match=f"out of step: in all_reduce.*process {1 - rank} "):
        plans[0](x)
    with pytest.raises(RuntimeError, match="out of step"):
        group.check()


@needs_gpus(2)
@pytest.mark.parametrize("transport", ["gather", "all_to_all", "carry"])
def test_processes_out_of_step_get_no_number_and_an_error(transport: str) -> None:
    run_processes(diverge, 2, transport, backend="nccl", timeout=150)


def replay(rank: int, world: int, transport: str) -> None:
    """A graph repeats the numbers that it was captured with: on all processes they are equal, and differ from those of
    another graph."""
    group = ShardGroup(2, transport=transport, domains=range(2) if transport == "carry" else None)
    x = torch.full((4096,), 1.0 + rank, device="cuda")
    plans = [group.plan("all_reduce", [4096] * 2, op=op) for op in ("sum", "mean")]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for plan in plans * 3:
            plan(x)
    torch.cuda.current_stream().wait_stream(side)
    graphs, results = [], []
    for plan in plans:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(plan(x))
    for i in range(20):
        for graph, y, want in zip(graphs, results, (3.0, 1.5)):
            graph.replay()
            assert (y == want).all(), i
    group.check()
    graphs[rank].replay()
    torch.cuda.synchronize()
    assert is_spoiled(results[rank])
    with pytest.raises(RuntimeError, match="out of step"):
        group.check()


@needs_gpus(2)
@pytest.mark.parametrize("transport", ["gather", "all_to_all", "carry"])
def test_graphs(transport: str) -> None:
    run_processes(replay, 2, transport, backend="nccl", timeout=150)
