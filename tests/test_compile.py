"""The communicating operators under torch.library.opcheck and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from processes import run_processes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from values import assert_same, random_values

from shardsum import ShardGroup, exchange, exchange_padded


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kinds, op, grad", [("vv", "mean", "sum"), ("vp", "sum", "identity"), ("vp", "mean", "sum")])
def test_opcheck_exchange(kinds: str, op: str, grad: str, requires_grad: bool) -> None:
    group = ShardGroup(4)
    shards = [torch.randn(n, 2, requires_grad=requires_grad) for n in (3, 0, 5, 1)]
    sources = exchange.flatten([(0, 3), (2, 2), (1, 6), (0, 1)])
    sinks = exchange.flatten([(0, 6)] * (4 if kinds[1] == "v" else 1))
    name = group._runner.name
    torch.library.opcheck(
        exchange.exchange.overload, (shards, sources, sinks, None, kinds, op, 0.5, torch.float32, grad, name)
    )


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kinds, grad", [("vv", "sum"), ("vp", "identity")])
def test_opcheck_exchange_padded(kinds: str, grad: str, requires_grad: bool) -> None:
    group = ShardGroup(4)
    x = torch.randn(4, 6, 2, requires_grad=requires_grad)
    sinks = [0, 2, 2, 3, 3, 5, 5, 6] if kinds == "vv" else [0, 6]
    args = (x, torch.tensor([3, 0, 6, 1]), sinks, kinds, "mean", 0.5, torch.float32, grad, group._runner.name)
    torch.library.opcheck(exchange_padded.exchange_padded.overload, args)


def test_opcheck_coverage() -> None:
    torch.library.opcheck(exchange.coverage.overload, (torch.ones(1), [0, 3, 2, 5], 6))


def step(group: ShardGroup, x: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    total = group.all_reduce(x, lengths, size=7, op="mean")
    parts = group.reduce_scatter(x, lengths, size=7)
    rows = group.all_gather(x, lengths)
    return (total * 2).sum() + sum((p * p).sum() for p in parts) + rows.sum()


def padded_step(group: ShardGroup, x: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
    total = group.all_reduce(x, lengths, size=7)
    return (total * 2).sum() + sum((p * p).sum() for p in group.reduce_scatter(x, lengths, size=7))


def gradients(fn: Callable, group: ShardGroup, x: list[torch.Tensor], lengths: list[int] | torch.Tensor) -> list:
    x = [t.clone().requires_grad_() for t in x]
    loss = fn(group, x, lengths)
    return [loss.detach(), *torch.autograd.grad(loss, x)]


def compiled_equals_eager(rank: int, world_size: int) -> tuple[int, int]:
    torch._dynamo.reset()
    group = ShardGroup(4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    x = [random_values((7, 2), torch.float32, v).nan_to_num(1.0, 2.0, 3.0) for v in group.virtual_ranks]
    for i in range(20):
        lengths = [(i * (r + 3)) % 8 for r in range(4)]
        for a, b in zip(gradients(compiled, group, x, lengths), gradients(step, group, x, lengths)):
            assert_same(a, b)
    by_ints = counter.frame_count
    counter.clear()
    compiled = torch.compile(padded_step, fullgraph=True, backend=counter)
    for i in range(20):
        lengths = torch.tensor([(i * (v + 3)) % 8 for v in group.virtual_ranks])
        for a, b in zip(gradients(compiled, group, x, lengths), gradients(padded_step, group, x, lengths)):
            assert_same(a, b)
    return by_ints, counter.frame_count


@pytest.mark.parametrize("world_size", [1, 2])
def test_fullgraph_compiles_at_most_two_graphs_for_twenty_lengths(world_size: int) -> None:
    results = [compiled_equals_eager(0, 1)] if world_size == 1 else run_processes(compiled_equals_eager, world_size)
    for by_ints, by_tensor in results:
        assert by_ints <= 2 and by_tensor == 1


def counted_lengths(group: ShardGroup, x: list[torch.Tensor]) -> torch.Tensor:
    return group.all_reduce(x)


def test_counted_lengths_are_refused_while_compiling() -> None:
    def refuse(rank: int, world_size: int) -> None:
        torch._dynamo.reset()
        group = ShardGroup(2)
        with pytest.raises(Exception, match="lengths"):
            torch.compile(counted_lengths, fullgraph=True, backend="eager")(group, [torch.ones(2)])

    run_processes(refuse, 2)


@pytest.mark.parametrize("lengths, size, message", [
    ([9, 1, 1, 1], 9, "lengths: virtual rank 0 has 9, but its shard holds 6"),
    ([6, 1, 1, 1], 3, "lengths: virtual rank 0 has 6, beyond size 3"),
])  # fmt: skip
def test_compiled_all_reduce_is_checked_when_it_runs(lengths: list, size: int, message: str) -> None:
    group = ShardGroup(4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(*shards: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(list(shards), lengths, size=size)

    with pytest.raises(ValueError, match=message):
        total(*torch.ones(4, 6))


def test_compiled_all_reduce_writes_out() -> None:
    group, x = ShardGroup(4), torch.arange(24.0).view(4, 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(out: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(list(shards), [6, 2, 0, 1], out=out)

    out = torch.empty(6)
    total(out, *x)
    assert_same(out, group.all_reduce(list(x), [6, 2, 0, 1]))


def test_fake_tensors_go_through_the_operator() -> None:
    group = ShardGroup(2)
    with FakeTensorMode():
        shards = [torch.empty(n, 2, requires_grad=True) for n in (3, 2)]
        out = group.all_reduce(shards, [3, 2])
        out.sum().backward()
    assert isinstance(out, FakeTensor) and out.shape == (3, 2)
    assert all(isinstance(s.grad, FakeTensor) and s.grad.shape == s.shape for s in shards)
