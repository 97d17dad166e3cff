"""The bound operators of the peer transport on GPUs: two processes, on one GPU where there is no second."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum.core import reference
from shardsum.core.layout import ExchangePlan, length
from shardsum.transports.peer import operators
from shardsum.transports.peer.transport import PeerTransport
from tests.gpu.test_gpu_peer import RandomCalls
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPS = torch.ops.shardsum
WIDTH = 8


def open_transport(rank: int, timeout: float = 60) -> PeerTransport:
    device = torch.device("cuda", torch.cuda.current_device())
    transport = PeerTransport(dist.group.WORLD, (0, 1), device, timeout=timeout, staging_bytes=1 << 20)
    transport.set_up()
    return transport


def _calls(rank: int, world_size: int) -> None:
    """Sizes that are pushed, streamed, written and cut into chunks; sums, means and copies; with and without out."""
    t = open_transport(rank)
    state = torch.zeros(1, dtype=torch.int64)
    made = 0
    for size in (1, 100, 30_000, 200_000):
        for op, dtype in (("sum", torch.bfloat16), ("mean", torch.float32), ("sum", torch.int32), ("copy", torch.int8)):
            sources = ((0, size // 2), (size // 2, size)) if op == "copy" else ((0, size), (size // 3, size))
            plan = ExchangePlan(sources, (0, 1), ((0, size),) * 2, (0, 1), 2)
            out_dtype = torch.int64 if dtype == torch.int32 else dtype
            prepared = t.prepare(plan, WIDTH, dtype, out_dtype, op)
            begin, end = sources[rank]
            bound = prepared.bind([begin, end - begin], (2, WIDTH // 2), state)
            shards = [random_values((length(i), 2, WIDTH // 2), dtype, size + r) for r, i in enumerate(sources)]
            if op == "copy":
                expected = torch.cat(shards)
            else:
                starts = [i[0] for i in sources]
                expected = reference.ragged_sum(shards, starts, size, op=op, out_dtype=out_dtype)
            mine = shards[rank].to(t.device)
            longer = torch.cat([mine, mine[:1]])
            out = torch.empty(expected.shape, dtype=out_dtype, device=t.device)
            for shard in (mine, longer):
                out.fill_(1)
                OPS.peer_call(out, shard, bound)
                assert_same(out.cpu(), expected)
                assert_same(OPS.peer_call_new(shard, bound).cpu(), expected)
                made += 2
            assert state.item() == made
    t.close()


@pytest.mark.gpu
def test_bound_calls_give_the_bits_of_the_reference() -> None:
    run_processes(_calls, 2, backend="cpu:gloo", timeout=240)


def _several(rank: int, world_size: int) -> None:
    """Two rows and two results a process, one of them empty: keys that zigzag chunks need, and their gradients."""
    owners, device = (0, 1, 1, 0), torch.device("cuda", torch.cuda.current_device())
    t = PeerTransport(dist.group.WORLD, owners, device, timeout=60, staging_bytes=1 << 20)
    state, made = torch.zeros(1, dtype=torch.int64), 0
    for n in (1, 90, 20_000):
        owned, needed = [(i * n, (i + 1) * n) for i in range(4)], [(0, 4 * n), (0, 3 * n), (n, n), (2 * n, 2 * n)]
        for sources, sinks in ((owned, needed), (needed, owned)):
            plan = ExchangePlan(tuple(sources), owners, tuple(sinks), owners, 2)
            prepared = t.prepare(plan, WIDTH, torch.bfloat16, torch.bfloat16)
            mine = plan.hosted_sources(rank)
            bounds = [x for r in mine for x in (sources[r][0], length(sources[r]))]
            bound = prepared.bind(bounds, (2, WIDTH // 2), state)
            shards = [random_values((length(i), 2, WIDTH // 2), torch.bfloat16, n + r) for r, i in enumerate(sources)]
            expected = reference.exchange(shards, sources, sinks, out_dtype=torch.bfloat16)
            for _ in range(2):
                found = OPS.peer_call_new.list([shards[r].to(device) for r in mine], bound)
                for q, y in zip(plan.hosted_sinks(rank), found):
                    assert_same(y.cpu(), expected[q])
                made += 1
            assert state.item() == made
    t.close()


@pytest.mark.gpu
def test_bound_calls_of_several_rows_give_the_bits_of_the_reference() -> None:
    run_processes(_several, 2, backend="cpu:gloo", timeout=240)


def _captured(rank: int, world_size: int) -> None:
    t = open_transport(rank)
    state = torch.tensor([5])
    size = 64
    plan = ExchangePlan(((0, size),) * 2, (0, 1), ((0, size),) * 2, (0, 1), 2)
    bound = t.prepare(plan, WIDTH, torch.float32, torch.float32).bind([0, size], (WIDTH,), state)
    x, out = torch.zeros(size, WIDTH, device=t.device), torch.empty(size, WIDTH, device=t.device)
    with pytest.raises(RuntimeError, match="one eager call first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        OPS.peer_call(out, x, bound)
    assert state.item() == 5  # refused: nothing happened
    OPS.peer_call(out, x, bound)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS.peer_call(out, x, bound)
        total = OPS.peer_call_new(x, bound)
    assert state.item() == 8
    for i in range(20):
        x.fill_(i + rank)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 2.0 * i + 1)) and torch.equal(total, out)
    t.close()


@pytest.mark.gpu
def test_bound_calls_are_captured_after_an_eager_one() -> None:
    run_processes(_captured, 2, backend="cpu:gloo", timeout=240)


def _refused(rank: int, world_size: int) -> str:
    """What is refused leaves the transport as it was; a peer that stays away ends it, and the state says so."""
    t = open_transport(rank, timeout=3)
    state = torch.tensor([0])
    size = 64
    plan = ExchangePlan(((0, size),) * 2, (0, 1), ((0, size),) * 2, (0, 1), 2)
    bound = t.prepare(plan, WIDTH, torch.float32, torch.float32).bind([0, size], (WIDTH,), state)
    x, out = torch.ones(size, WIDTH, device=t.device), torch.empty(size, WIDTH, device=t.device)
    wrong: list[tuple[Any, Any]] = [
        (out, x.cpu()), (out.cpu(), x), (out, x.half()), (out[1:], x), (out, x[1:]), (x, x), (out, x.t()),
        (out, torch._neg_view(x)),
    ]  # fmt: skip
    for bad_out, bad_shard in wrong:
        with pytest.raises(RuntimeError):
            OPS.peer_call(bad_out, bad_shard, bound)
    state.fill_(operators.FAILED)
    with pytest.raises(RuntimeError):
        OPS.peer_call(out, x, bound)
    state.zero_()
    OPS.peer_call(out, x, bound)
    assert torch.equal(out, torch.full_like(out, 2.0)) and state.item() == 1
    if rank == 0:
        OPS.peer_call(out, x, bound)  # process 1 does not come, until this one has given up
        torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError):  # process 1 may find what process 0 had sent before it gave up, but no more
        for _ in range(4):
            OPS.peer_call(out, x, bound)
            torch.cuda.synchronize()
    assert state.item() & operators.FAILED
    with pytest.raises(RuntimeError) as caught:
        t.check()
    t.close()
    return str(caught.value)


@pytest.mark.gpu
def test_what_is_refused_changes_nothing_and_a_failure_is_final() -> None:
    for message in run_processes(_refused, 2, backend="cpu:gloo", timeout=120):
        assert "process 1 did not come within 3 s" in message


def _other_call(rank: int, world_size: int, what: str) -> str:
    """Process 1 is one call ahead, or passes another op: both hear of it, and nobody gets a sum."""
    t = open_transport(rank, timeout=30)
    size = 64
    plan = ExchangePlan(((0, size),) * 2, (0, 1), ((0, size),) * 2, (0, 1), 2)
    op = "mean" if what == "op" and rank == 1 else "sum"
    state = torch.tensor([rank if what == "number" else 0])
    bound = t.prepare(plan, WIDTH, torch.float32, torch.float32, op).bind([0, size], (WIDTH,), state)
    x = torch.ones(size, WIDTH, device=t.device)
    out = OPS.peer_call_new(x, bound)
    torch.cuda.synchronize()
    assert bool(out.isnan().all())
    with pytest.raises(RuntimeError) as caught:
        t.check()
    t.close()
    with pytest.raises(RuntimeError, match="create a new process group"):
        open_transport(rank)
    return str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["number", "op"])
def test_processes_in_different_calls_get_an_error(what: str) -> None:
    for message in run_processes(_other_call, 2, what, backend="cpu:gloo", timeout=120):
        assert "out of step" in message and "in another call" in message


def _shared(rank: int, world_size: int, calls: int) -> None:
    """Groups of two and of five virtual ranks take turns on one workspace, which goes with the last of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    two, five = open_transport(rank), PeerTransport(dist.group.WORLD, (0, 1, 1, 0, 1), device, timeout=60)
    workspace = two.set_up()
    assert workspace is five.set_up() and two.workspace_bytes == five.workspace_bytes < 16 << 20
    pick, tests = random.Random(7), [RandomCalls(two, 1), RandomCalls(five, 2)]
    for _ in range(calls):
        tests[pick.randrange(2)].run()
    two.close()
    for _ in range(5):
        tests[1].run()
    five.close()
    again = open_transport(rank)
    assert again.set_up() is not workspace
    RandomCalls(again, 3).run()
    again.close()


@pytest.mark.gpu
def test_groups_share_a_workspace() -> None:
    run_processes(_shared, 2, 60, backend="cpu:gloo", timeout=240)
