"""ragged_sum and masked_sum against the loops of reference.py, bit for bit; first layer: one process, no group."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardsum
from shardsum.core import bits, reference
from shardsum.core.checks import has_distinct_elements
from shardsum.local import kernels
from shardsum.local import ops as operators
from shardsum.local.plan import SumPlan
from tests.problems import laid_out, problems
from tests.values import B0_LENGTHS, B0_SUM, assert_same, b0, random_values


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
        kwargs["op"] == "mean", kwargs["scale"],
    )  # fmt: skip
    assert_same(out, expected)


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(0, 10**6))
def test_masked_sum_equals_reference(p: dict, seed: int) -> None:
    x, kwargs = laid_out(p["x"], p["layout"]), p["kwargs"]
    mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.5
    assert_same(shardsum.masked_sum(x, mask, **kwargs), reference.masked_sum(x, mask, **kwargs))


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
    (lambda x: shardsum.ragged_sum(x, out=torch.empty(5)), r"out: torch.\w+ \(5,\)"),
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


def test_a_lazy_sign_is_resolved() -> None:
    x, out = b0(), torch.empty(6)
    lazy = torch._neg_view(x.neg())
    assert lazy.is_neg()
    assert shardsum.ragged_sum(lazy, B0_LENGTHS).tolist() == B0_SUM
    assert shardsum.ragged_sum(lazy, B0_LENGTHS, out=out).tolist() == B0_SUM == out.tolist()


@pytest.mark.parametrize("shape, strides", [((6, 3), (1, 1)), ((6, 3), (3, 0)), ((6, 3), (2, 3)), ((6, 3), (1, 5))])
def test_an_out_whose_elements_overlap_is_refused(shape: tuple, strides: tuple) -> None:
    x, out = torch.ones(4, *shape), torch.full((60,), 7.0).as_strided(shape, strides)
    mask = torch.ones(4, 6, dtype=torch.bool)
    group = shardsum.ShardGroup(4)
    for call in (
        lambda: shardsum.ragged_sum(x, B0_LENGTHS, out=out),
        lambda: shardsum.ragged_sum(list(x), out=out),
        lambda: shardsum.ragged_sum(x, B0_LENGTHS, out=out, accumulate=True),
        lambda: shardsum.masked_sum(x, mask, out=out),
        lambda: shardsum.MaskedSum(mask)(x, out=out),
        lambda: group.all_reduce(list(x), out=out),
    ):
        with pytest.raises(ValueError, match=r"^out: (overlaps itself|is expanded) \(shape \(6, 3\), strides"):
            call()
    assert (out == 7).all()
    apart = torch.full((60,), 7.0).as_strided(shape, (4, 9))  # steps that cross, elements that do not meet
    assert torch.equal(shardsum.ragged_sum(x, B0_LENGTHS, out=apart), shardsum.ragged_sum(x, B0_LENGTHS))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4))
def test_overlapping_elements_are_found(dims: list[tuple[int, int]]) -> None:
    x = torch.zeros(100).as_strided([n for n, _ in dims], [stride for _, stride in dims])
    places = [sum(i * stride for i, (_, stride) in zip(at, dims)) for at in product(*[range(n) for n, _ in dims])]
    assert has_distinct_elements(x) == (len(set(places)) == len(places))


SCALED = [
    lambda x, scale: shardsum.ragged_sum(x, [1] * 4, scale=scale),
    lambda x, scale: shardsum.ragged_sum(x, [1] * 4, scale=scale, out=torch.empty(6, dtype=x.dtype)),
    lambda x, scale: shardsum.ragged_sum(x, torch.tensor([1] * 4), scale=scale),
    lambda x, scale: shardsum.ragged_sum(x.clone().requires_grad_(), [1] * 4, scale=scale).detach(),
    lambda x, scale: shardsum.ragged_sum([s[:1] for s in x], scale=scale, size=6),
    lambda x, scale: shardsum.ragged_sum([s[:1].clone().requires_grad_() for s in x], scale=scale, size=6).detach(),
    lambda x, scale: shardsum.masked_sum(x, torch.arange(6).expand(4, 6) < 1, scale=scale),
    lambda x, scale: shardsum.MaskedSum(torch.arange(6).expand(4, 6) < 1, scale=scale)(x),
    lambda x, scale: torch.compile(
        lambda x: shardsum.ragged_sum(x, [1] * 4, scale=scale), fullgraph=True, backend="aot_eager")(x),
    lambda x, scale: shardsum.ShardGroup(4).all_reduce([s[:1] for s in x], size=6, scale=scale),
    lambda x, scale: torch.cat(shardsum.ShardGroup(4).reduce_scatter([s[:1] for s in x], size=6, scale=scale)),
]  # fmt: skip


@pytest.mark.parametrize("call", SCALED)
def test_a_scale_means_the_same_on_every_path(call) -> None:
    """One that only overflows in the accumulator is refused; inf and NaN do what IEEE says: 0 * inf is NaN."""
    x = b0()
    for scale in (1e300, -1e39):
        with pytest.raises(ValueError, match=r"scale: .* is beyond torch\.float32"):
            call(x, scale)
    for scale in (float("inf"), float("nan"), -0.5, 1e-300, -1e-300):
        want = reference.ragged_sum([s[:1] for s in x], [0] * 4, 6, scale=scale, out_dtype=x.dtype)
        assert_same(call(x, scale), want)
    want = reference.ragged_sum([s[:1] for s in x.double()], [0] * 4, 6, scale=1e300, out_dtype=torch.float64)
    assert_same(call(x.double(), 1e300), want)


@pytest.mark.parametrize("shape", [(4, 3), (4, 70), (3, 9, 100)])
def test_bools_count_once_whatever_their_byte_is(shape: tuple[int, ...]) -> None:
    for byte in (1, 2, 128, 255):
        x = torch.full(shape, byte, dtype=torch.uint8).view(torch.bool)
        lengths = torch.tensor([shape[1]] * shape[0])
        assert (shardsum.ragged_sum(x) == shape[0]).all()
        assert (shardsum.ragged_sum(list(x)) == shape[0]).all()
        assert (shardsum.ragged_sum(x, lengths, starts=torch.zeros_like(lengths), size=shape[1]) == shape[0]).all()
        assert (shardsum.masked_sum(x, x.flatten(2)[..., 0] if x.dim() > 2 else x) == shape[0]).all()
        assert (shardsum.MaskedSum(x.flatten(2)[..., 0] if x.dim() > 2 else x)(x) == shape[0]).all()
        assert (kernels._sum_plan_new(x, SumPlan().words()) == shape[0]).all()


def test_no_positions_of_a_larger_tensor() -> None:
    for x in (torch.ones(4, 6, 3)[:, :0], torch.ones(4, 6, 3).transpose(1, 2)[:, :0], torch.ones(6, 4, 3).mT[:, :0]):
        ranks, trailing = x.shape[0], x.shape[2:]
        assert shardsum.ragged_sum(x, [0] * ranks).shape == (0, *trailing)
        assert shardsum.ragged_sum(x, torch.zeros(ranks, dtype=torch.int64)).shape == (0, *trailing)
        assert shardsum.ragged_sum(x, [0] * ranks, size=2).tolist() == torch.zeros(2, *trailing).tolist()
        assert shardsum.ragged_sum(list(x), size=2).tolist() == torch.zeros(2, *trailing).tolist()
        mask = torch.ones(ranks, 6, dtype=torch.bool)[:, :0]
        assert shardsum.masked_sum(x, mask).shape == (0, *trailing)
        assert shardsum.MaskedSum(mask)(x).shape == (0, *trailing)
