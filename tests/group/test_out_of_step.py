"""Processes that diverge on signatures they have agreed on: an error on all that names both calls, never a number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardsum import ShardGroup
from shardsum.group import routes
from tests.processes import run_processes
from tests.values import ones

HALVES = [(0, 4), (4, 8)]
SHIFTED = [(2, 6), (4, 8)]
TIMEOUT = 6.0


class Calls:
    """Calls of one group, or of two on the same processes, all known to them."""

    def __init__(self, rank: int, transport: str) -> None:
        self.rank = rank
        self.group, self.other = (ShardGroup(2, timeout=TIMEOUT, transport=transport) for _ in range(2))
        for call in (self.four, self.six, self.mean, self.gather, self.uneven, self.even, self.counted):
            call()
        self.exchange_and_back()
        self.gather_and_back()
        self.four(self.other)
        for use_reentrant in (False, True):
            assert self.regions_in_turn((1, 0), use_reentrant).tolist() == [10.0] * 4
        for padded in (False, True) if transport == "gather" else (False,):
            assert self.backward_in_turn((1, 0), padded).tolist() == [10.0] * 4

    def four(self, group: ShardGroup | None = None) -> torch.Tensor:
        return (group or self.group).all_reduce(torch.full((4,), 1.0 + self.rank), [4, 4])

    def six(self) -> torch.Tensor:
        return self.group.all_reduce(torch.ones(6), [6, 6])

    def mean(self) -> torch.Tensor:
        return self.group.all_reduce(torch.ones(4), [4, 4], op="mean")

    def gather(self) -> torch.Tensor:
        return self.group.all_gather(torch.ones(4), [4, 4])

    def uneven(self) -> torch.Tensor:
        return self.group.reduce_scatter(torch.ones(4), [4, 4], splits=[1, 3])

    def even(self) -> torch.Tensor:
        return self.group.reduce_scatter(torch.ones(4), [4, 4], splits=[2, 2])

    def counted(self) -> torch.Tensor:
        return self.group.all_reduce(torch.ones(4))

    def exchange(self) -> torch.Tensor:
        return self.group.exchange(torch.ones(4, requires_grad=True), HALVES, SHIFTED, size=8)

    def exchange_and_back(self) -> None:
        self.exchange().sum().backward()

    def gather_with_gradient(self) -> torch.Tensor:
        return self.group.all_gather(torch.ones(4, requires_grad=True), [4, 4])

    def gather_and_back(self) -> None:
        self.gather_with_gradient().sum().backward()

    def backward_in_turn(self, order: tuple[int, int], padded: bool) -> torch.Tensor:
        """Two equal calls, whose backward passes are as equal; only what they belong to tells them apart."""
        x, lengths = torch.ones(4, requires_grad=True), torch.tensor([4])
        if padded:
            ys = [self.group.all_reduce(x * i, lengths, size=4, grad="sum") for i in (1, 2)]
        else:
            ys = [self.group.all_gather(x * i, [4, 4]) for i in (1, 2)]
        for i in order:
            (ys[i].sum() * (i + 1)).backward()
        assert x.grad is not None
        return x.grad

    def compiled_in_turn(self, order: tuple[int, int]) -> None:
        """Two equal calls of a compiled graph."""
        exchange, x = partial(self.group.exchange, size=8), torch.ones(4, requires_grad=True)
        compiled = torch.compile(lambda x: exchange(x, HALVES, SHIFTED).sum(), backend="aot_eager", fullgraph=True)
        ys = [compiled(x) for _ in range(2)]
        for i in order:
            (ys[i] * (i + 1)).backward()

    def regions_in_turn(self, order: tuple[int, int], use_reentrant: bool) -> torch.Tensor:
        """Two equal calls that backward makes again, whose own backward moves nothing."""
        x = torch.ones(4, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            y = self.group.all_reduce(x, [4, 4])
            return y * y / 4

        ys = [checkpoint(region, x * i, use_reentrant=use_reentrant) for i in (1, 2)]
        for i in order:
            (ys[i].sum() * 2).backward()
        assert x.grad is not None
        return x.grad


#: What process 0 and process 1 do, and what both must read.
DIVERGENCES: dict[str, tuple[Callable[[Calls], list[Any]], Callable[[Calls], list[Any]], tuple[str, ...]]] = {
    "another order": (lambda c: [c.four, c.six], lambda c: [c.six, c.four], ("lengths=[4, 4]", "lengths=[6, 6]")),
    "a skipped call": (lambda c: [c.four, c.six], lambda c: [c.six], ("lengths=[4, 4]", "lengths=[6, 6]")),
    "sum against mean": (lambda c: [c.four], lambda c: [c.mean], ("op=sum", "op=mean")),
    "splits": (lambda c: [c.uneven], lambda c: [c.even], ("((0, 1), (1, 4))", "((0, 2), (2, 4))")),
    "other collectives": (lambda c: [c.gather, c.four], lambda c: [c.four, c.gather], ("all_reduce", "all_gather")),
    "counted on one": (lambda c: [c.counted], lambda c: [c.four], ("row counts", "all_reduce(")),
    "a skipped backward of exchange": (
        lambda c: [c.exchange, c.exchange],
        lambda c: [c.exchange_and_back],
        ("is in exchange(", "backward of exchange("),
    ),
    "a skipped backward of all_gather": (
        lambda c: [c.gather_with_gradient, c.gather_with_gradient],
        lambda c: [c.gather_and_back],
        ("is in all_gather(", "backward of all_gather("),
    ),
    **{
        f"backward passes of equal calls, {text}": (
            lambda c, padded=padded: [lambda: c.backward_in_turn((0, 1), padded)],
            lambda c, padded=padded: [lambda: c.backward_in_turn((1, 0), padded)],
            ("backward of all_", ") of call "),
        )
        for text, padded in (("lengths on the host", False), ("on the device", True))
    },
    "backward passes of compiled graphs": (
        lambda c: [lambda: c.compiled_in_turn((0, 1))],
        lambda c: [lambda: c.compiled_in_turn((1, 0))],
        ("backward of exchange(", ") of call "),
    ),
    **{
        f"checkpointed regions run again, {text}": (
            lambda c, use_reentrant=use_reentrant: [lambda: c.regions_in_turn((0, 1), use_reentrant)],
            lambda c, use_reentrant=use_reentrant: [lambda: c.regions_in_turn((1, 0), use_reentrant)],
            ("is in all_reduce(", ") of call "),
        )
        for text, use_reentrant in (("by hooks", False), ("reentrant", True))
    },
    "groups in another order": (
        lambda c: [lambda: c.four(c.other), c.four],
        lambda c: [c.four, lambda: c.four(c.other)],
        ("process 0 waits for process 1", "process 1 waits for process 0"),
    ),
}


def diverge(rank: int, world_size: int, transport: str) -> dict[str, str]:
    found = {}
    for name, (first, second, _) in DIVERGENCES.items():
        if "on the device" in name and transport == "all_to_all":
            continue
        calls = Calls(rank, transport)
        started = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            for call in (second if rank else first)(calls):
                call()
        assert time.monotonic() - started < TIMEOUT + 2
        found[name] = str(caught.value)
        with pytest.raises(RuntimeError):
            calls.group.check()
            calls.other.check()
    fresh = ShardGroup(2)
    assert fresh.all_reduce(torch.full((4,), 100.0 + rank), [4, 4]).tolist() == [201.0] * 4
    return found


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_processes_out_of_step_get_an_error_that_names_both_calls(transport: str) -> None:
    for messages in run_processes(diverge, 2, transport, timeout=120):
        for name, message in messages.items():
            assert all(word in message for word in DIVERGENCES[name][2]), (name, message)


def one_of_three(rank: int, world_size: int) -> str:
    """Process 2 goes astray where the others are in step: they read it, too."""
    group = ShardGroup(3, timeout=TIMEOUT, transport="all_to_all")
    a, b = (lambda: group.all_reduce(torch.ones(6), [6] * 3)), (lambda: group.all_gather(torch.ones(6), [6] * 3))
    a(), b()
    with pytest.raises(RuntimeError) as caught:
        for call in (b, a) if rank == 2 else (a, b):
            call()
    return str(caught.value)


def test_one_process_out_of_step_is_named_on_all() -> None:
    for message in run_processes(one_of_three, 3):
        assert "process 2 is in all_gather(" in message and "is in all_reduce(" in message, message


def meet_again(rank: int, world_size: int) -> list[float]:
    """A construction that one process misses, or gives up, is not in the way of the next."""
    ShardGroup(2)
    for absent in range(2):
        if rank == absent:
            time.sleep(2.5)
        else:
            with pytest.raises(RuntimeError, match=f"process {absent} did not come within 1 s"):
                ShardGroup(2, timeout=1)
    group = ShardGroup(2, timeout=5)
    return group.all_reduce(torch.full((2,), 1.0 + rank), [2, 2]).tolist()


def test_a_construction_that_one_process_missed_is_not_in_the_way_of_the_next() -> None:
    assert run_processes(meet_again, 2) == [[3.0, 3.0]] * 2


def handles(rank: int, world_size: int) -> list[list[float]]:
    """Handles of two groups with chunks to come, waited for in another order on each process."""
    routes.CHUNK_BYTES = 1 << 10
    groups = [ShardGroup(2, timeout=5, transport="all_to_all") for _ in range(2)]
    started = [g.all_reduce(ones(g, 1000), [1000] * 2, async_op=True) for g in groups]
    for i in (0, 1) if rank else (1, 0):
        assert started[i].wait().tolist() == [2.0] * 1000
    dropped = groups[0].all_reduce(ones(groups[0], 1000), [1000] * 2, async_op=True)
    del dropped
    return [g.all_reduce(ones(g, 2), [2] * 2).tolist() for g in groups]


def test_handles_of_two_groups_are_waited_for_in_any_order() -> None:
    assert run_processes(handles, 2) == [[[2.0, 2.0], [2.0, 2.0]]] * 2


def threads(rank: int, world_size: int) -> None:
    """A second thread is refused for as long as a call is under way, in any group of the process group."""
    group, other = ShardGroup(2, timeout=20), ShardGroup(2, timeout=20)
    x = torch.ones(4)
    group.all_reduce(x, [4, 4])
    other.all_reduce(x, [4, 4])
    if rank:
        time.sleep(1)
    else:
        thread = threading.Thread(target=group.all_reduce, args=(x, [4, 4]))
        thread.start()
        time.sleep(0.3)
        for g in (group, other):
            with pytest.raises(RuntimeError, match="in use by another thread"):
                g.all_reduce(x, [4, 4])
        thread.join()
    if rank:
        group.all_reduce(x, [4, 4])
    for g in (group, other):
        assert g.all_reduce(x, [4, 4]).tolist() == [2.0] * 4


def test_a_second_thread_is_refused() -> None:
    run_processes(threads, 2)
