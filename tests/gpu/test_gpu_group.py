"""ShardGroup on GPUs: one GPU hosting all virtual ranks, and NCCL between two, against the CPU's loops bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from tests.group.test_collectives import movement, token_means
from tests.group.test_group import chunked, exchange_in_processes
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def marked(fn):
    for mark in two_gpus:
        fn = mark(fn)
    return fn


@pytest.mark.parametrize("seed", range(4))
def test_one_gpu_equals_reference(seed: int) -> None:
    exchange_in_processes(0, 1, "auto", seed, 3, "cuda")


@marked
@pytest.mark.parametrize("transport", ["gather", "all_to_all", "peer", "auto"])
def test_nccl_equals_reference(transport: str) -> None:
    run_processes(exchange_in_processes, 2, transport, 11, 8, "cuda", backend="nccl", timeout=150)


@marked
@pytest.mark.parametrize(
    "fn, args", [(chunked, ("all_to_all",)), (movement, ("gather",)), (movement, ("peer",)), (token_means, ())]
)
def test_nccl_runs_the_cpu_tests_too(fn, args: tuple) -> None:
    run_processes(on_gpu, 2, fn, args, backend="nccl", timeout=150)


def on_gpu(rank: int, world_size: int, fn, args: tuple) -> None:
    with torch.device("cuda"):
        fn(rank, world_size, *args)


def streams(rank: int, world_size: int) -> None:
    """On a side stream behind a long kernel, with inputs freed and overwritten in stream order, and asynchronously."""
    group = ShardGroup(4, transport="all_to_all")
    lengths = [4096, 100, 0, 3000]
    shards = [random_values((n, 64), torch.bfloat16, r) for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(shards, [0] * 4, 4096, out_dtype=torch.bfloat16)
    shards = [s.cuda() for s in shards]
    side = torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mine = [torch.full_like(shards[v], float("nan")) for v in group.virtual_ranks]
            torch.cuda._sleep(20_000_000)
            for m, v in zip(mine, group.virtual_ranks):
                m.copy_(shards[v])
            out = group.all_reduce(mine, lengths)
            for m in mine:
                m.fill_(float("nan"))
            del mine
            assert_same(out, expected)
        handle = group.all_reduce([shards[v].clone() for v in group.virtual_ranks], lengths, async_op=True)
        torch.full((4096, 64), float("nan"), dtype=torch.bfloat16, device="cuda")  # takes freed memory, if any is free
        assert_same(handle.wait(), expected)


def odd(x: torch.Tensor, form: int) -> torch.Tensor:
    """The same values, sometimes behind a lazy sign or not contiguous."""
    return {0: lambda: torch._neg_view(-x), 1: lambda: x.mT.contiguous().mT}.get(form, lambda: x)()


def known_calls(rank: int, world_size: int) -> tuple[int, int]:
    """Few signatures in random order: a call that was made before, or just now, is launched again where it is the same,
    whatever a process's own tensors are like. Returns how many were known by their key, and as the last one."""
    group = ShardGroup(transport="peer")
    replays, found = group._runner.replays, Counter[str]()
    run = replays.run

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = method(*args)
            found[name] += result not in (None, False)
            return result

        return call

    def run_and_count_the_next(*args: Any) -> Any:
        result = run(*args)
        replays.last = counted("last", replays.last)
        return result

    replays.run = counted("run", run_and_count_the_next)
    shared, own = random.Random(1), random.Random(2 + rank)
    for call in range(400):
        lengths, dtype = shared.choice(([7, 4], [4, 7], [7, 0])), shared.choice((torch.float32, torch.bfloat16))
        trailing, wanted = shared.choice(((6,), (2, 3))), shared.choice((torch.float32, torch.bfloat16))
        op, size = shared.choice(("sum", "mean")), shared.choice((7, 9))
        rows = [random_values((n, *trailing), dtype, 2 * call + r) for r, n in enumerate(lengths)]
        want = reference.ragged_sum(rows, [0, 0], size, op=op, out_dtype=wanted)
        unused = torch.full((own.choice((0, 2)), *trailing), float("nan"), dtype=dtype)
        x = odd(torch.cat([rows[rank], unused]).cuda(), own.randrange(8))
        for _ in range(shared.choice((1, 1, 3))):
            out = odd(torch.full((size, *trailing), float("nan"), dtype=wanted, device="cuda"), own.randrange(8))
            if own.random() < 0.3:
                got = group.all_reduce(x, lengths, size=size, op=op, out_dtype=wanted)
            else:
                got = group.all_reduce(x, lengths, size=size, op=op, out=out)
                assert got is out
            assert_same(got.resolve_neg(), want)
    with pytest.raises(ValueError, match="lengths"):
        group.all_reduce(x, [True, 7], size=9)
    return found["run"], found["last"]


@marked
def test_known_calls() -> None:
    for by_key, last in run_processes(known_calls, 2, backend="nccl", timeout=150):
        assert by_key > 100 and last > 20


@marked
def test_streams_and_overwritten_inputs() -> None:
    run_processes(streams, 2, backend="nccl", timeout=150)


def test_streams_on_one_gpu() -> None:
    group = ShardGroup(4, device="cuda")
    x = random_values((4, 512, 8), torch.float32, 3)
    lengths = [512, 3, 77, 400]
    expected = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * 4, 512, out_dtype=torch.float32)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.empty_like(x, device="cuda")
        torch.cuda._sleep(20_000_000)
        y.copy_(x)
        out = group.all_reduce(y, lengths)
        handle = group.all_reduce(y, lengths, async_op=True)
        assert_same(out, expected)
        assert_same(handle.wait(), expected)


def test_device_lengths_in_a_graph() -> None:
    """30 eager calls, a capture, 100 replays that follow the lengths they find, backward included."""
    group = ShardGroup(4, device="cuda")
    x = random_values((4, 33, 5), torch.float32, 4).cuda().requires_grad_()
    lengths = torch.tensor([33, 1, 0, 20], device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = group.all_reduce(x, lengths, size=33, op="mean")
        (grad,) = torch.autograd.grad(out.sum(), x)
        return out, grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(30):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    for i in range(100):
        host = [(i * (r + 3)) % 34 for r in range(4)]
        lengths.copy_(torch.tensor(host))
        graph.replay()
        rows = [x.detach()[r, :n].cpu() for r, n in enumerate(host)]
        assert_same(out, reference.ragged_sum(rows, [0] * 4, 33, op="mean", out_dtype=torch.float32))
        ones = torch.ones(33, 5)
        for r, g in enumerate(reference.ragged_sum_adjoint(ones, [0] * 4, host, op="mean", dtype=torch.float32)):
            assert_same(grad[r, : host[r]], g)


@marked
def test_two_processes_on_one_gpu_are_told_about_virtual_ranks() -> None:
    run_processes(share_a_gpu, 2, backend="nccl", timeout=60)


def share_a_gpu(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    with pytest.raises(ValueError, match="Host several virtual ranks in one process"):
        ShardGroup(4)


def replayed(rank: int, world_size: int) -> None:
    """Calls alike are launched again without their checks: other values, layouts and lengths must still be right."""
    group = ShardGroup(2, transport="peer")
    for lengths in ([40, 7], [40, 7], [3, 40], [40, 7]):
        for step in range(4):
            shards = [random_values((40, 24), torch.bfloat16, 10 * step + r) for r in range(2)]
            expected = reference.ragged_sum(
                [s[:n] for s, n in zip(shards, lengths)], [0, 0], 40, out_dtype=torch.bfloat16
            )
            mine = shards[rank].cuda()
            if step == 2:
                mine = mine.t().contiguous().t()
            for out in (mine.new_full((40, 24), float("nan")), mine.new_full((24, 40), float("nan")).t()):
                assert group.all_reduce(mine, lengths, size=40, out=out) is out
                assert_same(out, expected)
            assert_same(group.all_reduce(mine, lengths, size=40), expected)
            assert_same(group.reduce_scatter(mine, lengths, size=40), expected.split(20)[rank])
            assert_same(group.reduce_scatter(mine, lengths, size=40, splits=[31, 9]), expected.split([31, 9])[rank])
            held, wanted = [(0, n) for n in lengths], [(2, 38), (30, 30)]
            part = group.exchange([mine], held, wanted, size=40)[0]
            assert_same(part, expected[wanted[rank][0] : wanted[rank][1]])
            joined = torch.cat([s[:n] for s, n in zip(shards, lengths)])
            assert_same(group.all_gather(mine, lengths), joined)
    assert len(group._runner.replays) == 2 * (1 + 1 + 2 + 1 + 1)
    for lazy in (torch._neg_view(mine.neg()), torch._neg_view(mine.neg()).t().contiguous().t()):
        out = torch.full_like(mine, float("nan"))
        assert_same(group.all_reduce(lazy, [40, 7], size=40, out=out), expected)
    count, shared = group._agreement.call, torch.zeros(60, 24, dtype=torch.bfloat16, device="cuda")
    elsewhere = torch.device("cuda", 1 - rank)
    for shard, out, message in (
        (mine, mine, "out: shares memory"),
        (shared[:40], shared[20:], "out: shares memory"),
        (mine, mine.new_empty(960), "out: "),
        (mine, mine.new_empty(24, 40), "out: "),
        (mine, mine.to(elsewhere), "out: on cuda"),
        (mine, mine.cpu(), "out: on cpu"),
        (mine.to(elsewhere), None, "shards: on cuda"),
        (mine.cpu(), None, "shards: on cpu"),
        (mine.to_sparse(), None, "shards: "),
    ):
        with pytest.raises(ValueError, match=message):
            group.all_reduce(shard, [40, 7], size=40, out=out)
        group._agreement.wary = False  # the next call is looked up as if it came first
        assert_same(group.all_reduce(mine, [40, 7], size=40), expected)
        group._agreement.wary = False
    assert group._agreement.call == count + 2 * 9


def replayed_on_streams(rank: int, world_size: int) -> None:
    """Each call takes the result of the one before, which ran on another stream: first on the default one for long."""
    group = ShardGroup(2, transport="peer")
    rows = [random_values((64, 256), torch.float32, r).nan_to_num(1.0, 2.0, 3.0) for r in range(2)]
    expected = reference.ragged_sum(rows, [0, 0], 64, out_dtype=torch.float32)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    buffers = [torch.full((64, 256), float("nan"), device="cuda") for _ in range(2)]
    for _ in range(3):  # known from here on
        group.all_reduce(rows[rank].cuda(), [64, 64], size=64, out=buffers[0])
    torch.cuda.synchronize()
    for step in range(60):
        with torch.cuda.stream(streams[0 if step < 20 else (step * 7) % 3]):
            if step % 5 == rank:
                torch.cuda._sleep(500_000)
            group.all_reduce(buffers[step % 2], [64, 64], size=64, out=buffers[1 - step % 2])
    torch.cuda.synchronize()
    group.check()
    assert_same(buffers[0], expected * 2.0**60)
    assert_same(buffers[1], expected * 2.0**59)


@marked
def test_replayed_calls_on_changing_streams() -> None:
    run_processes(replayed_on_streams, 2, backend="nccl", timeout=150)


@marked
def test_replayed_calls() -> None:
    run_processes(replayed, 2, backend="nccl", timeout=150)
