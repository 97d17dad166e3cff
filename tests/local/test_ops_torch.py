"""The local sums under autograd, torch.compile, vmap and opcheck; gradients bit for bit against the adjoint loops."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import shardsum
from shardsum.core import bits, reference
from shardsum.local import ops as operators
from tests.problems import laid_out, problems
from tests.values import B0_LENGTHS, assert_same, b0, random_values


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 10**6))
def test_gradients_equal_the_adjoint_loops(p: dict, seed: int) -> None:
    if not p["x"].dtype.is_floating_point:
        return
    lengths, starts, size, kwargs = p["lengths"], p["starts"], p["size"], p["kwargs"]
    out_dtype = kwargs["out_dtype"]
    grad = random_values((size, *p["x"].shape[2:]), out_dtype, seed)
    adjoint = dict(op=kwargs["op"], scale=kwargs["scale"], dtype=p["x"].dtype)
    expected = reference.ragged_sum_adjoint(grad, starts, lengths, **adjoint)

    x = laid_out(p["x"], p["layout"]).detach().requires_grad_()
    shardsum.ragged_sum(x, lengths, starts=starts, size=size, **kwargs).backward(grad)
    for r, n in enumerate(lengths):
        assert_same(x.grad[r, :n], expected[r])
        assert_same(x.grad[r, n:], torch.zeros_like(x.grad[r, n:]))

    rows = [p["x"][r, :n].clone().requires_grad_() for r, n in enumerate(lengths)]
    shardsum.ragged_sum(rows, starts=starts, size=size, **kwargs).backward(grad)
    for row, e in zip(rows, expected):
        assert_same(row.grad, e)

    padded = operators.padded_sum_device_adjoint(
        grad, torch.tensor(starts), torch.tensor(lengths), p["x"].shape[1], kwargs["op"], kwargs["scale"], p["x"].dtype
    )
    for r, n in enumerate(lengths):
        assert_same(padded[r, :n], expected[r])
        assert_same(padded[r, n:], torch.zeros_like(padded[r, n:]))

    x = p["x"].clone().requires_grad_()
    mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.5
    y = shardsum.masked_sum(x, mask, **kwargs)
    grad = random_values(tuple(y.shape), y.dtype, seed)
    y.backward(grad)
    assert_same(x.grad, reference.masked_sum_adjoint(grad, mask, **adjoint))


@pytest.mark.parametrize("call", [
    lambda x, out: shardsum.ragged_sum(x, B0_LENGTHS, out=out),
    lambda x, out: shardsum.ragged_sum(x, B0_LENGTHS, out=out, accumulate=True),
    lambda x, out: shardsum.ragged_sum(list(x), out=out),
    lambda x, out: shardsum.ragged_sum(x, starts=torch.tensor([0] * 4), out=out),
    lambda x, out: shardsum.masked_sum(x, x > 20, out=out),
])  # fmt: skip
def test_autograd_notices_that_out_was_overwritten(call) -> None:
    out, weight = torch.ones(6), torch.ones(6, requires_grad=True)
    loss = (out * weight).sum()  # saves out
    call(b0(), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("call", [
    lambda x: shardsum.ragged_sum(x, B0_LENGTHS),
    lambda x: shardsum.ragged_sum(list(x)),
    lambda x: shardsum.masked_sum(x, torch.ones(4, 6, dtype=torch.bool)),
    lambda x: shardsum.MaskedSum(torch.arange(24).view(4, 6) % 2 > 0)(x),
    lambda x: shardsum.ShardGroup(4).all_reduce(list(x)),
])  # fmt: skip
def test_a_forward_mode_tangent_is_never_lost(call) -> None:
    with pytest.raises(ValueError, match="forward-mode derivatives are not implemented"):
        torch.func.jvp(call, (b0(),), (torch.ones(4, 6),))


def test_vmap_never_loses_a_gradient() -> None:
    batch = b0().expand(2, 4, 6).clone().requires_grad_()
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda x: shardsum.ragged_sum(x, B0_LENGTHS))(batch)


@pytest.mark.parametrize("call", [
    lambda x: shardsum.ragged_sum(x, B0_LENGTHS, op="mean"),
    lambda x: shardsum.ragged_sum(x, B0_LENGTHS, starts=[0, 1, 2, 0], size=8),
    lambda x: shardsum.masked_sum(x, x.detach() > 20),
])  # fmt: skip
def test_a_batch_of_gradients_goes_backward_at_once(call) -> None:
    def cubes(x: torch.Tensor) -> torch.Tensor:
        return (call(x) ** 3).sum()

    at_once = torch.autograd.functional.hessian(cubes, b0(), vectorize=True)
    assert bits.equal(at_once, torch.autograd.functional.hessian(cubes, b0()))


def opcheck_samples() -> list[tuple]:
    x = random_values((4, 6, 3), torch.float32, 5).nan_to_num(1.0, 2.0, 3.0)
    rows = [x[r, :n].clone() for r, n in enumerate(B0_LENGTHS)]
    grad, mask = torch.randn(6, 3), torch.rand(4, 6) < 0.5
    tail = ("mean", 0.5, torch.float32)
    lengths = torch.tensor(B0_LENGTHS)
    return [
        (operators.ragged_sum, (rows, [0] * 4, 6, B0_LENGTHS, *tail)),
        (operators.ragged_sum_adjoint, (grad, [0] * 4, B0_LENGTHS, *tail)),
        (operators.padded_sum, (x, [], B0_LENGTHS, 6, *tail)),
        (operators.padded_sum_adjoint, (grad, [], B0_LENGTHS, 6, *tail)),
        (operators.padded_sum_device, (x, None, lengths, 6, *tail)),
        (operators.padded_sum_device_adjoint, (grad, None, lengths, 6, *tail)),
        (operators.masked_sum, (x, mask, *tail)),
        (operators.masked_sum_adjoint, (grad, mask, *tail)),
    ]


@pytest.mark.parametrize("op, args", opcheck_samples(), ids=lambda v: getattr(v, "_name", ""))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(op, args: tuple, requires_grad: bool) -> None:
    first = args[0]
    if requires_grad:
        first = [t.requires_grad_() for t in first] if isinstance(first, list) else first.requires_grad_()
    torch.library.opcheck(op.overload, (first, *args[1:]))


def test_gradgradcheck() -> None:
    x = torch.randn(4, 6, 2, dtype=torch.float64, requires_grad=True)
    for fn in (
        lambda x: shardsum.ragged_sum(x, B0_LENGTHS, op="mean"),
        lambda x: shardsum.ragged_sum([x[0], x[1, :2], x[2]], starts=[0, 3, 1], scale=0.5, size=8),
    ):
        torch.autograd.gradcheck(fn, (x,))
        torch.autograd.gradgradcheck(fn, (x,))


def test_compile_follows_lengths_with_two_graphs() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def by_ints(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return shardsum.ragged_sum(x * 2, lengths, op="mean") + 1

    @torch.compile(fullgraph=True, backend=counter)
    def by_tensor(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return shardsum.ragged_sum(x * 2, lengths) + 1

    x = b0().requires_grad_()
    for i in range(20):
        lengths = [(i * (r + 3)) % 7 for r in range(4)]
        y = by_ints(x, lengths)
        assert_same(y, shardsum.ragged_sum(x * 2, lengths, op="mean") + 1)
        (g,) = torch.autograd.grad(y.sum(), x)
        (e,) = torch.autograd.grad((shardsum.ragged_sum(x * 2, lengths, op="mean") + 1).sum(), x)
        assert_same(g, e)
    assert counter.frame_count <= 2
    counter.clear()
    for i in range(20):
        lengths = torch.tensor([(i * (r + 3)) % 7 for r in range(4)])
        assert_same(by_tensor(x, lengths), shardsum.ragged_sum(x * 2, lengths) + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_compiled_accumulate_and_default_size(dtype: torch.dtype) -> None:
    x = random_values((5, 6, 3), torch.float32, 8).nan_to_num(1.0, 2.0, 3.0).to(dtype)
    lengths, starts = [6, 2, 5, 0, 3], [0, 3, 1, 2, 6]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    previous = random_values((9, 3), dtype, 9)
    expected = reference.ragged_sum(rows, starts, 9, out_dtype=dtype, previous=previous)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def add(out: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        if len(shards) == 1:
            return shardsum.ragged_sum(shards[0], lengths, starts=starts, out=out, accumulate=True)
        return shardsum.ragged_sum(shards, lengths, starts=starts, out=out, accumulate=True)

    assert_same(add(previous.clone(), x), expected)
    assert_same(add(previous.clone(), *x), expected)


@pytest.mark.parametrize("lengths, starts, size, message", [
    ([9, 1, 1, 1], None, 9, "lengths: virtual rank 0 has 9, but its shard holds 6"),
    ([2, -2, 1, 1], None, 9, "lengths: virtual rank 1 has -2"),
    ([2, 2, 1, 6], None, 5, "lengths: virtual rank 3 ends at 6, beyond size 5"),
    ([2, 2, 1, 1], [0, 0, -1, 0], 6, "starts: virtual rank 2 starts at -1"),
])  # fmt: skip
def test_compiled_lists_are_checked_when_they_run(lengths: list, starts: list | None, size: int, message: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(*shards: torch.Tensor) -> torch.Tensor:
        return shardsum.ragged_sum(shards, lengths, starts=starts, size=size)

    with pytest.raises(ValueError, match=message):
        total(*b0())
