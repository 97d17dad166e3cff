"""The peer transport's operators on the CPU: schemas, what they check before a launch, and how they refuse.

The library's CPU part makes all checks of csrc/peer/bindings.cpp and then refuses, as it can launch nothing. What is
launched: tests/gpu/test_gpu_peer_call.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardsum.core.layout import ExchangePlan
from shardsum.native import loader as native
from shardsum.transports.peer import layout, operators, shapes
from shardsum.transports.peer.layout import MemoryLayout, choose_regions
from shardsum.transports.peer.prepared import Addresses, PreparedCall, plan_words
from shardsum.transports.peer.tuning import Tuning

OPS = torch.ops.shardsum
LENGTH, SIZE, ROW = 5, 6, (2, 4)
END = "peer memory is memory of GPUs"  # all checks have passed


@pytest.fixture(autouse=True)
def library() -> None:
    if native.status().backend != "native":
        pytest.skip("needs the native library")


def prepared(num_rows: int = 1) -> PreparedCall:
    """An all_reduce of two processes, ``num_rows`` rows each, as process 0 prepares it; without memory."""
    tuning = Tuning()
    layout = MemoryLayout(
        choose_regions(2 * num_rows, 2, 128, num_rows, tuning, 1 << 20), 2 * num_rows, num_rows, tuning
    )
    owner = SimpleNamespace(device=torch.device("cpu"), check=lambda: None)
    owners = tuple(g for g in range(2) for _ in range(num_rows))
    plan = ExchangePlan(((0, LENGTH),) * len(owners), owners, ((0, SIZE),) * 2, (0, 1), 2)
    message = shapes.describe_message(plan, 8, 4, 2, False)
    shape = shapes.choose_shape(message, layout)
    codes = operators.DTYPE_CODES[torch.float32], operators.DTYPE_CODES[torch.bfloat16]
    words = plan_words(plan, message, shape, layout, Addresses((0, 0), 0, 0, 0), 0, codes)
    return PreparedCall(owner, shape, words, (torch.float32, torch.bfloat16))


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(SIZE, *ROW, dtype=torch.bfloat16), torch.zeros(LENGTH, *ROW)


def test_the_operators_take_tensors_alone() -> None:
    assert str(OPS.peer_call.default._schema).endswith("(Tensor(a!) out, Tensor shard, Tensor plan) -> ()")
    assert str(OPS.peer_call_new.default._schema).endswith("(Tensor shard, Tensor plan) -> Tensor")
    assert str(OPS.peer_call_new.list._schema).endswith("(Tensor[] shards, Tensor plan) -> Tensor[]")


def test_a_good_call_passes_all_checks() -> None:
    plan = prepared().bind([1, LENGTH], ROW)
    out, shard = tensors()
    assert plan.dtype == torch.int64 and plan.dim() == 1
    for longer in (shard, torch.zeros(LENGTH + 3, *ROW)):
        with pytest.raises(RuntimeError, match=END):
            OPS.peer_call(out, longer, plan)
        with pytest.raises(RuntimeError, match=END):
            OPS.peer_call_new(longer, plan)
        with pytest.raises(RuntimeError, match=END):
            OPS.peer_call_new.list([longer], plan)


def test_calls_of_several_rows() -> None:
    state = torch.tensor([41])
    plan = prepared(3).bind([0, LENGTH, 1, 2, 0, 0], ROW, state)
    _, shard = tensors()
    for last, message in (
        ([shard[:2].clone(), shard[:0]], END),
        ([shard[:1].clone(), shard], "shard has 1 positions, its plan 2"),
        ([shard, shard.double()], "shard has another dtype"),
        ([shard], "the plan has other rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS.peer_call_new.list([shard, *last], plan)
    with pytest.raises(RuntimeError, match="lazy signs"):
        OPS.peer_call_new.list([torch._neg_view(shard)] * 3, plan)
    for call in (lambda: OPS.peer_call_new(shard, plan), lambda: OPS.peer_call(tensors()[0], shard, plan)):
        with pytest.raises(RuntimeError, match="the plan has several rows"):
            call()
    state.fill_(operators.FAILED)
    with pytest.raises(RuntimeError, match="failed or was closed"):
        OPS.peer_call_new.list([shard] * 3, plan)
    assert state.tolist() == [operators.FAILED]


def overlapping() -> tuple[Tensor, Tensor]:
    memory = torch.zeros(500, dtype=torch.uint8)
    shard = memory[:160].view(torch.float32).view(LENGTH, *ROW)
    return memory[158 : 158 + 96].view(torch.bfloat16).view(SIZE, *ROW), shard


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], str]] = {
    "dtype of shard": (lambda out, x: (out, x.double()), "shard has another dtype"),
    "dtype of out": (lambda out, x: (out.float(), x), "out has another dtype"),
    "row of shard": (lambda out, x: (out, x.reshape(LENGTH, 8)), "shard has another shape"),
    "row of out": (lambda out, x: (out.reshape(SIZE, 4, 2), x), "out has another shape"),
    "short shard": (lambda out, x: (out, x[1:]), "shard has 4 positions, its plan 5"),
    "short out": (lambda out, x: (out[1:], x), "out has 5 positions, its plan 6"),
    "long out": (lambda out, x: (torch.cat([out, out]), x), "out has 12 positions, its plan 6"),
    "shard not contiguous": (
        lambda out, x: (out, x.transpose(1, 2).contiguous().transpose(1, 2)),
        "shard is not contiguous",
    ),
    "out not contiguous": (lambda out, x: (torch.cat([out, out])[::2], x), "out is not contiguous"),
    "overlap": (lambda out, x: overlapping(), "out shares memory with shard"),
    "negative": (lambda out, x: (out, torch._neg_view(x)), "lazy signs"),
    "negative out": (lambda out, x: (torch._neg_view(out), x), "lazy signs"),
    "zeros": (lambda out, x: (out, torch._efficientzerotensor(x.shape)), "lazy signs or zeros"),
    "meta": (lambda out, x: (out, x.to("meta")), "Meta"),
    "sparse": (lambda out, x: (out, x.to_sparse()), "Sparse"),
    "nested": (lambda out, x: (out, torch.nested.nested_tensor([x, x])), "Nested"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_the_plan_is_refused_and_not_counted(case: str) -> None:
    state = torch.tensor([41])
    plan = prepared().bind([0, LENGTH], ROW, state)
    change, message = WRONG[case]
    out, shard = change(*tensors())
    with pytest.raises(RuntimeError, match=message):
        OPS.peer_call(out, shard, plan)
    if "out" not in case and case != "overlap":
        with pytest.raises(RuntimeError, match=message):
            OPS.peer_call_new(shard, plan)
    assert state.tolist() == [41]


def test_the_state_of_a_failed_group_holds_calls_back() -> None:
    bit, message = operators.FAILED, "failed or was closed"
    state = torch.tensor([7])
    plan = prepared().bind([0, LENGTH], ROW, state)
    out, shard = tensors()
    for held in (bit, 0, bit):  # read at every call
        state.fill_(7 + held)
        with pytest.raises(RuntimeError, match=message if held else END):
            OPS.peer_call(out, shard, plan)
        with pytest.raises(RuntimeError, match=message if held else END):
            OPS.peer_call_new(shard, plan)
        assert state.item() == 7 + held


@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_a_transform_does_not_reach_the_launch(transform: str) -> None:
    plan, (_, shard) = prepared().bind([0, LENGTH], ROW), tensors()
    with pytest.raises(RuntimeError):
        getattr(torch.func, transform)(lambda x: OPS.peer_call_new(x, plan))(shard.repeat(2, 1, 1))


def test_a_plan_is_one_of_this_library() -> None:
    out, shard = tensors()
    plan = prepared().bind([0, LENGTH], ROW)
    old = plan.clone()
    old[0] -= 1
    for bad, message in ((plan[:-1], "not one of peer_bind"), (plan.int(), "not one of"), (old, "another version")):
        with pytest.raises(RuntimeError, match=message):
            OPS.peer_call(out, shard, bad)


def test_what_cannot_be_bound() -> None:
    with pytest.raises(RuntimeError, match="start and length of each shard"):
        prepared(2).bind([0, LENGTH], ROW)
    with pytest.raises(ValueError, match="row_shape: 16 dimensions"):
        prepared().bind([0, LENGTH], (1,) * 16)
    for bounds, row in (([0, LENGTH], (3,)), ([0], ROW), ([-1, LENGTH], ROW), ([2, SIZE], ROW)):
        with pytest.raises(RuntimeError):
            prepared().bind(bounds, row)


def test_constants_are_those_of_the_library() -> None:
    constant = ctypes.CDLL(str(native.status().library)).shardsum_peer_constant
    constant.argtypes, constant.restype = [ctypes.c_char_p], ctypes.c_int64
    expected = {
        "plan_version": operators.PLAN_VERSION, "max_ranks": layout.MAX_RANKS, "max_hosted": layout.MAX_HOSTED,
        "max_row_dims": operators.MAX_ROW_DIMS, "state_failed": operators.FAILED,
        "state_number": operators.NUMBER,
        **{str(dtype).removeprefix("torch."): code for dtype, code in operators.DTYPE_CODES.items()},
    }  # fmt: skip
    assert {name: constant(name.encode()) for name in expected} == expected
    assert constant(b"nothing") == -1
