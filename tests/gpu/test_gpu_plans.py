"""Plans and repeated calls over peer memory: other values, layouts, lengths and streams must still be right.

Two processes, one GPU each, over NCCL; or both on one GPU, over gloo and peer memory (slow, but the same kernels).
"""

from __future__ import annotations

import random

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from tests.gpus import marks
from tests.group.test_group import exchange_in_processes
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
backends = pytest.mark.parametrize("backend", ["cpu:gloo", pytest.param("nccl", marks=marks(2))])


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def by_peers(rank: int, world_size: int, seed: int, problems: int) -> None:
    exchange_in_processes(rank, world_size, "peer", seed, problems, str(device()))


@backends
def test_every_collective_equals_reference(backend: str) -> None:
    run_processes(by_peers, 2, 5, 3, backend=backend, timeout=240)


def odd(x: torch.Tensor, form: int) -> torch.Tensor:
    """The same values, sometimes behind a lazy sign or not contiguous."""
    return {0: lambda: torch._neg_view(-x), 1: lambda: x.mT.contiguous().mT}.get(form, lambda: x)()


def random_repeats(rank: int, world_size: int, calls: int) -> None:
    """Few signatures in random order, with tensors that take different ways on different processes."""
    group = ShardGroup(2, transport="peer", device=device())
    shared, own = random.Random(1), random.Random(2 + rank)
    for call in range(calls):
        lengths, dtype = shared.choice(([7, 4], [4, 7], [7, 0])), shared.choice((torch.float32, torch.bfloat16))
        trailing, wanted = shared.choice(((6,), (2, 3))), shared.choice((torch.float32, torch.bfloat16))
        op, size = shared.choice(("sum", "mean")), shared.choice((7, 9))
        rows = [random_values((n, *trailing), dtype, 2 * call + r) for r, n in enumerate(lengths)]
        want = reference.ragged_sum(rows, [0, 0], size, op=op, out_dtype=wanted)
        unused = torch.full((own.choice((0, 2)), *trailing), float("nan"), dtype=dtype)
        x = odd(torch.cat([rows[rank], unused]).to(group.device), own.randrange(8))
        for _ in range(shared.choice((1, 1, 3))):
            out = odd(torch.full((size, *trailing), float("nan"), dtype=wanted, device=group.device), own.randrange(8))
            if own.random() < 0.3:
                got = group.all_reduce(x, lengths, size=size, op=op, out_dtype=wanted)
            else:
                got = group.all_reduce(x, lengths, size=size, op=op, out=out)
                assert got is out
            assert_same(got.resolve_neg(), want)
    with pytest.raises(ValueError, match="lengths"):
        group.all_reduce(x, [True, 7], size=9)


@backends
def test_random_repeated_calls(backend: str) -> None:
    run_processes(random_repeats, 2, 400 if backend == "nccl" else 60, backend=backend, timeout=240)


def held_plans(rank: int, world_size: int, steps: int) -> None:
    """Every kind of plan, with and without out, a gradient, shards that are not contiguous, and refusals between."""
    group = ShardGroup(2, transport="peer", device=device())
    lengths, held, wanted = [40, 7], [(0, 40), (0, 7)], [(2, 38), (30, 30)]
    kinds = dict(row_shape=(24,), dtype=torch.bfloat16)
    whole = group.plan("all_reduce", lengths, size=40, **kinds)
    parts = group.plan("reduce_scatter", lengths, size=40, splits=[31, 9], **kinds)
    joined = group.plan("all_gather", lengths, **kinds)
    exchanged = group.plan("exchange", in_intervals=held, out_intervals=wanted, size=40, **kinds)
    for step in range(steps):
        shards = [random_values((40, 24), torch.bfloat16, 10 * step + r) for r in range(2)]
        rows = [s[:n] for s, n in zip(shards, lengths)]
        expected = reference.ragged_sum(rows, [0, 0], 40, out_dtype=torch.bfloat16)
        mine = shards[rank].to(group.device)
        if step % 3 == 1:
            mine = mine.t().contiguous().t()
        for out in (mine.new_full((40, 24), float("nan")), mine.new_full((24, 40), float("nan")).t()):
            assert whole(mine, out=out) is out
            assert_same(out, expected)
        assert_same(whole(mine), expected)
        assert_same(parts(mine), expected.split([31, 9])[rank])
        part = torch.full((31 if rank == 0 else 9, 24), float("nan"), dtype=torch.bfloat16, device=group.device)
        assert_same(parts(mine, out=part), expected.split([31, 9])[rank])
        assert_same(exchanged(mine), expected[wanted[rank][0] : wanted[rank][1]])
        assert_same(joined(mine), torch.cat(rows))
        assert_same(whole.start(mine).wait(), expected)
        leaf = mine.clone().requires_grad_()
        (whole(leaf) * 1).backward(torch.ones_like(expected, device=group.device))
        assert int(leaf.grad.sum()) == lengths[rank] * 24
        shared = torch.zeros(60, 24, dtype=torch.bfloat16, device=group.device)
        for shard, out, message in (
            (mine, mine, "out: shares memory"),
            (shared[:40], shared[3:43], "out: shares memory"),  # also with the 7 rows of process 1
            (mine, mine.new_empty(960), "out: "),
            (mine, mine.new_empty(24, 40), "out: "),
            (mine, mine.cpu(), "out: torch.bfloat16 .* on cpu"),
            (mine.cpu(), None, "shards: on cpu"),
            (mine.to_sparse(), None, "shards: "),
        ):
            with pytest.raises(ValueError, match=message):
                whole(shard, out=out)
            assert_same(whole(mine), expected)
    saved = torch.ones(40, 24, device=group.device, dtype=torch.bfloat16)
    squared = (saved * saved.clone().requires_grad_()).sum()
    whole(mine, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@backends
def test_held_plans(backend: str) -> None:
    run_processes(held_plans, 2, 4 if backend == "nccl" else 2, backend=backend, timeout=240)


def repeated_on_streams(rank: int, world_size: int) -> None:
    """Each call takes the result of the one before, which ran on another stream: first on the default one for long."""
    group = ShardGroup(2, transport="peer", device=device())
    rows = [random_values((64, 256), torch.float32, r).nan_to_num(1.0, 2.0, 3.0) for r in range(2)]
    expected = reference.ragged_sum(rows, [0, 0], 64, out_dtype=torch.float32)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    buffers = [torch.full((64, 256), float("nan"), device=group.device) for _ in range(2)]
    for _ in range(3):
        group.all_reduce(rows[rank].to(group.device), [64, 64], size=64, out=buffers[0])
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


@backends
def test_repeated_calls_on_changing_streams(backend: str) -> None:
    run_processes(repeated_on_streams, 2, backend=backend, timeout=240)
