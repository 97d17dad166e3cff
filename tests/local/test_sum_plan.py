"""Sums by a plan: the same bits in every form, plans told apart by value and type; nothing unusual slips through."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardsum
from shardsum.core import reference
from shardsum.local import kernels, plan
from shardsum.local.functional import run
from shardsum.local.plan import SumPlan, planned
from tests.problems import laid_out, problems
from tests.values import B0_LENGTHS, B0_SUM, RaisesOnce, assert_same, b0, random_values


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from([None, 1, 3]))
def test_padded_sums_equal_reference(p: dict, stride: int | None) -> None:
    """Looked up and held; ``stride``: into an ``out`` whose elements lie so far apart."""
    x, lengths, kwargs = laid_out(p["x"], p["layout"]), p["lengths"], p["kwargs"]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(rows, [0] * len(rows), x.shape[1], **kwargs)
    held = shardsum.MaskedSum.from_lengths(lengths, x.shape[1], **kwargs)
    spread = torch.tensor(lengths).repeat_interleave(2)[::2]
    forms = [lambda form=form, **more: shardsum.ragged_sum(x, form, **kwargs, **more)
             for form in (lengths, tuple(lengths), torch.tensor(lengths), spread)]  # fmt: skip
    for call in (*forms, lambda **more: held(x, **more)):
        if stride is None:
            assert_same(call(), expected)
            continue
        out = torch.full((expected.numel() * stride,), 77, dtype=expected.dtype)[::stride].view(expected.shape)
        assert call(out=out) is out
        assert_same(out, expected)


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from([None, 1, 3]), st.sampled_from([list, tuple]), st.booleans(), st.booleans())
def test_listed_sums_equal_reference(p: dict, stride: int | None, form: type, sized: bool, cut: bool) -> None:
    """Whole shards from position 0, or the first rows of longer ones anywhere."""
    kwargs = p["kwargs"] | ({"size": p["size"]} if sized or cut else {})
    rows = [laid_out(p["x"][r : r + 1, :n], p["layout"])[0] for r, n in enumerate(p["lengths"])]
    size = p["size"] if sized or cut else max(p["lengths"])
    expected = reference.ragged_sum(rows, p["starts"] if cut else [0] * len(rows), size, **p["kwargs"])
    if cut:
        rows, kwargs = list(p["x"]), kwargs | {"lengths": p["lengths"], "starts": p["starts"]}
    if stride is None:
        assert_same(shardsum.ragged_sum(form(rows), **kwargs), expected)
        return
    out = torch.full((expected.numel() * stride,), 77, dtype=expected.dtype)[::stride].view(expected.shape)
    del kwargs["out_dtype"]
    assert shardsum.ragged_sum(form(rows), **kwargs, out=out) is out
    assert_same(out, expected)


# What the operators check, in native code and in plain torch. Each case: out, shards, plan.

FOUR = [(0, 0, 1)] * 4
UNFIT: dict[str, Callable[..., tuple]] = {
    "too long": lambda x, out: (out, x, SumPlan([(0, 0, 7), *FOUR[:3]])),
    "too far in": lambda x, out: (out, x, SumPlan([(0, 6, 1), *FOUR[:3]])),
    "beyond the result": lambda x, out: (out, x, SumPlan([(5, 0, 2), *FOUR[:3]])),
    "too few rows": lambda x, out: (out, x, SumPlan(FOUR[:3])),
    "no shards": lambda x, out: (out, x[:0], SumPlan()),
    "no positions": lambda x, out: (out[0], x[0], SumPlan([(0, 0, 1)] * 6)),
    "another capacity": lambda x, out: (out, x, SumPlan(FOUR, 6, 7)),
    "short out": lambda x, out: (out[:5], x, SumPlan(FOUR)),
    "long out": lambda x, out: (torch.full((7,), 77.0), x, SumPlan(FOUR)),
    "another shape": lambda x, out: (out.view(3, 2), x, SumPlan(FOUR)),
    "another trailing shape": lambda x, out: (out.view(3, 2), x.view(4, 2, 3), SumPlan([(0, 0, 1)] * 4)),
    "strided out": lambda x, out: (torch.full((12,), 77.0)[::2], x, SumPlan(FOUR)),
    "expanded out": lambda x, out: (out[:1].expand(6), x, SumPlan(FOUR)),
    "integer out": lambda x, out: (out.long(), x, SumPlan(FOUR)),
    "another dtype than the plan's": lambda x, out: (out, x, SumPlan(FOUR, out_dtype=torch.bfloat16)),
    "a row as out": lambda x, out: (x[3], x, SumPlan(FOUR)),
    "out across two rows": lambda x, out: (x.view(-1)[15:21], x, SumPlan(FOUR)),
    "x inside out": lambda x, out: (x.view(-1)[:16], x.as_strided((1, 16), (1, 1), 8), SumPlan(FOUR[:1])),
    "mean of integers": lambda x, out: (out.long(), x.long(), SumPlan(FOUR, op="mean")),
    "scaled integers": lambda x, out: (out.long(), x.long(), SumPlan(FOUR, scale=2.0)),
    "a scale beyond the accumulator": lambda x, out: (out, x, SumPlan(FOUR, scale=-1e300)),
    "a dtype without a sum": lambda x, out: (out, x.to(torch.complex64), SumPlan(FOUR)),
    "a sparse tensor": lambda x, out: (out, x.to_sparse(), SumPlan(FOUR)),
    "a list with another trailing shape": lambda x, out: (out, [x[0], x[1][:, None]], SumPlan()),
    "a list with another dtype": lambda x, out: (out, [x[0], x[1].double()], SumPlan()),
    "a list with a scalar": lambda x, out: (out[:1], [x[0][0]], SumPlan()),
    "a list with a shard as out": lambda x, out: (x[1], list(x), SumPlan()),
    "a list shorter than the plan": lambda x, out: (out, [x[0]], SumPlan(FOUR)),
    "a list with out across two shards": lambda x, out: (x.view(-1)[3:9], list(x), SumPlan()),
    "a list with a sparse shard": lambda x, out: (out, [x[0], x[1].to_sparse()], SumPlan()),
    "a list with a shard without memory": lambda x, out: (out, [x[0], x[1].to("meta")], SumPlan()),
    "a list with a result beyond the shards": lambda x, out: (out[:3], list(x), SumPlan(size=3)),
}


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("name", UNFIT)
def test_the_operators_check_everything(name: str, path: str) -> None:
    x, out = b0(), torch.full((6,), 77.0)
    before = x.clone()
    target, shards, contents = UNFIT[name](x, out)
    into, new = (kernels.sum_plan_list, kernels.sum_plan_new_list) if isinstance(shards, list) else (
        kernels.sum_plan, kernels.sum_plan_new)  # fmt: skip
    if path == "torch":
        new = kernels._sum_plan_new_list if isinstance(shards, list) else kernels._sum_plan_new
        into = kernels._into(new)
    with pytest.raises((RuntimeError, ValueError)):
        into(target, shards, contents.words())
    assert (out == 77).all() and torch.equal(x, before)
    if "out" not in name and "another shape" not in name and "trailing" not in name and "dtype than" not in name:
        with pytest.raises((RuntimeError, ValueError)):
            new(shards, contents.words())


def test_only_plans_are_plans() -> None:
    x, good = b0(), SumPlan([(0, 0, n) for n in B0_LENGTHS]).words()
    assert kernels.sum_plan_new(x, good).tolist() == B0_SUM

    def changed(at: int, value: int) -> torch.Tensor:
        words = good.clone()
        words[at] = value
        return words

    bad = [good[:-1], good[:5], good[:0], good.int(), good.double(), good[None], torch.stack([good, good], 1)[:, 0]]
    bad += [changed(0, 99), changed(8, 5), changed(8, -1), changed(8, 1 << 61), changed(3, 10), changed(3, 1 << 40)]
    bad += [changed(9 + k, n) for k in range(3) for n in (-1, 7, 1 << 62, -(1 << 63))]
    for words in bad:
        with pytest.raises(RuntimeError, match=r"^shardsum: "):
            kernels.sum_plan_new(x, words)
    with pytest.raises(RuntimeError, match=r"^shardsum: "):
        kernels._sum_plan_new(x, good[:-1])


@settings(deadline=None, max_examples=100)
@given(problems())
def test_a_plan_holds_what_it_was_made_of(p: dict) -> None:
    rows = tuple((s, 1, n) for s, n in zip(p["starts"], p["lengths"]))
    for contents in (SumPlan(), SumPlan(rows, p["size"], 9, accumulate=True, **p["kwargs"])):
        assert SumPlan.from_words(contents.words()) == contents


# Arguments


def test_plans_are_told_apart_by_value_and_type() -> None:
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
    for other in (np.int64(1), torch.tensor(1)):
        assert_same(shardsum.ragged_sum(x, [other, *lengths[1:]]), expected)
    # np.float64(5e-324) has the bytes of np.int64(1)
    with pytest.raises(ValueError, match="lengths: expected 12 ints"):
        shardsum.ragged_sum(x, [np.float64(5e-324), *lengths[1:]])


def test_scales_are_told_apart() -> None:
    x = torch.full((2, 1), 1.0)
    for scale in (0.0, -0.0, 1, 1.0, float("nan"), -0.0, 0.0, 2):
        want = reference.ragged_sum(list(x), [0, 0], 1, scale=float(scale), out_dtype=x.dtype)
        assert_same(shardsum.ragged_sum(x, scale=scale), want)
    for odd in (True, "1", 10**400, torch.ones(())):
        with pytest.raises(ValueError, match="scale: expected a float"):
            shardsum.ragged_sum(x, scale=odd)


def test_the_same_list_with_other_lengths() -> None:
    x, out = b0(), torch.empty(6)
    wrong = [7, 0, 0, 0], [-1, 0, 0, 0], [1 << 63] * 4
    for lengths in (B0_LENGTHS, B0_LENGTHS, [6, 6, 6, 6], wrong[0], B0_LENGTHS, *wrong[1:], [0, 6, 0, 0]):
        rows = [x[r, :n] for r, n in enumerate(lengths)]
        for op in ("sum", "mean"):
            if lengths in wrong:
                with pytest.raises(ValueError, match="lengths: virtual rank 0 has"):
                    shardsum.ragged_sum(x, lengths, op=op)
                continue
            want = reference.ragged_sum(rows, [0] * 4, 6, op=op, out_dtype=x.dtype)
            assert_same(shardsum.ragged_sum(x, lengths, op=op), want)
            assert shardsum.ragged_sum(x, lengths, op=op, out=out.fill_(77)) is out
            assert_same(out, want)


def test_texts_and_types_that_compare_alike() -> None:
    x, rows = b0(), list(b0())
    for shards in (x, rows):
        for kwargs in ({"op": np.array("mean")}, {"out_dtype": float}, {"out_dtype": []}, {"op": b"sum"}):
            with pytest.raises(ValueError, match=r"op: |out_dtype: "):
                shardsum.ragged_sum(shards, **kwargs)
            with pytest.raises(ValueError, match=r"op: |out_dtype: "):
                shardsum.ragged_sum(shards, [6] * 4, **kwargs)
        want = shardsum.ragged_sum(shards, op="mean")
        assert_same(shardsum.ragged_sum(shards, op=np.str_("mean")), want)


class Doubled(list):
    """A list whose items are others than those it holds."""

    def __getitem__(self, i: Any) -> Any:
        return 2 * super().__getitem__(i)

    def __iter__(self) -> Any:
        return (2 * x for x in super().__iter__())


def test_lists_of_other_types_are_read_as_python_reads_them() -> None:
    x = b0()
    assert_same(shardsum.ragged_sum(Doubled(x)), shardsum.ragged_sum([2 * row for row in x]))
    assert_same(shardsum.ragged_sum(x, Doubled([1, 0, 3, 2])), shardsum.ragged_sum(x, [2, 0, 6, 4]))


def test_recent_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_PLANS", 8)
    monkeypatch.setattr(plan, "_plans", {})
    x = b0()
    for i in range(30):
        lengths = [i % 7, i // 7, 0, 1]
        rows = [x[r, :n] for r, n in enumerate(lengths)]
        want = reference.ragged_sum(rows, [0] * 4, 6, out_dtype=x.dtype)
        assert_same(shardsum.ragged_sum(x, lengths), want)
        assert 0 < len(plan._plans) <= 8
    last = planned([29 % 7, 29 // 7, 0, 1], None, None, "sum", None, None, False)
    assert last is planned([29 % 7, 29 // 7, 0, 1], None, None, "sum", None, None, False)


def test_threads_have_lengths_of_their_own() -> None:
    """While a sum runs on one thread, others write their lengths."""
    x = torch.randn(4, 40_000)
    cases = [[40_000 - 9_999 * k, 100 * k, 7, 39_999] for k in range(4)]
    wanted = [shardsum.ragged_sum(x, tuple(lengths)) for lengths in cases]
    failed: list[int] = []

    def work(k: int) -> None:
        for i in range(60):
            case = (k + i) % 4
            if not torch.equal(shardsum.ragged_sum(x, cases[case]), wanted[case]):
                failed.append(case)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# Tensors


def test_listed_shards_that_are_unusual() -> None:
    rows, want = [b0()[r, :n] for r, n in enumerate(B0_LENGTHS)], torch.tensor(B0_SUM)
    assert torch.equal(shardsum.ragged_sum([torch._neg_view(r.neg()) for r in rows]), want)
    with torch.no_grad():
        assert torch.equal(shardsum.ragged_sum([r.clone().requires_grad_() for r in rows]), want)
    leaves = [r.clone().requires_grad_() for r in rows]
    shardsum.ragged_sum(leaves).sum().backward()
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)
    assert torch.equal(shardsum.ragged_sum(rows, size=8), torch.tensor([*B0_SUM, 0, 0]))
    for wrong in ([], [rows[0], None], iter(rows), [rows[0], rows[1].double()]):
        with pytest.raises(ValueError, match="shards: "):
            shardsum.ragged_sum(wrong)
    with pytest.raises(ValueError, match="beyond size 2"):
        shardsum.ragged_sum(rows, size=2)


def test_a_subclass_has_its_say() -> None:
    class Named(torch.Tensor):
        pass

    x = b0().as_subclass(Named)
    for got in (shardsum.ragged_sum(x, B0_LENGTHS), shardsum.ragged_sum([x[0, :3], x[1], x[3, :1]])):
        assert type(got) is Named and got.tolist() == B0_SUM


@pytest.mark.parametrize("num_ranks", [4, 12])
def test_what_jit_records_runs_as_it_is(num_ranks: int) -> None:
    x, lengths = random_values((num_ranks, 6), torch.float32, 0), [3] * num_ranks
    traced = torch.jit.trace(lambda x: shardsum.ragged_sum(x, lengths), x)
    other = random_values((num_ranks, 6), torch.float32, 1)
    assert_same(traced(other), shardsum.ragged_sum(other, lengths))


def test_what_make_fx_records_runs_on_fake_tensors() -> None:
    held = shardsum.MaskedSum(torch.arange(24).view(4, 6) % 2 > 0)
    for call in (lambda x: shardsum.ragged_sum(x, B0_LENGTHS), held):
        graph = make_fx(call)(b0())
        assert_same(graph(b0() + 1), call(b0() + 1))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert graph(mode.from_tensor(b0())).shape == (6,)


def test_fake_and_meta_tensors_give_the_shape() -> None:
    for out in (None, torch.empty(6, device="meta")):
        assert shardsum.ragged_sum(b0().to("meta"), B0_LENGTHS, out=out).shape == (6,)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(b0())
        assert shardsum.ragged_sum(x, B0_LENGTHS, op="mean", out_dtype=torch.bfloat16).dtype == torch.bfloat16
        assert shardsum.ragged_sum(x, B0_LENGTHS, out=torch.empty(6)).shape == (6,)


@pytest.mark.parametrize("lengths", [B0_LENGTHS, torch.tensor(B0_LENGTHS)], ids=["list", "tensor"])
@pytest.mark.parametrize("out", [None, torch.empty(6)], ids=["new", "out"])
def test_an_interrupt_amid_a_call_is_raised(lengths: Any, out: torch.Tensor | None) -> None:
    """In the Python code of a mode, at whatever step; an error of one step leaves the checks."""
    x = b0()
    with RaisesOnce(0, KeyboardInterrupt) as mode:
        shardsum.ragged_sum(x, lengths, out=out)
    assert mode.turn >= 2
    for turn in range(1, mode.turn + 1):
        with pytest.raises(KeyboardInterrupt), RaisesOnce(turn, KeyboardInterrupt):
            shardsum.ragged_sum(x, lengths, out=out)
        with contextlib.suppress(RuntimeError), RaisesOnce(turn, RuntimeError):
            assert shardsum.ragged_sum(x, lengths, out=out).tolist() == B0_SUM


def test_an_out_inside_negated_shards_is_refused() -> None:
    """The dispatcher would resolve the sign into a copy, which shares no memory with `out`."""
    x = b0()
    negated, before = torch._neg_view(x), x.clone()
    for call in (
        lambda: shardsum.ragged_sum(negated, B0_LENGTHS, out=x[3]),
        lambda: shardsum.ragged_sum(negated, torch.tensor(B0_LENGTHS), out=x[3]),
        lambda: shardsum.ragged_sum(list(negated), out=x[3]),
        lambda: shardsum.MaskedSum.from_lengths(B0_LENGTHS, 6)(negated, out=x[3]),
    ):
        with pytest.raises(ValueError, match="out: shares memory"):
            call()
    assert torch.equal(x, before)


def test_an_out_with_a_lazy_sign_receives_the_values() -> None:
    x, mask = b0(), torch.arange(6) < torch.tensor(B0_LENGTHS)[:, None]
    for call in (
        lambda out: shardsum.ragged_sum(x, B0_LENGTHS, out=out),
        lambda out: shardsum.ragged_sum([x[r, :n] for r, n in enumerate(B0_LENGTHS)], out=out),
        lambda out: shardsum.masked_sum(x, mask, out=out),
        lambda out: shardsum.MaskedSum(mask)(x, out=out),
    ):
        out = torch._neg_view(torch.full((6,), 7.0))
        assert call(out) is out and out.is_neg() and out.tolist() == B0_SUM
    out = torch._neg_view(torch.full((6,), -7.0))
    assert shardsum.ragged_sum(x, B0_LENGTHS, out=out, accumulate=True).tolist() == [n + 7 for n in B0_SUM]
    with pytest.raises(ValueError, match="out: shares memory"):
        shardsum.ragged_sum(x, B0_LENGTHS, out=torch._neg_view(x[3]))


def test_far_too_many_lengths() -> None:
    with pytest.raises(ValueError, match="values for 4 virtual ranks"):
        shardsum.ragged_sum(b0(), [1] * ((1 << 20) + 1))


def test_a_nested_tensor_is_named() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for size in (None, 3):
        with pytest.raises(ValueError, match="shards: expected a padded Tensor"):
            shardsum.ragged_sum(nested, [1, 2], size=size)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_a_refused_call_leaves_no_memory_behind() -> None:
    class Mallinfo(ctypes.Structure):
        _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    x, out, strided = b0(), torch.empty(6), torch.empty(12)[::2]
    plans = [SumPlan([(0, 0, 7)] * 4).words(), SumPlan([(0, 0, 1)] * 3).words(), SumPlan().words()[:4]]
    mask, whole = torch.ones(4, 5, dtype=torch.bool), SumPlan().words()

    def refuse(count: int) -> int:
        for _ in range(count):
            for words in plans:
                for shards in (x, list(x)):
                    assert run(words, shards, None) is None and run(words, shards, out) is None
            assert run(whole, x, None, mask) is None and run(whole, x, strided) is None
        gc.collect()
        return mallinfo().field7  # bytes in use

    before = refuse(100)
    assert refuse(1000) - before < 1000 * 16
