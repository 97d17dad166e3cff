"""The communicating operators under torch.library.opcheck and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardsum import ShardGroup
from shardsum.group.terms import Terms, flatten
from tests.processes import run_processes
from tests.values import assert_same, random_values


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kinds, op, grad", [("vv", "mean", "sum"), ("vp", "sum", "identity"), ("vp", "mean", "sum")])
def test_opcheck_exchange(kinds: str, op: str, grad: str, requires_grad: bool) -> None:
    group = ShardGroup(4)
    shards = [torch.randn(n, 2, requires_grad=requires_grad) for n in (3, 0, 5, 1)]
    sources = flatten([(0, 3), (2, 2), (1, 6), (0, 1)])
    sinks = flatten([(0, 6)] * (4 if kinds[1] == "v" else 1))
    tail = (6, "exchange", kinds, op, 0.5, torch.float32, grad, None, group._planner.name)
    torch.library.opcheck(torch.ops.shardsum.exchange.default, (shards, None, sources, sinks, None, *tail))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kinds, grad", [("vv", "sum"), ("vp", "identity")])
def test_opcheck_exchange_padded(kinds: str, grad: str, requires_grad: bool) -> None:
    group = ShardGroup(4)
    x = [torch.randn(6, 2, requires_grad=requires_grad) for _ in range(4)]
    sinks = [0, 2, 2, 3, 3, 5, 5, 6] if kinds == "vv" else [0, 6]
    tail = (6, "all_reduce", kinds, "mean", 0.5, torch.float32, grad, None, group._planner.name)
    args = (x, torch.tensor([3, 0, 6, 1]), [0, 6] * 4, sinks, None, *tail)
    torch.library.opcheck(torch.ops.shardsum.exchange.default, args)


def test_opcheck_coverage() -> None:
    torch.library.opcheck(torch.ops.shardsum.coverage.default, (torch.ones(1), [0, 3, 2, 5], 6))


def test_opcheck_local_adjoint() -> None:
    args = (torch.randn(6, 2), [0, 3, 2, 4], [3, 5], 0.5, torch.bfloat16)
    torch.library.opcheck(torch.ops.shardsum.local_adjoint.default, args)


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


def in_and_out(k: int) -> tuple[list, list]:
    """Intervals of four ranks, unlike for every k; outputs of two positions or more (0 and 1 compile anew)."""
    starts = [(k + r) % 3 for r in range(4)]
    return [(s, s + k * r % 4) for r, s in enumerate(starts)], [(s, s + 2 + (k + r) % 4) for r, s in enumerate(starts)]


def intervals_step(group: ShardGroup, x: list[torch.Tensor], held: list, wanted: list) -> torch.Tensor:
    outs = group.exchange(x, held, wanted, size=7, op="mean")
    return sum((y * y).sum() for y in outs)


def default_sizes_step(group: ShardGroup, x: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    outs = [group.all_reduce(x, lengths), *group.reduce_scatter(x, lengths)]
    outs += group.reduce_scatter(x, lengths, async_op=True).wait()
    return sum((y * y).sum() for y in outs)


def test_intervals_and_default_sizes_compile_for_all_values() -> None:
    group = ShardGroup(4)
    x = [torch.randn(16, 2) for _ in range(4)]
    for fn, cases, most in (
        # Three graphs: what the first two calls have in common is a constant.
        (intervals_step, [in_and_out(k) for k in range(20)], 3),
        (default_sizes_step, [([8 + k * (r + 3) % 8 for r in range(4)],) for k in range(20)], 2),
    ):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(fn, fullgraph=True, backend=counter)
        for case in cases:
            with torch.no_grad():
                assert_same(compiled(group, x, *case), fn(group, x, *case))
        assert counter.frame_count <= most


BEYOND = [
    (lambda g, x: g.all_reduce(x, [9, 1, 1, 1], size=9), "lengths: virtual rank 0 has 9, but its shard holds 6"),
    (lambda g, x: g.all_reduce(x, [6, 1, 1, 1], size=3), "lengths: virtual rank 0 has 6, beyond size 3"),
    (lambda g, x: g.reduce_scatter(x, [3, 1, 5, 1], size=3), "lengths: virtual rank 2 has 5, beyond size 3"),
    (lambda g, x: g.reduce_scatter(x, [3, 1, -1, 1], size=3), "lengths: virtual rank 2 has -1"),
    (lambda g, x: g.all_gather(x, [3, 7, 1, 1]), "lengths: virtual rank 1 has 7, but its shard holds 6"),
    (lambda g, x: g.exchange(x, [(0, 2)] * 4, [(0, 3)] * 4, size=2), r"out_intervals: virtual rank 0 has \(0, 3\)"),
    (lambda g, x: g.exchange(x, [(3, 2)] * 4, [(0, 3)] * 4, size=3), r"in_intervals: virtual rank 0 has \(3, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", BEYOND, ids=[message for _, message in BEYOND])
def test_compiled_calls_are_checked_when_they_run(call: Callable, message: str) -> None:
    group = ShardGroup(4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*shards: torch.Tensor) -> torch.Tensor:
        return call(group, list(shards))

    for run in (compiled, lambda *shards: call(group, list(shards))):
        with pytest.raises(ValueError, match=message):
            run(*torch.ones(4, 6))


def too_long_on_one(rank: int, world_size: int) -> str:
    torch._dynamo.reset()
    group = ShardGroup(4)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(lengths: list[int], *shards: torch.Tensor) -> torch.Tensor:
        return group.reduce_scatter(list(shards), lengths, size=3)

    with pytest.raises(ValueError) as caught:
        compiled([1, 1, 1, 5 if rank else 3], *torch.ones(2, 6))
    return str(caught.value)


def test_a_compiled_length_beyond_size_is_named_on_every_process() -> None:
    messages = run_processes(too_long_on_one, 2)
    assert messages == ["reduce_scatter: process 1: lengths: virtual rank 3 has 5, beyond size 3"] * 2


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


def kept_step(group: ShardGroup, x: list[torch.Tensor], lengths: list[int], rows: torch.Tensor) -> torch.Tensor:
    y = group.all_reduce([t.tanh() for t in x], lengths, size=7, op="mean", grad="sum")
    z = group.reduce_scatter([y.sin() * y] * len(x), [7] * 4, size=7)
    u = group.all_reduce([t.cos() for t in x], rows, size=7, op="mean")
    return (u.sin() * u).sum() + sum((p.exp() * p.sin()).sum() for p in z)


def count_exchanges(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    group = ShardGroup(4)
    calls, run = [], type(group._planner).run_registered

    def counted(planner: object, terms: Terms, *rest: object) -> list[torch.Tensor]:
        calls.append(terms.name)
        return run(planner, terms, *rest)

    x = [torch.randn(7, 16, requires_grad=True) for _ in group.virtual_ranks]
    rows = torch.tensor([7 - v for v in group.virtual_ranks])
    # One process alone wants to save memory: it must take part in no other exchanges.
    budget = torch._functorch.config.patch(activation_memory_budget=0.3 if rank else 1.0)
    with budget, patch.object(type(group._planner), "run_registered", counted):
        compiled = torch.compile(kept_step, fullgraph=True, backend="aot_eager_decomp_partition")
        loss = compiled(group, x, [7, 3, 5, 0], rows)
        forward = calls.copy()
        loss.backward()
    return forward, calls[len(forward) :]


def test_backward_runs_no_exchange_again_to_save_memory() -> None:
    forward = ["all_reduce", "reduce_scatter", "all_reduce"]
    backward = ["backward of reduce_scatter", "backward of all_reduce"]
    assert run_processes(count_exchanges, 2) == [(forward, backward)] * 2


def step_in_region(group: ShardGroup, *args: Any) -> torch.Tensor:
    with torch.autograd.graph.region_activation_memory_budget(0.0):
        return kept_step(group, *args)


def save_nothing(rank: int, world_size: int) -> list[str]:
    group, found = ShardGroup(4), []
    x = [torch.randn(7, 16, requires_grad=True) for _ in group.virtual_ranks]
    cases = [(kept_step, 0.0)]
    if hasattr(torch.autograd.graph, "region_activation_memory_budget"):  # torch 2.13
        cases.append((step_in_region, 1.0))
    for step, budget in cases:
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
        with torch._functorch.config.patch(activation_memory_budget=budget), pytest.raises(Exception) as caught:
            compiled(group, x, [7, 3, 5, 0], torch.tensor([7 - v for v in group.virtual_ranks]))
        found.append(str(caught.value))
    return found


def test_a_compiler_that_saves_nothing_is_refused() -> None:
    for messages in run_processes(save_nothing, 2):
        for name, message in zip(("config.activation", "graph.region_activation"), messages):
            assert f"{name}_memory_budget: at 0 the compiler runs collectives again in backward" in message
