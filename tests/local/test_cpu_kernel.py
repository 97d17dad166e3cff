"""The native CPU kernels against the reference, bit for bit, on every instruction set that this processor has.

The raw operators of shardsum/local/kernels.py are called, so that nothing stands between the test and the kernel.
"""

from __future__ import annotations

import math
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardsum.core import bits, reference
from shardsum.core.numerics import NATIVE_DTYPES, accumulator_dtype
from shardsum.local import kernels
from shardsum.native import loader as native
from tests.problems import sum_masked, sum_padded, sum_rows

if os.environ.get("SHARDSUM_BACKEND") == "torch" or not (shutil.which("g++") or shutil.which("c++")):
    pytest.skip("the native CPU kernels are not built here", allow_module_level=True)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
OUT_DTYPES = {torch.float64: (torch.float64, torch.float32), **{d: FLOATS for d in FLOATS}}
ISAS = ("baseline", "avx2", "avx512")
# What goes wrong first: signed zeros, denormals of every float, the largest halves, infinities, NaN.
SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 1e-45, -6e-8, 6e-8, 3e-5, 1e-40, 2.0**-133, 65504.0, -65504.0, 65519.0, 65520.0, 3.3e38,
    -3e38, 1e-310, math.inf, -math.inf, math.nan,
)  # fmt: skip


@pytest.fixture(scope="module")
def isas():
    """The instruction sets of this processor, the best one last."""
    assert native.status().backend == "native", native.status().reason
    yield [name for name in ISAS if native.limit_cpu_isa(name) == name]
    native.limit_cpu_isa(None)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Random values with special ones among them, ``offset`` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) + offset
    if not dtype.is_floating_point:
        low, high = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        flat = torch.randint(low, high, (count,), generator=generator, dtype=torch.int64).to(dtype)
    else:
        flat = torch.randn(count, generator=generator, dtype=torch.float64) * 100
        special = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(len(SPECIAL), (count,), generator=generator)]
        flat = torch.where(torch.rand(count, generator=generator) < 0.1, special, flat).to(dtype)
    return flat[offset:].view(shape)


@st.composite
def settings_of(draw: st.DrawFn) -> dict:
    """dtypes and the steps after the sum."""
    dtype = draw(st.sampled_from(NATIVE_DTYPES))
    floating = dtype.is_floating_point
    return {
        "dtype": dtype,
        "out_dtype": draw(st.sampled_from(OUT_DTYPES.get(dtype, (torch.int64,)))),
        "op": draw(st.sampled_from(("sum", "mean"))) if floating else "sum",
        "scale": draw(st.sampled_from((None, 0.1, -3.0, 1 / 3, 1e30))) if floating else None,
        "accumulate": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
        "offset": draw(st.integers(0, 5)),
    }


shapes = st.sampled_from(((), (1,), (2,), (5, 3), (17,), (64,), (130,), (257,)))
counts = st.one_of(st.integers(4, 9), st.sampled_from((1, 2, 70)))


def check(isas, call, expected, size: int, trailing: tuple[int, ...], config: dict) -> None:
    """``call(out, mean, scale, accumulate)`` gives ``expected(previous)`` in every bit, on every instruction set."""
    before = values((size, *trailing), config["out_dtype"], config["seed"] + 1, config["offset"])
    previous = before if config["accumulate"] else None
    want = expected(op=config["op"], scale=config["scale"], out_dtype=config["out_dtype"], previous=previous)
    for isa in isas:
        native.limit_cpu_isa(isa)
        out = values((size, *trailing), config["out_dtype"], config["seed"] + 1, config["offset"])
        call(out, config["op"] == "mean", config["scale"], config["accumulate"])
        assert bits.equal(out, want), (isa, bits.first_difference(out, want))


@settings(max_examples=150, deadline=None)
@given(config=settings_of(), trailing=shapes, num_rows=counts, capacity=st.integers(0, 40), data=st.data())
def test_rows_equal_the_reference(isas, config, trailing, num_rows, capacity, data):
    size = data.draw(st.integers(0, 50))
    lengths = data.draw(st.lists(st.integers(0, capacity), min_size=num_rows, max_size=num_rows))
    starts = data.draw(st.lists(st.integers(-45, 55), min_size=num_rows, max_size=num_rows))
    x = values((num_rows, capacity, *trailing), config["dtype"], config["seed"], config["offset"])
    rows = [x[r, :n] for r, n in enumerate(lengths)]

    def expected(at):
        return lambda **kwargs: reference.ragged_sum(rows, at, size, **kwargs)

    check(isas, lambda out, *end: sum_rows(out, rows, starts, *end), expected(starts), size, trailing, config)

    index = data.draw(st.sampled_from((torch.int32, torch.int64)))
    bounds = torch.tensor(starts, dtype=index), torch.tensor(lengths, dtype=index) + (capacity == 7) * 3
    clamped = [max(s, 0) for s in starts]
    if capacity == 7:  # lengths beyond the capacity are clamped to it
        rows = [x[r, : min(n + 3, 7)] for r, n in enumerate(lengths)]
    config = {**config, "accumulate": False}  # which it does not
    check(
        isas, lambda out, *e: kernels.sum_padded_device(out, x, *bounds, *e[:2]), expected(clamped), size, trailing,
        config,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(config=settings_of(), trailing=shapes, num_rows=counts, capacity=st.integers(0, 40), data=st.data())
def test_plans_equal_the_reference(isas, config, trailing, num_rows, capacity, data):
    size = data.draw(st.integers(0, 50))
    lengths = data.draw(st.lists(st.integers(0, min(capacity, size)), min_size=num_rows, max_size=num_rows))
    starts = [data.draw(st.integers(0, size - n)) for n in lengths]
    firsts = [data.draw(st.integers(0, capacity - n)) for n in lengths]
    x = values((num_rows, capacity, *trailing), config["dtype"], config["seed"], config["offset"])
    x = data.draw(st.sampled_from((x, x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT)))
    rows = [x[r, first : first + n] for r, (first, n) in enumerate(zip(firsts, lengths))]

    def expected(**kwargs):
        return reference.ragged_sum(rows, starts, size, **kwargs)

    check(isas, lambda out, *e: sum_padded(out, x, starts, lengths, *e, firsts), expected, size, trailing, config)


@settings(max_examples=100, deadline=None)
@given(config=settings_of(), trailing=shapes, num_rows=counts, size=st.integers(0, 150), data=st.data())
def test_masked_equals_the_reference(isas, config, trailing, num_rows, size, data):
    density = data.draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    run = data.draw(st.sampled_from((1, 1, 7, 40)))
    generator = torch.Generator().manual_seed(config["seed"])
    mask = torch.rand(num_rows, size // run + 1, generator=generator) < density
    mask = mask.repeat_interleave(run, 1)[:, config["offset"] :][:, :size]
    size = mask.shape[1]
    x = values((num_rows, size, *trailing), config["dtype"], config["seed"], config["offset"])

    def expected(**kwargs):
        return reference.masked_sum(x, mask, **kwargs)

    check(isas, lambda out, *end: sum_masked(out, x, mask, *end), expected, size, trailing, config)
    words = packed(mask)
    check(isas, lambda out, *end: sum_masked(out, x, words, *end), expected, size, trailing, config)


def packed(mask: Tensor) -> Tensor:
    """int32 words ``(R, ceil(size / 32))`` of a bool mask; the bits past ``size`` are set and must not count."""
    padding = torch.ones(mask.shape[0], -mask.shape[1] % 32, dtype=torch.bool)
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    words = (torch.cat([mask, padding], 1).view(mask.shape[0], -1, 32) * weights).sum(2)
    return words.to(torch.int32)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_every_conversion_is_to_nearest_even(isas, source, target):
    if source == torch.float32:  # every upper part of a float, the lower part at and around each tie
        upper = torch.arange(1 << 19, dtype=torch.int64) << 13
        lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
        x = (upper[:, None] | lower).flatten().to(torch.int32).view(source)
    else:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(source)
    want = (x.to(torch.float32) + 0.0).to(target)
    for isa in isas:
        native.limit_cpu_isa(isa)
        out = torch.empty(len(x), dtype=target)
        sum_rows(out, [x], [0], False, None)
        assert bits.equal(out, want), (isa, bits.first_difference(out, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int16], ids=str)
def test_many_threads_and_streamed_outputs(isas, dtype):
    out_dtype = torch.int64 if dtype == torch.int16 else dtype
    width = 125
    size = (17 << 20) // out_dtype.itemsize // width  # 16 MiB of output and more is written around the caches
    flat = values((65_521,), dtype, 7).repeat(size * width // 65_521 + 2)
    lengths = [size, size // 3, 0, size // 2]
    rows = [flat[r * 1001 :][: n * width].view(n, width) for r, n in enumerate(lengths)]  # they may overlap
    want = reference.ragged_sum(rows, [0] * 4, size, out_dtype=out_dtype)
    for isa in isas:
        native.limit_cpu_isa(isa)
        for offset in (0, 3):
            out = torch.empty(size * width + offset, dtype=out_dtype)[offset:].view(size, width)
            sum_rows(out, rows, [0] * 4, False, None)
            assert bits.equal(out, want), (isa, bits.first_difference(out, want))


def test_the_number_of_threads_changes_no_bit():
    x = values((5, 3000, 67), torch.float32, 3)
    mask = torch.rand(5, 3000, generator=torch.Generator().manual_seed(0)) < 0.5
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out = torch.empty(2, 3000, 67)
            sum_padded(out[0], x, [], [3000, 10, 2999, 1500, 64], True, 0.1, False)
            sum_masked(out[1], x, mask, True, 0.1, False)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(bits.equal(out, results[0]) for out in results)


def test_offsets_beyond_32_bits():
    row = torch.empty(2**32 + 8, dtype=torch.uint8)  # untouched pages cost nothing
    row[-8:] = torch.tensor([0] * 7 + [9])
    out = torch.empty(8, dtype=torch.int64)
    sum_rows(out, [row], [-(2**32)], False, None)
    assert out.tolist() == [0] * 7 + [9]


def test_integers_wrap_and_halves_overflow_once():
    top = torch.iinfo(torch.int64).max
    out = torch.empty(1, dtype=torch.int64)
    sum_padded(out, torch.tensor([[top], [1], [0], [5]]), [], [1] * 4, False, None, False)
    assert out.item() == top + 1 + 5 - 2**64
    half = torch.empty(1, dtype=torch.float16)
    sum_padded(half, torch.full((2, 1), 60000.0, dtype=torch.float16), [], [1, 1], True, None, False)
    assert half.item() == 60000.0
    x = torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16)
    coarse = torch.empty(1, dtype=torch.bfloat16)
    sum_padded(coarse, x, [], [1] * 9, False, None, False)
    assert coarse.item() == 264.0


# Each of these mistakes must be visible in the data that the tests above use.
def _reversed_order(x, lengths, size):
    out = torch.empty(size, x.shape[2])
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    sum_rows(out, rows[::-1], [0] * len(rows), False, None)
    return out


def _ignored_length(x, lengths, size):
    out = torch.empty(size, x.shape[2])
    sum_padded(out, x, [], [lengths[0], size, *lengths[2:]], False, None, False)
    return out


def _rounded_at_each_row(x, lengths, size):
    acc = torch.zeros(size, x.shape[2], dtype=torch.bfloat16)
    for r, n in enumerate(lengths):
        acc[:n] += x[r, :n].to(torch.bfloat16)
    return acc.to(torch.float32)


def _multiplied_by_the_mask(x, lengths, size):
    mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    return sum(x[r] * mask[r, :, None] for r in range(len(lengths)))


def _from_the_first_row(x, lengths, size):
    acc = x[0].clone()
    for r, n in enumerate(lengths[1:], 1):
        acc[:n] += x[r, :n]
    return acc


@pytest.mark.parametrize(
    "mutant",
    [_reversed_order, _ignored_length, _rounded_at_each_row, _multiplied_by_the_mask, _from_the_first_row],
)
def test_mutants_are_seen(mutant):
    size = 40
    x = values((4, size, 9), torch.float32, 11)
    x[0, 30:] = -0.0
    lengths = [size, 25, 0, 13]
    want = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * 4, size, out_dtype=torch.float32)
    right = torch.empty(size, 9)
    sum_padded(right, x, [], lengths, False, None, False)
    assert bits.equal(right, want)
    assert not bits.equal(mutant(x, lengths, size), want)


@pytest.mark.parametrize(
    "call",
    [
        lambda out, x: sum_rows(out, [x[0], x[1, :, :2]], [0, 0], False, None),
        lambda out, x: sum_rows(out, [x[0], x[1].t()], [0, 0], False, None),
        lambda out, x: sum_rows(out, [x[0]], [0, 0], False, None),
        lambda out, x: sum_rows(out, [x[0], x[1].double()], [0, 0], False, None),
        lambda out, x: kernels.sum_padded_device(out, x, None, torch.ones(3, dtype=torch.int64), False, None),
        lambda out, x: sum_masked(out, x, torch.ones(2, 3, dtype=torch.bool)),
        lambda out, x: sum_masked(out, x, torch.ones(2, 4)),
    ],
)
def test_a_wrong_call_is_refused_before_memory_is_read(call):
    with pytest.raises(RuntimeError, match="shardsum: "):
        call(torch.zeros(4, 4), torch.zeros(2, 4, 4))


def test_other_devices_run_the_fallback():
    """A device without a native kernel (here: meta) is served by plain torch."""
    out = torch.empty(4, 3, device="meta")
    sum_padded(out, torch.empty(2, 4, 3, device="meta"), [], [4, 2], False, None, False)
    assert accumulator_dtype(out.dtype) == torch.float32 and native.status().backend == "native"


@settings(max_examples=150, deadline=None)
@given(config=settings_of(), trailing=shapes, num_rows=counts, capacity=st.integers(1, 40), data=st.data())
def test_a_carried_sum_equals_the_whole(isas, config, trailing, num_rows, capacity, data):
    """Rows [0, cut) onto +0.0, the rest onto what they left: as all of them at once."""
    size = data.draw(st.integers(0, 50))
    lengths = data.draw(st.lists(st.integers(0, capacity), min_size=num_rows, max_size=num_rows))
    starts = data.draw(st.lists(st.integers(-45, 55), min_size=num_rows, max_size=num_rows))
    cut = data.draw(st.integers(1, max(1, num_rows - 1)))
    mean = config["op"] == "mean"
    if mean:  # carried accumulators have one count: of rows that cover all positions
        lengths[:cut], starts[:cut] = [size] * cut, [0] * cut
    x = values((num_rows, max(capacity, size), *trailing), config["dtype"], config["seed"], config["offset"])
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    end = dict(op=config["op"], scale=config["scale"], out_dtype=config["out_dtype"])
    want = reference.ragged_sum(rows, starts, size, **end)
    for isa in isas:
        native.limit_cpu_isa(isa)
        acc = accumulator_dtype(config["dtype"])
        carry = values((size, *trailing), acc, 1, config["offset"])
        kernels.sum_rows(carry, None, rows[:cut], starts[:cut], 0, False, None)
        out = values((size, *trailing), config["out_dtype"], 2, config["offset"])
        rest = rows[cut:] or [x[0, :0]], starts[cut:] or [0]
        kernels.sum_rows(out, carry, *rest, cut, mean, config["scale"])
        assert bits.equal(out, want), (isa, bits.first_difference(out, want))
        if end["out_dtype"] == acc:
            kernels.sum_rows(carry, carry, *rest, cut, mean, config["scale"])
            assert bits.equal(carry, want), (isa, "in place")


def test_a_carry_that_does_not_fit_is_refused():
    out, row = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bfloat16)
    for carry in (torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(2, 2), torch.zeros(2, 3).t()):
        with pytest.raises(RuntimeError, match="carry"):
            kernels.sum_rows(out, carry, [row], [0], 1, False, None)
