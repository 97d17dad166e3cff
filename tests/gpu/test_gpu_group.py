"""ShardGroup on GPUs: one GPU hosting all virtual ranks, and NCCL between two, against the CPU's loops bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from tests.gpus import needs_gpus
from tests.group.test_collectives import movement, token_means
from tests.group.test_group import chunked, exchange_in_processes
from tests.processes import run_processes
from tests.values import assert_same, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("seed", range(4))
def test_one_gpu_equals_reference(seed: int) -> None:
    exchange_in_processes(0, 1, "auto", seed, 3, "cuda")


@needs_gpus(2)
@pytest.mark.parametrize("transport", ["gather", "all_to_all", "peer", "auto"])
def test_nccl_equals_reference(transport: str) -> None:
    run_processes(exchange_in_processes, 2, transport, 11, 8, "cuda", backend="nccl", timeout=150)


@needs_gpus(2)
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


@needs_gpus(2)
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


@needs_gpus(2)
def test_two_processes_on_one_gpu_are_told_about_virtual_ranks() -> None:
    run_processes(share_a_gpu, 2, backend="nccl", timeout=60)


def share_a_gpu(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    with pytest.raises(ValueError, match="Host several virtual ranks in one process"):
        ShardGroup(4)
