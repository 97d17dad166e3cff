"""Processes that disagree or pass bad input: the same named error everywhere, never a hang, nothing left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardsum import ShardGroup
from tests.processes import run_processes
from tests.values import B0_LENGTHS, B0_SUM, assert_same, b0, ones

#: What process 2 of 3 does differently, and what all must then read.
DISAGREEMENTS: dict[str, tuple[Callable, Callable, str]] = {
    "size": (
        lambda g: g.all_reduce(ones(g), [2] * 4, size=4),
        lambda g: g.all_reduce(ones(g), [2] * 4, size=6),
        "all_reduce: size differs: process 0 has 4, process 2 has 6",
    ),
    "dtype": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_reduce(ones(g, dtype=torch.bfloat16), [2] * 4),
        "all_reduce: dtype differs: process 0 has torch.float32, process 2 has torch.bfloat16",
    ),
    "trailing shape": (
        lambda g: g.reduce_scatter(ones(g, trailing=(3,)), [2] * 4),
        lambda g: g.reduce_scatter(ones(g, trailing=(5,)), [2] * 4),
        "reduce_scatter: trailing shape differs: process 0 has [3], process 2 has [5]",
    ),
    "op": (
        lambda g: g.all_reduce(ones(g), [2] * 4, op="sum"),
        lambda g: g.all_reduce(ones(g), [2] * 4, op="mean"),
        "all_reduce: op differs: process 0 has sum, process 2 has mean",
    ),
    "lengths": (
        lambda g: g.all_reduce(ones(g), [2, 2, 2, 1]),
        lambda g: g.all_reduce(ones(g), [2, 2, 2, 2]),
        "all_reduce: lengths differs: process 0 has [2, 2, 2, 1], process 2 has [2, 2, 2, 2]",
    ),
    "collective": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_gather(ones(g), [2] * 4),
        "process 0 calls all_reduce, process 2 calls all_gather",
    ),
    "counted dtype": (
        lambda g: g.all_reduce(ones(g)),
        lambda g: g.all_reduce(ones(g, dtype=torch.float64)),
        "has torch.float32, process 2 has torch.float64",
    ),
    "form of lengths": (
        lambda g: g.all_reduce(ones(g)),
        lambda g: g.all_reduce(ones(g), [2] * 4),
        "lengths",
    ),
    "forms of lengths": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_reduce(ones(g)),
        "all_reduce: lengths differs: process 0 has [2, 2, 2, 2], process 2 has counted",
    ),
    "a length too long": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_reduce(ones(g, rows=1), [2] * 4),
        "all_reduce: process 2: lengths: virtual rank 3 has 2, but its shard holds 1 rows",
    ),
    "a counted length too long": (
        lambda g: g.all_reduce(ones(g), size=2),
        lambda g: g.all_reduce(ones(g, rows=3), size=2),
        "all_reduce: process 2: lengths: virtual rank 3 has 3, beyond size 2",
    ),
    "counted, of other numbers": (
        lambda g: g.all_reduce(ones(g)),
        lambda g: g.gather_ints("reduce_gradients", range(300), 300),
        "process 0 calls all_reduce, process 2 calls reduce_gradients",
    ),
    "numbers of values": (
        lambda g: g.gather_ints("reduce_gradients", range(5), 5),
        lambda g: g.gather_ints("reduce_gradients", range(300), 300),
        "reduce_gradients: number of values differs: process 0 has 5, process 2 has 300",
    ),
    "not a tensor": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_reduce([None] * len(g.virtual_ranks), [2] * 4),
        "process 2: shards: virtual rank 3 is None",
    ),
    "no tensor to write to": (
        lambda g: g.all_reduce(ones(g), [2] * 4),
        lambda g: g.all_reduce(ones(g), [2] * 4, out=[0.0, 0.0]),
        "all_reduce: process 2: out: expected a Tensor, got [0.0, 0.0]",
    ),
    "a counted out too long": (
        lambda g: g.all_reduce(ones(g)),
        lambda g: g.all_reduce(ones(g), out=torch.empty(3)),
        "all_reduce: process 2: out: 3 rows, but the result has 2",
    ),
    "counted, asynchronous, with gradient": (
        lambda g: g.all_gather(ones(g), async_op=True),
        lambda g: g.all_gather([x.requires_grad_() for x in ones(g)], async_op=True),
        "all_gather: process 2: async_op: not possible",
    ),
    "gradient": (
        lambda g: g.reduce_scatter(ones(g), [2] * 4),
        lambda g: g.reduce_scatter([x.requires_grad_() for x in ones(g)], [2] * 4),
        "reduce_scatter: requires grad differs: process 0 has False, process 2 has True",
    ),
    "token count": (
        lambda g: g.token_mean([torch.tensor(1.0)] * len(g.virtual_ranks), [1] * len(g.virtual_ranks)),
        lambda g: g.token_mean([torch.tensor(1.0)], ["one"]),
        "token_mean: process 2: num_valid: virtual rank 3 has 'one'",
    ),
    "pairs": (
        lambda g: g.exchange(ones(g), [(0, 2)] * 4, [(0, 2)] * 4, size=2),
        lambda g: g.exchange(ones(g), [(0, 2, 4)] * 4, [(0, 2)] * 4, size=2),
        "exchange: process 2: in_intervals: expected 4 pairs",
    ),
}


def disagree(rank: int, world_size: int, name: str, check: str, cached: bool) -> str:
    usual, odd, _ = DISAGREEMENTS[name]
    group = ShardGroup(4, check=check, timeout=8)
    if cached:
        usual(group)
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        (odd if rank == 2 else usual)(group)
    assert time.monotonic() - started < 6, "an answer long before the timeout"
    fresh = ShardGroup(4)
    x = b0()
    assert fresh.all_reduce([x[v] for v in fresh.virtual_ranks], B0_LENGTHS).tolist() == B0_SUM
    return str(caught.value)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_the_same_error_on_every_process(name: str) -> None:
    messages = run_processes(disagree, 3, name, "first", False)
    assert len(set(messages)) == 1 and DISAGREEMENTS[name][2] in messages[0], messages


@pytest.mark.parametrize("name", ["size", "lengths", "a length too long"])
def test_check_always_catches_it_on_a_cached_signature(name: str) -> None:
    messages = run_processes(disagree, 3, name, "always", True)
    assert len(set(messages)) == 1 and DISAGREEMENTS[name][2] in messages[0], messages


@pytest.mark.parametrize(
    "name",
    ["counted dtype", "a counted length too long", "a counted out too long", "counted, asynchronous, with gradient"],
)
def test_counted_lengths_catch_it_on_every_call(name: str) -> None:
    messages = run_processes(disagree, 3, name, "first", True)
    assert len(set(messages)) == 1 and DISAGREEMENTS[name][2] in messages[0], messages


def call_a_failed_group(rank: int, world_size: int, lengths: list | None) -> str:
    """Process 2 alone passes row counts, or is the one that does not; then all call again."""
    group = ShardGroup(3, timeout=20)
    odd = None if lengths else [2] * 3
    with pytest.raises(ValueError, match="lengths differs"):
        group.all_reduce(ones(group), odd if rank == 2 else lengths)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        group.all_reduce(ones(group, rows=3), None if lengths is None else [3] * 3)
    assert time.monotonic() - started < 10, "long before the timeout"
    return str(caught.value)


@pytest.mark.parametrize("lengths", [[2] * 3, None])
def test_a_call_of_a_group_that_failed_elsewhere_ends_at_once(lengths: list | None) -> None:
    for message in run_processes(call_a_failed_group, 3, lengths):
        assert "not all passed row counts" in message or "did not pass its row counts" in message, message


def go_on_after_an_error(rank: int, world_size: int, bad: str, then: str) -> list[str]:
    """Process 1 passes a bad argument to a call that the others, who agreed on its signature, carry out."""
    group = ShardGroup(3, timeout=2)
    x = [torch.ones(4, requires_grad=True)]
    y = group.reduce_scatter(x, [4] * 3)  # its backward comes below
    calls: dict[str, Callable] = {
        "out": lambda v, out=None: group.all_reduce([torch.full((4,), v)], [4] * 3, out=out),
        "scale": lambda v, scale=0.5: group.all_reduce([torch.full((4,), v)], [4] * 3, scale=scale),
        "backward": lambda v: y[0].sum().backward(),
    }
    for call in ("out", "scale"):
        calls[call](1.0)
    messages = []
    for value, name, change in ((1.0, bad, {bad: "bad"} if rank == 1 else {}), (10.0, then, {})):
        try:
            calls[name](value, **change)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize(("bad", "then"), [("out", "out"), ("scale", "out"), ("out", "backward")])
def test_a_call_refused_by_one_process_is_never_mixed_with_its_next(bad: str, then: str) -> None:
    results = run_processes(go_on_after_an_error, 3, bad, then)
    assert len(results[1]) == 2 and "bad" in results[1][0] and "process 0" in results[1][1]
    for messages in (results[0], results[2]):
        assert re.search(
            rf"process 1 refused all_reduce \(call \d\): {bad}: expected|process 1: failed in", messages[0]
        )


def run_ahead(rank: int, world_size: int, lengths: list | None) -> str:
    """Process 1 refuses a call that the others start without waiting for it, then all make a call that is new."""
    group = ShardGroup(3, timeout=3)
    x = [torch.ones(4)]
    group.all_reduce(x, [4] * 3)
    try:
        group.all_reduce(x, [4] * 3, out="bad" if rank == 1 else None, async_op=True)
    except ValueError as error:
        assert rank == 1 and "out" in str(error)
    with pytest.raises(RuntimeError) as caught:
        group.all_reduce([torch.full((4,), 10.0)], lengths, scale=0.5)
    with pytest.raises(RuntimeError, match="failed earlier"):
        group.all_reduce(x, [4] * 3)
    return str(caught.value)


@pytest.mark.parametrize("lengths", [[4] * 3, None])
def test_a_call_that_ran_ahead_of_a_refusal_is_never_mixed_with_the_next(lengths: list | None) -> None:
    for message in run_processes(run_ahead, 3, lengths):
        assert re.search("process 1 has refused an earlier call that process 0 carried out|out of step", message)


CONSTRUCTORS = {
    "R": (lambda: ShardGroup(4), lambda: ShardGroup(5), "num_virtual_ranks differs: process 0 has 4, process 1 has 5"),
    "placement": (lambda: ShardGroup(4), lambda: ShardGroup(4, placement="zigzag"), "placement differs"),
    "bad R": (
        lambda: ShardGroup(4),
        lambda: ShardGroup(1),
        "process 1: num_virtual_ranks: 1 is less than",
    ),
    "transport": (lambda: ShardGroup(4), lambda: ShardGroup(4, transport="local"), '"local" is for one process'),
    "check": (lambda: ShardGroup(4), lambda: ShardGroup(4, check="never"), "process 1: check: expected"),
    "timeout": (lambda: ShardGroup(4), lambda: ShardGroup(4, timeout=-1), "process 1: timeout: expected seconds"),
    "device": (lambda: ShardGroup(4), lambda: ShardGroup(4, device="nowhere"), "process 1: device: 'nowhere'"),
    "too many": (lambda: ShardGroup(4), lambda: ShardGroup(2**63), "process 1: num_virtual_ranks: expected an int"),
    "owners": (lambda: ShardGroup(4), lambda: ShardGroup(4, placement=[0, 0, 0.5, 1]), "process 1: placement: exp"),
}


def values(rank: int, world_size: int) -> None:
    group = ShardGroup(4)
    for most in (0, 1, 3, 4, 100):
        mine = [10**18 + rank] * max(most - rank, 0)
        assert group.gather_ints("values", mine, most) == [[10**18 + p] * max(most - p, 0) for p in range(world_size)]


def test_any_number_of_values_is_gathered() -> None:
    run_processes(values, 3)


def construct(rank: int, world_size: int, name: str) -> str:
    with pytest.raises(ValueError) as caught:
        CONSTRUCTORS[name][rank]()
    fresh = ShardGroup(4)
    assert fresh.all_reduce(ones(fresh), [2] * 4).tolist() == [4.0, 4.0]
    return str(caught.value)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_constructor_agrees(name: str) -> None:
    messages = run_processes(construct, 2, name)
    assert len(set(messages)) == 1 and CONSTRUCTORS[name][2] in messages[0], messages


def steady_state(rank: int, world_size: int) -> None:
    """With ints or device lengths nothing but the data travels after a signature's first use."""
    group = ShardGroup(4, transport="gather")
    x = [torch.ones(6, 2) for _ in group.virtual_ranks]
    local = torch.tensor([B0_LENGTHS[v] for v in group.virtual_ranks])

    def step() -> None:
        group.all_reduce(x, B0_LENGTHS)
        group.reduce_scatter(x, B0_LENGTHS)
        group.all_gather(x, B0_LENGTHS)
        local.fill_(3)  # other lengths, the same signature
        group.all_reduce(x, local, size=6)

    step()
    side = group._planner.agreement
    side._side = side._group = None  # any use of them is an error
    step()
    with pytest.raises(AssertionError):
        group.all_reduce(x)


def test_no_metadata_travels_in_the_steady_state() -> None:
    run_processes(steady_state, 2)


def the_same_values_in_other_types(rank: int, world_size: int) -> None:
    group = ShardGroup(4)
    for scale in (2, 2.0, np.float64(2), float("nan"), float("nan")):
        for size in (2, np.int64(2), torch.tensor(2)):
            # Each process passes another type to a signature that is known or new for all alike.
            mine = (scale, size) if rank else (float(scale), int(size))
            result = group.all_reduce(ones(group), [2] * 4, scale=mine[0], size=mine[1])
            assert_same(result, torch.full((2,), 4.0 * float(scale)))


def test_equal_values_of_other_types_agree() -> None:
    run_processes(the_same_values_in_other_types, 2)


def groups_of_other_groups(rank: int, world_size: int) -> None:
    """A process is in more torch groups than another when both construct a ShardGroup."""
    part = dist.new_group([0, 1])
    if rank < 2:
        assert ShardGroup(2, part).all_reduce([torch.ones(1)], [1, 1]).tolist() == [2.0]
    group = ShardGroup(3)
    assert group.all_reduce([torch.ones(1)]).tolist() == [3.0]


def test_groups_of_other_groups() -> None:
    run_processes(groups_of_other_groups, 3)


def other_default_device(rank: int, world_size: int) -> None:
    """What the library makes for itself is where it needs it, whatever torch's default device is."""
    x = b0()
    with torch.device("meta"):
        group = ShardGroup(4)
        for lengths in (B0_LENGTHS, None):
            mine = [x[v, : B0_LENGTHS[v]] for v in group.virtual_ranks]
            assert group.all_reduce(mine, lengths).tolist() == B0_SUM
        local = torch.tensor([B0_LENGTHS[v] for v in group.virtual_ranks], device="cpu")
        assert group.all_reduce([x[v] for v in group.virtual_ranks], local, size=6).tolist() == B0_SUM
        assert group.all_gather(mine).tolist() == [x[r, j] for r in range(4) for j in range(B0_LENGTHS[r])]
        _, count = group.token_mean([t.sum() for t in mine], [t.shape[0] for t in mine])
        assert count.item() == 10


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_default_device(world_size: int) -> None:
    if world_size == 1:
        other_default_device(0, 1)
    else:
        run_processes(other_default_device, world_size)
