"""ragged_sum and masked_sum against the loops of reference.py, bit for bit; first layer: one process, no group."""

from __future__ import annotations

import marshal

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from values import B0_LENGTHS, B0_SUM, FLOATS, INTEGERS, assert_same, b0, random_values

import shardsum
from shardsum import bits, kernels, operators, reference, usual
from shardsum.numerics import resolve_out_dtype


@st.composite
def problems(draw: st.DrawFn) -> dict:
    num_ranks = draw(st.integers(1, 9))
    capacity = draw(st.integers(0, 7))
    size = draw(st.integers(0, 9))
    lengths = [draw(st.integers(0, min(capacity, size))) for _ in range(num_ranks)]
    starts = [draw(st.integers(0, size - n)) for n in lengths]
    dtype = draw(st.sampled_from(FLOATS + INTEGERS))
    op = draw(st.sampled_from(["sum", "mean"])) if dtype.is_floating_point else "sum"
    scale = draw(st.sampled_from([None, 0.1, -3.0])) if dtype.is_floating_point else None
    wanted = draw(st.sampled_from([None, *FLOATS]))
    try:
        out_dtype = resolve_out_dtype(dtype, wanted)
    except ValueError:
        out_dtype = resolve_out_dtype(dtype, None)
    # Wide positions take another CPU kernel than narrow ones.
    trailing = draw(st.sampled_from([(), (1,), (3,), (8,), (33,), (2, 5), (0,), (200,)]))
    x = random_values((num_ranks, capacity, *trailing), dtype, draw(st.integers(0, 10**6)))
    return dict(
        x=x, lengths=lengths, starts=starts, size=size,
        layout=draw(st.sampled_from(["dense", "offset", "strided", "transposed"])),
        kwargs=dict(op=op, scale=scale, out_dtype=out_dtype),
    )  # fmt: skip


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other memory: shifted by one element, every second row of a larger buffer, or transposed."""
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "strided":
        return torch.stack([x, torch.zeros_like(x)], 2).flatten(1, 2)[:, ::2] if x.dim() > 1 and x.numel() else x
    if layout == "transposed" and x.dim() > 2:
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    return x


@settings(deadline=None, max_examples=200)
@given(problems())
def test_ragged_sum_equals_reference_in_every_form(p: dict) -> None:
    x, lengths, starts, size, kwargs = laid_out(p["x"], p["layout"]), p["lengths"], p["starts"], p["size"], p["kwargs"]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(rows, starts, size, **kwargs)
    assert_same(shardsum.ragged_sum(x, lengths, starts=starts, size=size, **kwargs), expected)
    assert_same(shardsum.ragged_sum(rows, starts=starts, size=size, **kwargs), expected)
    device_form = operators.kernels.sum_padded_device
    out = torch.full_like(expected, 77)
    device_form(
        out, operators.readable(operators.row_contiguous(x)), torch.tensor(starts), torch.tensor(lengths),
        kwargs["op"] == "mean", kwargs["scale"], False,
    )  # fmt: skip
    assert_same(out, expected)


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from([None, 1, 3]))
def test_the_usual_call_equals_reference(p: dict, stride: int | None) -> None:
    """Padded shards and a list of lengths; ``stride``: into an ``out`` whose elements lie so far apart."""
    x, lengths, kwargs = laid_out(p["x"], p["layout"]), p["lengths"], p["kwargs"]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(rows, [0] * len(rows), x.shape[1], **kwargs)
    for form in (lengths, torch.tensor(lengths), torch.tensor([lengths, lengths]).t()[:, 0]):
        if stride is None:
            assert_same(shardsum.ragged_sum(x, form, **kwargs), expected)
            continue
        out = torch.full((expected.numel() * stride,), 77, dtype=expected.dtype)[::stride].view(expected.shape)
        assert shardsum.ragged_sum(x, form, op=kwargs["op"], scale=kwargs["scale"], out=out) is out
        assert_same(out, expected)


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from([None, 1, 3]), st.sampled_from([list, tuple]), st.booleans())
def test_whole_shards_equal_reference(p: dict, stride: int | None, form: type, sized: bool) -> None:
    """A list of shards that all start at 0; ``stride``: into an ``out`` whose elements lie so far apart."""
    kwargs = p["kwargs"] | ({"size": p["size"]} if sized else {})
    rows = form([laid_out(p["x"][r : r + 1, :n], p["layout"])[0] for r, n in enumerate(p["lengths"])])
    size = p["size"] if sized else max(p["lengths"])
    expected = reference.ragged_sum(rows, [0] * len(rows), size, **p["kwargs"])
    if stride is None:
        assert_same(shardsum.ragged_sum(rows, **kwargs), expected)
        return
    out = torch.full((expected.numel() * stride,), 77, dtype=expected.dtype)[::stride].view(expected.shape)
    del kwargs["out_dtype"]
    assert shardsum.ragged_sum(rows, **kwargs, out=out) is out
    assert_same(out, expected)


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(0, 10**6))
def test_masked_sum_equals_reference(p: dict, seed: int) -> None:
    x, kwargs = laid_out(p["x"], p["layout"]), p["kwargs"]
    mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.5
    assert_same(shardsum.masked_sum(x, mask, **kwargs), reference.masked_sum(x, mask, **kwargs))


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


def test_mutants_differ_from_the_definition() -> None:
    """What the comparisons above must catch: another order, a low-precision accumulator, an ignored length."""
    x = random_values((8, 16, 4), torch.bfloat16, 1).nan_to_num(1.0, 2.0, 3.0)
    lengths = [16, 3, 9, 0, 16, 7, 11, 16]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(rows, [0] * 8, 16, out_dtype=torch.float32)
    reversed_order = reference.ragged_sum(rows[::-1], [0] * 8, 16, out_dtype=torch.float32)
    low = torch.zeros(16, 4, dtype=torch.bfloat16)
    for row in rows:
        low[: row.shape[0]] += row
    ignored = reference.ragged_sum([*rows[:1], x[1], *rows[2:]], [0] * 8, 16, out_dtype=torch.float32)
    for mutant in (reversed_order, low.float(), ignored):
        assert not bits.equal(mutant, expected)


# Cases that users of distributed reductions have hit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_base_case(dtype: torch.dtype) -> None:
    assert shardsum.ragged_sum(b0(dtype), B0_LENGTHS).tolist() == B0_SUM
    assert shardsum.ragged_sum(b0(dtype), torch.tensor(B0_LENGTHS)).tolist() == B0_SUM


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_never_enters(poison: float) -> None:
    x = b0()
    for r, n in enumerate(B0_LENGTHS):
        x[r, n:] = poison
    x.requires_grad_()
    y = shardsum.ragged_sum(x, B0_LENGTHS)
    assert y.tolist() == B0_SUM
    y.sum().backward()  # an expanded gradient, stride 0
    for r, n in enumerate(B0_LENGTHS):
        assert x.grad[r].tolist() == [1.0] * n + [0.0] * (6 - n)


def test_a_valid_nan_survives_alone() -> None:
    x = b0()
    x[1, 2] = float("nan")
    assert shardsum.ragged_sum(x, B0_LENGTHS).isnan().tolist() == [False, False, True, False, False, False]


def test_odd_totals_and_indivisible_sizes() -> None:
    x = torch.ones(2, 4) * torch.tensor([[1.0], [2.0]])
    assert shardsum.ragged_sum(x, [4, 3]).tolist() == [3, 3, 3, 1]
    assert shardsum.ragged_sum([torch.ones(4), torch.ones(3), torch.ones(3)]).tolist() == [3, 3, 3, 1]


def test_empty_shapes() -> None:
    assert shardsum.ragged_sum(torch.ones(3, 0, 2)).shape == (0, 2)
    assert shardsum.ragged_sum(torch.ones(1, 3)).tolist() == [1, 1, 1]
    assert shardsum.ragged_sum(torch.ones(2, 3), [0, 0], size=5).tolist() == [0] * 5


def test_one_rounding_at_the_end() -> None:
    x = torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16)
    assert shardsum.ragged_sum(x).item() == 264
    x = torch.full((2, 1), 60000.0, dtype=torch.float16)
    assert shardsum.ragged_sum(x, op="mean").item() == 60000


def test_a_lone_negative_zero_is_positive() -> None:
    x = torch.full((3, 2), -0.0)
    for y in (shardsum.ragged_sum(x, [1, 0, 0]), shardsum.masked_sum(x, torch.eye(3, 2, dtype=torch.bool))):
        assert not torch.signbit(y).any()


def test_double_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="out_dtype"):
        shardsum.ragged_sum(torch.ones(2, 2, dtype=torch.float64), out_dtype=torch.bfloat16)


def test_mean_gradient_is_divided_by_the_count() -> None:
    for num_ranks in (2, 4):
        x = torch.randn(num_ranks, 1, requires_grad=True)
        shardsum.ragged_sum(x, [1] + [0] * (num_ranks - 1), op="mean").sum().backward()
        assert x.grad[0].item() == 1.0


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_non_contiguous_input(layout: str) -> None:
    x = random_values((5, 6, 4), torch.float32, 3)
    assert_same(shardsum.ragged_sum(laid_out(x, layout), [6, 1, 4, 0, 3]), shardsum.ragged_sum(x, [6, 1, 4, 0, 3]))


def test_out_and_accumulate() -> None:
    x = random_values((5, 6, 3), torch.bfloat16, 4)
    lengths = [6, 2, 5, 0, 3]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    previous = torch.randn(6, 3)
    for out in (previous.clone(), torch.empty(3, 6).t().copy_(previous)):
        result = shardsum.ragged_sum(x, lengths, out=out, accumulate=True, scale=0.3)
        assert result is out
        assert_same(out, reference.ragged_sum(rows, [0] * 5, 6, scale=0.3, out_dtype=torch.float32, previous=previous))
    for target in (x[0], x.flatten()[3:21].view(6, 3)):
        with pytest.raises(ValueError, match="shares memory"):
            shardsum.ragged_sum(x, lengths, out=target)
    with pytest.raises(ValueError, match="accumulate"):
        shardsum.ragged_sum(x, lengths, accumulate=True)


BAD = [
    (lambda x: shardsum.ragged_sum(x, [7, 0, 0, 0]), r"lengths: virtual rank 0 has 7, but its shard holds 6"),
    (lambda x: shardsum.ragged_sum(x, [1, -1, 0, 0]), r"lengths: virtual rank 1 has -1"),
    (lambda x: shardsum.ragged_sum(x, [1, 1, 1]), r"lengths: 3 values for 4 virtual ranks"),
    (lambda x: shardsum.ragged_sum(x, torch.tensor([1, 1, 1, 9])), r"virtual rank 3 has 9"),
    (lambda x: shardsum.ragged_sum(x, torch.ones(4)), r"lengths: expected an integer Tensor"),
    (lambda x: shardsum.ragged_sum(x, [1.5, 1, 1, 1]), r"lengths: expected 4 ints"),
    (lambda x: shardsum.ragged_sum(x, [6, 6, 6, 6], size=5), r"virtual rank 0 ends at 6, beyond size 5"),
    (lambda x: shardsum.ragged_sum(x, starts=[0, 0, -2, 0]), r"starts: virtual rank 2 starts at -2"),
    (lambda x: shardsum.ragged_sum([x[0], x[1].double()]), r"virtual rank 1 has dtype torch.float64"),
    (lambda x: shardsum.ragged_sum([x, x[:, :2]]), r"virtual rank 1 has trailing shape \(2,\)"),
    (lambda x: shardsum.ragged_sum([x[0], x[1].to("meta")]), r"virtual rank 1 has device meta"),
    (lambda x: shardsum.ragged_sum([]), r"shards"),
    (lambda x: shardsum.ragged_sum(x[0]), r"shards: expected a padded Tensor"),
    (lambda x: shardsum.ragged_sum(x.to(torch.complex64)), r"complex64 cannot be summed"),
    (lambda x: shardsum.ragged_sum(x.int(), op="mean"), r"mean of torch.int32"),
    (lambda x: shardsum.ragged_sum(x.int(), scale=2.0), r"scale of torch.int32"),
    (lambda x: shardsum.ragged_sum(x, op="max"), r"op: expected"),
    (lambda x: shardsum.ragged_sum(x, size=-1), r"size: -1|beyond size -1"),
    (lambda x: shardsum.ragged_sum(x, out=torch.empty(5)), r"out: shape \(5,\)"),
    (lambda x: shardsum.ragged_sum(x, out=torch.empty(6, dtype=torch.int64)), r"out_dtype: torch.int64"),
    (lambda x: shardsum.ragged_sum(x.requires_grad_(), out=torch.empty(6)), r"out: not possible"),
    (lambda x: shardsum.masked_sum(x, torch.ones(4, 5, dtype=torch.bool)), r"mask: shape \(4, 5\)"),
    (lambda x: shardsum.masked_sum(x, torch.ones(4, 6)), r"mask: expected a bool"),
    (lambda x: shardsum.masked_sum(x[0], torch.ones(6, dtype=torch.bool)), r"x: expected a Tensor"),
    (lambda x: shardsum.masked_sum(x.to_sparse(), x > 0), r"x: expected a Tensor.*layout torch.sparse_coo"),
    (lambda x: shardsum.masked_sum(x, (x > 0).to_sparse()), r"mask: expected a bool"),
    (lambda x: shardsum.ragged_sum(x.to_sparse(), [1] * 4), r"shards: expected a padded Tensor.*sparse_coo"),
    (lambda x: shardsum.ragged_sum(torch.nested.as_nested_tensor(list(x)), [1] * 4), r"shards: .*layout nested"),
    (lambda x: shardsum.ragged_sum([x[0], x[1].to_sparse()]), r"shards: virtual rank 1 is .*sparse_coo"),
    (lambda x: shardsum.ragged_sum(x, [torch.tensor(2.5)] * 4), r"lengths: expected 4 ints"),
    (lambda x: shardsum.ragged_sum(list(x), torch.ones(4, dtype=torch.bool)), r"lengths: expected an integer Tensor"),
    (lambda x: shardsum.ragged_sum(x[:0], []), r"shards: expected .* with R >= 1"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, size="6"), r"size: expected an int, got '6'"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, size=2**63), r"size: 9223372036854775808 is more than"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, starts=[2**62] * 4), r"size: .* is more than"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, scale="2"), r"scale: expected a float, got '2'"),
    (lambda x: shardsum.ragged_sum(list(x), scale=10**400), r"scale: expected a float"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, scale=torch.ones((), requires_grad=True)), r"scale: expected a float"),
    (lambda x: shardsum.masked_sum(x, x > 0, scale=[1.0]), r"scale: expected a float, got \[1.0\]"),
    (lambda x: shardsum.ragged_sum(x, [True, True, False, True]), r"lengths: expected 4 ints .*, got \[True"),
    (lambda x: shardsum.ragged_sum(x, list(x[:, 0] > 20)), r"lengths: expected 4 ints"),
    (lambda x: shardsum.ragged_sum(x, starts=[0, 0, False, 0]), r"starts: expected 4 ints"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, size=True), r"size: expected an int, got True"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, scale=True), r"scale: expected a float, got True"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, out=torch.empty(6), accumulate="no"), r"accumulate: expected a bool"),
    (lambda x: shardsum.ragged_sum(x, torch.ones(4, dtype=torch.int64, device="meta")), r"lengths: on meta, but .*cpu"),
    (lambda x: shardsum.first_difference({"a": 1}, {"a": 2}), r"first_difference: a is 1 and 2, expected two tensors"),
    (lambda x: shardsum.first_difference(1, 2), r"first_difference: pass two tensors or two mappings"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, out=[0.0]), r"out: expected a Tensor, got \[0.0\]"),
    (lambda x: shardsum.ragged_sum(list(x), out=torch.empty(6).to_sparse()), r"out: expected a Tensor"),
    (lambda x: shardsum.ragged_sum(x, [1] * 4, out=torch.empty(1).expand(6)), r"out: is expanded"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(b0())


UNFIT = {
    "too long": lambda x, out: (out, x, [7, 1, 1, 1]),
    "negative": lambda x, out: (out, x, [-1, 1, 1, 1]),
    "too few lengths": lambda x, out: (out, x, [1, 1, 1]),
    "no rows": lambda x, out: (out, x[:0], []),
    "no positions": lambda x, out: (out[0], x[0], [1] * 6),
    "short out": lambda x, out: (out[:5], x, [1] * 4),
    "long out": lambda x, out: (torch.full((7,), 77.0), x, [1] * 4),
    "another shape": lambda x, out: (out.view(3, 2), x, [1] * 4),
    "another trailing shape": lambda x, out: (out.view(3, 2), x.view(4, 2, 3), [1] * 4),
    "strided out": lambda x, out: (torch.full((12,), 77.0)[::2], x, [1] * 4),
    "expanded out": lambda x, out: (out[:1].expand(6), x, [1] * 4),
    "integer out": lambda x, out: (out.long(), x, [1] * 4),
    "a row as out": lambda x, out: (x[3], x, [1] * 4),
    "out across two rows": lambda x, out: (x.view(-1)[15:21], x, [1] * 4),
    "x inside out": lambda x, out: (x.view(-1)[:16], x.as_strided((1, 16), (1, 1), 8), [1]),
    "transposed x": lambda x, out: (out.view(2, 3), x.view(4, 3, 2).transpose(1, 2), [1] * 4),
    "mean of integers": lambda x, out: (out.long(), x.long(), [1] * 4, True, None),
    "scaled integers": lambda x, out: (out.long(), x.long(), [1] * 4, False, 2.0),
    "a dtype without kernel": lambda x, out: (out, x.to(torch.complex64), [1] * 4),
}


@pytest.mark.parametrize("name", UNFIT)
def test_the_operator_of_the_usual_call_checks_everything(name: str) -> None:
    out, x = torch.full((6,), 77.0), b0()
    before = x.clone()
    call = UNFIT[name](x, out)
    target, shards, lengths, *end = call
    with pytest.raises(RuntimeError, match=r"shardsum: |no native kernel"):
        kernels.sum_checked(*call) if not end else kernels.sum_checked_finish(*call)
    with pytest.raises(RuntimeError, match=r"shardsum: |no native kernel"):
        kernels.sum_checked_tensor(target, shards, torch.tensor(lengths, dtype=torch.int64), *(end or (False, None)))
    assert (out == 77).all() and torch.equal(x, before)


UNFIT_LISTS = {
    "out of another shape": lambda rows, out: (out[:5], rows, -1),
    "out shorter than a shard": lambda rows, out: (out[:3], rows, 3),
    "another size than out": lambda rows, out: (out, rows, 7),
    "another trailing shape": lambda rows, out: (out, [rows[0], rows[1][:, None]], -1),
    "another dtype": lambda rows, out: (out, [rows[0], rows[1].double()], -1),
    "a strided shard": lambda rows, out: (out[:3], [rows[0][::2], rows[1][:3]], -1),
    "a scalar": lambda rows, out: (out[:1], [rows[0][0]], -1),
    "no shards": lambda rows, out: (out, [], -1),
    "a strided out": lambda rows, out: (torch.full((12,), 77.0)[::2], rows, -1),
    "integer out": lambda rows, out: (out.long(), rows, -1),
    "a shard as out": lambda rows, out: (rows[1], rows, -1),
    "out across two shards": lambda rows, out: (rows[0]._base.view(-1)[3:9], rows, -1),
    "mean of integers": lambda rows, out: (out.long(), [r.long() for r in rows], -1, True, None),
    "scaled integers": lambda rows, out: (out.long(), [r.long() for r in rows], -1, False, 2.0),
    "a dtype without kernel": lambda rows, out: (out, [r.to(torch.complex64) for r in rows], -1),
    "a sparse shard": lambda rows, out: (out, [rows[0], rows[1].to_sparse()], -1),
    "a shard without memory": lambda rows, out: (out, [rows[0], rows[1].to("meta")], -1),
}


@pytest.mark.parametrize("name", UNFIT_LISTS)
def test_the_operator_of_whole_shards_checks_everything(name: str) -> None:
    x, out = b0(), torch.full((6,), 77.0)
    before = x.clone()
    target, shards, size, *end = UNFIT_LISTS[name](list(x), out)
    with pytest.raises(RuntimeError, match=r"shardsum: |no native kernel|NotImplemented|Could not run"):
        kernels.sum_checked_list(target, shards, size, *(end or (False, None)))
    assert (out == 77).all() and torch.equal(x, before)


def test_whole_shards_that_are_unusual() -> None:
    rows, want = [b0()[r, :n] for r, n in enumerate(B0_LENGTHS)], torch.tensor(B0_SUM)
    assert torch.equal(shardsum.ragged_sum([torch._neg_view(r.neg()) for r in rows]), want)
    with torch.no_grad():
        assert torch.equal(shardsum.ragged_sum([r.clone().requires_grad_() for r in rows]), want)
    assert shardsum.ragged_sum([r.clone().requires_grad_() for r in rows]).requires_grad
    assert torch.equal(shardsum.ragged_sum(rows, size=8), torch.tensor([*B0_SUM, 0, 0]))
    batch = [torch.stack([r, 2 * r]) for r in b0()]
    with pytest.raises(RuntimeError, match="Batching rule"):  # and not a kernel that takes the batch for a shard
        torch.func.vmap(lambda *rows: shardsum.ragged_sum(rows))(*batch)
    for wrong in ([], [rows[0], None], iter(rows), [rows[0], rows[1].double()]):
        with pytest.raises(ValueError, match="shards: "):
            shardsum.ragged_sum(wrong)
    with pytest.raises(ValueError, match="beyond size 2"):
        shardsum.ragged_sum(rows, size=2)


def test_lengths_of_other_number_types() -> None:
    x = b0()
    for other in (np.int64(2), torch.tensor(2)):
        assert_same(shardsum.ragged_sum(x, [other, 1, 3, 4]), shardsum.ragged_sum(x, [int(other), 1, 3, 4]))
    with pytest.raises(ValueError, match="lengths: expected 4 ints"):
        shardsum.ragged_sum(x, [torch.tensor(2.5), 1, 3, 4])


def test_a_lazy_sign_is_resolved() -> None:
    x, out = b0(), torch.empty(6)
    lazy = torch._neg_view(x.neg())
    assert lazy.is_neg()
    assert shardsum.ragged_sum(lazy, B0_LENGTHS).tolist() == B0_SUM
    assert shardsum.ragged_sum(lazy, B0_LENGTHS, out=out).tolist() == B0_SUM == out.tolist()


def test_the_fallback_refuses_what_the_native_kernel_refuses() -> None:
    with pytest.raises(ValueError, match=r"out_dtype: torch\.int64 is not possible"):
        kernels._sum_padded(torch.empty(6, dtype=torch.int64), b0(), [], B0_LENGTHS, False, None, False)


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


# torch.library and torch.compile


@pytest.mark.parametrize("num_ranks", [4, 12])
def test_what_jit_records_runs_without_the_native_library(num_ranks: int) -> None:
    x, lengths = random_values((num_ranks, 6), torch.float32, 0), [3] * num_ranks
    traced = torch.jit.trace(lambda x: shardsum.ragged_sum(x, lengths), x)
    assert "sum_checked" not in str(traced.graph)
    assert_same(traced(x), shardsum.ragged_sum(x, lengths))


def test_what_make_fx_records_runs_on_fake_tensors() -> None:
    graph = make_fx(lambda x: shardsum.ragged_sum(x, B0_LENGTHS))(b0())
    with FakeTensorMode() as mode:
        assert graph(mode.from_tensor(b0())).shape == (6,)


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


def test_many_lengths_are_kept_by_value_and_type() -> None:
    x = random_values((12, 6), torch.float32, 0)
    lengths = [1, 0, 6, 3, 2, 5, 1, 1, 4, 6, 0, 2]
    for n in (1, 5, 1):  # the same list object with other values
        lengths[3] = n
        expected = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * 12, 6, out_dtype=x.dtype)
        for out in (None, torch.empty(6)):
            assert_same(shardsum.ragged_sum(x, lengths, out=out), expected)
    for odd in (True, 1.0, np.float64(1), torch.tensor(1.0), "1", 1 << 70, -1, 7):
        with pytest.raises(ValueError, match="lengths"):
            shardsum.ragged_sum(x, [odd, *lengths[1:]])
    assert_same(shardsum.ragged_sum(x, [np.int64(1), *lengths[1:]]), expected)


def test_a_list_written_meanwhile_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    x, lengths = random_values((12, 6), torch.float32, 0), [6, 5, 4, 3, 2, 1] * 2
    expected = shardsum.ragged_sum(x, tuple(lengths))
    dumps, meanwhile = marshal.dumps, list(lengths)

    def dumps_then_write(value: list[int], version: int) -> bytes:
        key = dumps(value, version)
        value[0] = 0  # as another thread may
        return key

    monkeypatch.setattr(marshal, "dumps", dumps_then_write)
    monkeypatch.setattr(usual, "_vectors", {})
    shardsum.ragged_sum(x, meanwhile)
    monkeypatch.setattr(marshal, "dumps", dumps)
    assert_same(shardsum.ragged_sum(x, lengths), expected)
