"""The usual calls of ragged_sum, which skip most of Python: same bits, and nothing unusual slips through."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import struct
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardsum
from shardsum.core import reference
from shardsum.local import kernels, usual
from shardsum.native import loader as native
from tests.problems import laid_out, problems
from tests.values import B0_LENGTHS, B0_SUM, RaisesOnce, assert_same, b0, random_values


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from([None, 1, 3]))
def test_the_usual_call_equals_reference(p: dict, stride: int | None) -> None:
    """Padded shards and a list of lengths; ``stride``: into an ``out`` whose elements lie so far apart."""
    x, lengths, kwargs = laid_out(p["x"], p["layout"]), p["lengths"], p["kwargs"]
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    expected = reference.ragged_sum(rows, [0] * len(rows), x.shape[1], **kwargs)
    for form in (lengths, lengths, torch.tensor(lengths), torch.tensor(lengths).repeat_interleave(2)[::2]):
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
    target, shards, lengths, *end = UNFIT[name](x, out)
    vector, end = torch.tensor(lengths, dtype=torch.int64), end or [False, None]
    for operator, form in ((kernels.sum_checked, lengths), (kernels.sum_checked_lengths, vector)):
        with pytest.raises(RuntimeError, match=r"shardsum: |no native kernel"):
            native.call_with(operator, form, -1, *end, target, shards)
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
        native.call_with(kernels.sum_checked_list, None, size, *(end or (False, None)), target, shards)
    assert (out == 77).all() and torch.equal(x, before)


def test_whole_shards_that_are_unusual() -> None:
    rows, want = [b0()[r, :n] for r, n in enumerate(B0_LENGTHS)], torch.tensor(B0_SUM)
    assert torch.equal(shardsum.ragged_sum([torch._neg_view(r.neg()) for r in rows]), want)
    with torch.no_grad():
        assert torch.equal(shardsum.ragged_sum([r.clone().requires_grad_() for r in rows]), want)
    leaves = [r.clone().requires_grad_() for r in rows]
    shardsum.ragged_sum(leaves).sum().backward()
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)
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


def test_only_plain_ints_are_packed() -> None:
    native.load()
    assert native.pack([1, -2, 1 << 40]) == struct.pack("3q", 1, -2, 1 << 40) and native.pack([]) == b""
    many = [(-3) ** i for i in range(39)] * 5
    assert native.pack(many) == struct.pack("195q", *many)
    for odd in ([True, 2], [2, 8.0], [1 << 63], [-(1 << 63) - 1], [np.int64(1)], [None], ["1"], (1, 2), "12", 3, None):
        assert native.pack(odd) is None


def test_plain_tensors_are_told_from_others() -> None:
    native.load()
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    for form in (list, tuple):
        assert native.are_plain(form([x, x]), torch.Tensor, "requires_grad") is True
        assert native.are_plain(form([x, leaf]), torch.Tensor, "requires_grad") is False
        assert native.are_plain(form([x, leaf]), torch.Tensor, None) is True
        for odd in (torch.nn.Parameter(x), None, 3, [x]):
            assert native.are_plain(form([x, odd]), torch.Tensor, None) is False
        assert native.are_plain(form([]), torch.Tensor, None) is True
    with pytest.raises(AttributeError):
        native.are_plain([x], torch.Tensor, "no such attribute")


def test_the_operators_of_the_usual_call_do_not_run_by_themselves() -> None:
    x, out = b0(), torch.full((6,), 77.0)
    for call in (
        lambda: kernels.sum_checked(out, x),
        lambda: kernels.sum_checked_lengths(out, x, torch.tensor(B0_LENGTHS)),
        lambda: kernels.sum_checked_list(out, list(x)),
        lambda: kernels.sum_checked_new(x),
        lambda: kernels.sum_checked_new_lengths(x, torch.tensor(B0_LENGTHS)),
        lambda: kernels.sum_checked_new_list(list(x)),
    ):
        shardsum.ragged_sum(x, B0_LENGTHS)
        with pytest.raises(RuntimeError, match=r"not called by itself|no native kernel"):
            call()
    assert (out == 77).all()


def test_a_call_amid_a_call_takes_only_its_own_lengths() -> None:
    """As a mode of Python's or a signal's handler makes one."""
    if native.status().backend != "native":
        pytest.skip("needs the native library")
    x, outs = b0(), [torch.full((6,), 77.0) for _ in range(3)]

    def nested(out: torch.Tensor, x: torch.Tensor) -> None:
        native.call_with(kernels.sum_checked, [1, 1, 1, 1], -1, False, None, outs[1], x)  # takes its own, once
        with pytest.raises(RuntimeError, match=r"not called by itself|no native kernel"):
            kernels.sum_checked(outs[2], x)
        with pytest.raises(ZeroDivisionError):
            native.call_with(lambda out, x: 1 // 0, [2, 2, 2, 2], -1, False, None, outs[2], x)
        kernels.sum_checked(out, x)  # the outer call's are gone, not another's

    with pytest.raises(RuntimeError, match=r"not called by itself|no native kernel"):
        native.call_with(nested, B0_LENGTHS, -1, False, None, outs[0], x)
    assert (outs[0] == 77).all() and (outs[2] == 77).all()
    assert_same(outs[1], shardsum.ragged_sum(x, (1, 1, 1, 1)))


@pytest.mark.parametrize("lengths", [B0_LENGTHS, torch.tensor(B0_LENGTHS)], ids=["list", "tensor"])
@pytest.mark.parametrize("out", [None, torch.empty(6)], ids=["new", "out"])
def test_an_interrupt_amid_a_call_is_raised(lengths: Any, out: torch.Tensor | None) -> None:
    """In the Python code of a mode, at whatever step of the usual call; an error of one step leaves the long way."""
    x = b0()
    with RaisesOnce(0, KeyboardInterrupt) as mode:
        shardsum.ragged_sum(x, lengths, out=out)
    assert mode.turn >= 2
    for turn in range(1, mode.turn + 1):
        with pytest.raises(KeyboardInterrupt), RaisesOnce(turn, KeyboardInterrupt):
            shardsum.ragged_sum(x, lengths, out=out)
        with contextlib.suppress(RuntimeError), RaisesOnce(turn, RuntimeError):
            assert shardsum.ragged_sum(x, lengths, out=out).tolist() == B0_SUM


def test_texts_and_types_that_compare_alike() -> None:
    x, rows = b0(), list(b0())
    for shards in (x, rows):
        for kwargs in ({"op": np.array("mean")}, {"out_dtype": float}, {"op": b"sum"}):
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


def test_an_out_inside_negated_shards_is_refused() -> None:
    """The dispatcher would resolve the sign into a copy, which shares no memory with `out`."""
    x = b0()
    negated, before = torch._neg_view(x), x.clone()
    for call in (
        lambda: shardsum.ragged_sum(negated, B0_LENGTHS, out=x[3]),
        lambda: shardsum.ragged_sum(negated, torch.tensor(B0_LENGTHS), out=x[3]),
        lambda: shardsum.ragged_sum(list(negated), out=x[3]),
    ):
        with pytest.raises(ValueError, match="out: shares memory"):
            call()
    assert torch.equal(x, before)


def test_far_too_many_lengths() -> None:
    many = [1] * ((1 << 20) + 1)
    with pytest.raises(ValueError, match="values for 4 virtual ranks"):
        shardsum.ragged_sum(b0(), many)
    with pytest.raises(RuntimeError):
        native.call_with(kernels.sum_checked, many, -1, False, None, torch.empty(6), b0())


def test_arguments_of_a_call_are_told_apart() -> None:
    x, out = b0(), torch.full((6,), 77.0)
    good = [kernels.sum_checked, B0_LENGTHS, -1, False, None, out, x]
    lists = [True, 0, 0, 0], [1.0, 0, 0, 0], [1 << 63, 0, 0, 0], [0] * 100
    for at, value in [*((1, odd) for odd in lists), (2, None), (2, 1 << 70), (4, 1), (4, torch.ones(()))]:
        with pytest.raises(RuntimeError):
            native.call_with(*good[:at], value, *good[at + 1 :])
    for arguments in ((), good[:5], [*good, x]):
        with pytest.raises(RuntimeError):
            native.call_with(*arguments)
    assert (out == 77).all()


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


def test_lengths_in_a_transform() -> None:
    weight = torch.ones(6)
    grad = torch.func.grad(lambda w: (w * shardsum.ragged_sum(b0(), B0_LENGTHS)).sum())(weight)
    assert grad.tolist() == B0_SUM
    assert shardsum.ragged_sum(b0(), B0_LENGTHS).tolist() == B0_SUM


def test_a_nested_tensor_is_named() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for size in (None, 3):
        with pytest.raises(ValueError, match="shards: expected a padded Tensor"):
            shardsum.ragged_sum(nested, [1, 2], size=size)


def test_an_out_with_a_lazy_sign_receives_the_values() -> None:
    x, mask = b0(), torch.arange(6) < torch.tensor(B0_LENGTHS)[:, None]
    for call in (
        lambda out: shardsum.ragged_sum(x, B0_LENGTHS, out=out),
        lambda out: shardsum.ragged_sum([x[r, :n] for r, n in enumerate(B0_LENGTHS)], out=out),
        lambda out: shardsum.masked_sum(x, mask, out=out),
    ):
        out = torch._neg_view(torch.full((6,), 7.0))
        assert call(out) is out and out.is_neg() and out.tolist() == B0_SUM
    out = torch._neg_view(torch.full((6,), -7.0))
    assert shardsum.ragged_sum(x, B0_LENGTHS, out=out, accumulate=True).tolist() == [n + 7 for n in B0_SUM]
    with pytest.raises(ValueError, match="out: shares memory"):
        shardsum.ragged_sum(x, B0_LENGTHS, out=torch._neg_view(x[3]))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_a_refused_call_leaves_no_memory_behind() -> None:
    class Mallinfo(ctypes.Structure):
        _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    x, lengths, out = b0(), torch.tensor(B0_LENGTHS).repeat_interleave(2)[::2], torch.empty(6)  # lengths: not in a row

    def refuse(count: int) -> int:
        for _ in range(count):
            for target in (None, out):
                assert usual.usual_sum(x, lengths, None, "mean", 0.5, None, target) is None
        gc.collect()
        return mallinfo().field7  # bytes in use

    before = refuse(100)
    assert refuse(2000) - before < 2000 * 16
