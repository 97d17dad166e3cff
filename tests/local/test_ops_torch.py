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


MASK = torch.arange(24).view(4, 6) % 3 > 0
HELD, GAPS = shardsum.MaskedSum(torch.arange(6) < torch.tensor(B0_LENGTHS)[:, None]), shardsum.MaskedSum(MASK)
LEFT = shardsum.MaskedSum(torch.arange(6) >= torch.tensor(B0_LENGTHS)[:, None], op="mean")
# Each sum, and what it is of whole numbers in plain torch.
SUMS = [
    (lambda x: shardsum.ragged_sum(x, B0_LENGTHS), HELD.shard_mask, False),
    (lambda x: shardsum.ragged_sum(x, torch.tensor(B0_LENGTHS)), HELD.shard_mask, False),
    (lambda x: shardsum.ragged_sum(list(x)), torch.ones(4, 6, dtype=torch.bool), False),
    (lambda x: shardsum.ragged_sum(list(x), B0_LENGTHS, size=6, op="mean"), HELD.shard_mask, True),
    (lambda x: shardsum.masked_sum(x, MASK, op="mean"), MASK, True),
    (HELD, HELD.shard_mask, False),
    (LEFT, LEFT.shard_mask, True),
    (GAPS, MASK, False),
]


def plain(x: torch.Tensor, mask: torch.Tensor, mean: bool) -> torch.Tensor:
    mask = mask.reshape(*mask.shape, *[1] * (x.dim() - 2))
    total = torch.where(mask, x, 0).sum(0)
    return total / mask.sum(0).clamp(min=1) if mean else total


@pytest.mark.parametrize("call, mask, mean", SUMS)
def test_transforms_of_torch_func(call, mask: torch.Tensor, mean: bool) -> None:
    """grad, jacrev, jacfwd, hessian, jvp, vmap, and one within another."""

    def ours(x: torch.Tensor) -> torch.Tensor:
        return (call(x) ** 3).sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return (plain(x, mask, mean) ** 3).sum()

    x, tangent = b0(torch.float64), torch.arange(24.0, dtype=torch.float64).view(4, 6)
    batch = torch.stack([x, 2 * x, tangent])
    func = torch.func
    for transform in (
        lambda f: func.grad(f)(x),
        lambda f: func.hessian(f)(x),
        lambda f: func.jacrev(func.jacrev(f))(x),
        lambda f: func.jacfwd(func.jacfwd(f))(x),
        lambda f: func.jvp(f, (x,), (tangent,))[1],
        lambda f: func.jvp(func.grad(f), (x,), (tangent,))[1],
        lambda f: func.vmap(f)(batch),
        lambda f: func.vmap(f, in_dims=2)(batch.movedim(0, 2)),
        lambda f: func.vmap(func.grad(f))(batch),
        lambda f: func.grad(lambda b: func.vmap(f)(b).sum())(batch),
        lambda f: func.grad(lambda y: func.grad(lambda x: f(x) * y.sum())(x).sum())(tangent),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-12, atol=0)
    wanted = torch.stack([plain(b[..., None], mask, mean) for b in batch])
    assert torch.equal(func.vmap(call)(batch[..., None]), wanted)


@pytest.mark.parametrize("call, mask, mean", SUMS)
def test_forward_mode(call, mask: torch.Tensor, mean: bool) -> None:
    x, tangent = b0(), torch.arange(24.0).view(4, 6)
    with torch.autograd.forward_ad.dual_level():
        out = torch.autograd.forward_ad.unpack_dual(call(torch.autograd.forward_ad.make_dual(x, tangent)))
        assert torch.equal(out.primal, plain(x, mask, mean)) and torch.equal(out.tangent, plain(tangent, mask, mean))
        assert torch.autograd.forward_ad.unpack_dual(call(x)).tangent is None or not out.tangent.isnan().any()
        with pytest.raises(ValueError, match="out: not possible"):
            shardsum.ragged_sum(torch.autograd.forward_ad.make_dual(x, tangent), B0_LENGTHS, out=torch.empty(6))


def test_a_tangent_of_one_shard_alone() -> None:
    rows = list(b0())
    _, tangent = torch.func.jvp(lambda x: shardsum.ragged_sum([rows[0], x, *rows[2:]]), (rows[1],), (torch.ones(6),))
    assert tangent.tolist() == [1] * 6
    with pytest.raises(ValueError, match="forward-mode derivatives are not implemented"):
        torch.func.jvp(shardsum.ShardGroup(4).all_reduce, (rows,), ([torch.ones(6)] * 4,))


def test_batches_of_shards_alone() -> None:
    batch = b0().expand(2, 4, 6).clone().requires_grad_()
    out = torch.vmap(lambda x: shardsum.ragged_sum(x, B0_LENGTHS))(batch)
    out.sum().backward()
    assert torch.equal(batch.grad, HELD.shard_mask.float().expand(2, 4, 6))
    rows = list(b0())
    got = torch.vmap(lambda x: shardsum.ragged_sum([rows[0], x, *rows[2:]]))(torch.stack([rows[1], 2 * rows[1]]))
    assert torch.equal(got[1] - got[0], rows[1])
    for call, *batches in (
        (lambda x, mask: shardsum.masked_sum(x, mask), batch, MASK.expand(2, 4, 6)),
        (lambda x, n: shardsum.ragged_sum(x, n), batch, torch.tensor([B0_LENGTHS] * 2)),
    ):
        with pytest.raises(ValueError, match=r"vmap: shards can be a batch; lengths"):
            torch.vmap(call)(*batches)


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
        (operators.padded_sum, (x, [], [], B0_LENGTHS, 6, *tail)),
        (operators.padded_sum, (x, [0, 0, 2, 1], [2, 0, 0, 4], [3, 5, 0, 1], 7, *tail)),
        (operators.padded_sum_adjoint, (grad, [], [], B0_LENGTHS, 6, *tail)),
        (operators.padded_sum_device, (x, None, lengths, 6, *tail)),
        (operators.padded_sum_device_adjoint, (grad, None, lengths, 6, *tail)),
        (operators.masked_sum, (x, mask, *tail)),
        (operators.masked_sum_adjoint, (grad, mask, 6, *tail)),
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


def test_compiled_lists_have_the_size_of_eager_ones() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(*shards: torch.Tensor) -> torch.Tensor:
        return shardsum.ragged_sum(shards, [3, 1, 2, 0])

    assert_same(total(*b0()), shardsum.ragged_sum(list(b0()), [3, 1, 2, 0]))  # (6,), as the shards, not (3,)


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
