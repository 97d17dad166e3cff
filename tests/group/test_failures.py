"""Processes that die, stay away, fail or are interrupted: the same named error everywhere, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch

from shardsum import ShardGroup
from shardsum.group import exchanges, routes
from shardsum.group.agreement import Agreement
from tests.processes import run_processes
from tests.values import ones


def stay_away(rank: int, world_size: int, lengths: list | None, cached: bool) -> str | None:
    group = ShardGroup(3, timeout=1)
    if cached:
        group.all_reduce(ones(group), lengths)
    if rank == 1:
        time.sleep(4.5)  # silent, alive
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        group.all_reduce(ones(group), lengths)
    assert time.monotonic() - started < 4
    with pytest.raises(RuntimeError, match=r"failed earlier"):
        group.all_reduce(ones(group), lengths)
    with pytest.raises(RuntimeError):
        group.check()
    return str(caught.value)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("lengths", [[2, 2, 2], None])
def test_a_silent_process_is_named_within_the_timeout(lengths: list | None, cached: bool) -> None:
    messages = run_processes(stay_away, 3, lengths, cached)
    for message in (messages[0], messages[2]):
        assert "no word from process 1" in message or "process 1 did not come" in message, messages


def die(rank: int, world_size: int, lengths: list | None, transport: str, amid: bool) -> str | None:
    group = ShardGroup(4, timeout=5, transport=transport)
    x = torch.ones(6, 100_000)
    group.all_reduce(x, lengths)
    if rank == 1:
        if amid:
            group.all_reduce(x, lengths, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:  # the transfer may end before the process does
        for _ in range(2):
            group.all_reduce(x, lengths)
    assert time.monotonic() - started < 9
    return str(caught.value)


@pytest.mark.parametrize(("transport", "amid"), [("gather", False), ("gather", True), ("all_to_all", True)])
@pytest.mark.parametrize("lengths", [[6, 6, 6, 6], None])
def test_a_killed_process_is_named(lengths: list | None, transport: str, amid: bool) -> None:
    messages = run_processes(die, 4, lengths, transport, amid, may_die=(1,))
    for message in (messages[0], *messages[2:]):
        assert "no word from process 1" in message or "connection with process 1 was closed" in message, messages


def die_amid_construction(rank: int, world_size: int) -> str | None:
    if rank == 1:
        Agreement.connect = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        ShardGroup(4, timeout=3)
    assert time.monotonic() - started < 8
    return str(caught.value)


def test_a_process_killed_amid_the_construction_is_named() -> None:
    messages = run_processes(die_amid_construction, 4, may_die=(1,))
    for message in (messages[0], *messages[2:]):
        assert "ShardGroup (call 1)" in message and "no word from process 1" in message, messages


def interrupted(rank: int, world_size: int, where: str) -> str:
    """Nobody comes to process 0, in the transfer, in the comparison of a new signature or in a wait."""
    routes.CHUNK_BYTES = 1 << 10
    group = ShardGroup(2, timeout=5, transport="all_to_all")
    x = ones(group, 2 if where != "wait" else 1000)
    lengths = [x[0].shape[0]] * 2
    group.all_reduce(x, lengths)

    def call() -> None:
        if where == "wait":
            group.all_reduce(x, lengths, async_op=True).wait()
        else:
            group.all_reduce(x, lengths, scale=0.5 if where == "comparison" else None)

    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            call()
        with pytest.raises(RuntimeError, match=r"failed earlier.* was left by KeyboardInterrupt") as caught:
            group.all_reduce(x, lengths)
        return str(caught.value)
    time.sleep(1)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            call()
    return str(caught.value)


@pytest.mark.parametrize("where", ["transfer", "comparison", "wait"])
def test_a_call_that_was_interrupted_is_never_mixed_with_the_next(where: str) -> None:
    message = run_processes(interrupted, 2, where)[1]
    assert "process 0: failed in call 4 (all_reduce): left by KeyboardInterrupt" in message


def fail_amid(rank: int, world_size: int) -> None:
    """Process 0 fails between two chunks of one group's call, then calls another group of the same processes."""
    routes.CHUNK_BYTES = 1 << 10
    group, other = (ShardGroup(2, timeout=2, transport="all_to_all") for _ in range(2))
    x, lengths = ones(group, 1000), [1000] * 2
    other.all_reduce(x, lengths)
    if rank == 0:
        fill, calls = exchanges.fill, iter((1, 1, 0))
        exchanges.fill = lambda *args: fill(*args) if next(calls) else 1 / 0
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        group.all_reduce(x, lengths)
    if rank == 0:
        exchanges.fill = fill
    with pytest.raises(RuntimeError, match="failed earlier"):
        group.all_reduce(x, lengths)
    assert other.all_reduce(x, lengths).tolist() == [2.0] * 1000


def test_a_call_that_failed_amid_its_transfers_is_never_mixed_with_those_of_another_group() -> None:
    run_processes(fail_amid, 2)


def failed_wait(rank: int, world_size: int) -> None:
    group = ShardGroup(2, timeout=1, transport="all_to_all")
    group.all_reduce(ones(group), [2, 2])
    if rank:
        time.sleep(2.5)
        return
    handle = group.all_reduce(ones(group), [2, 2], async_op=True)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            handle.wait()


def test_waiting_again_after_an_error_is_the_error_again() -> None:
    run_processes(failed_wait, 2)


def stay_away_in_backward(rank: int, world_size: int) -> str | None:
    group = ShardGroup(3, timeout=2)
    x = [t.requires_grad_() for t in ones(group)]
    y = group.all_gather(x, [2] * 3)
    if rank == 1:
        time.sleep(5)  # its loss does not use y
        return None
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"failed earlier"):
        group.all_reduce(ones(group), [2] * 3)
    return str(caught.value)


def test_a_process_without_backward_is_named() -> None:
    messages = run_processes(stay_away_in_backward, 3)
    for message in (messages[0], messages[2]):
        assert "backward of all_gather" in message and "no word from process 1" in message, messages


def open_call_of_a_failed_group(rank: int, world_size: int) -> None:
    a, b = (ShardGroup(2, timeout=3, transport="all_to_all") for _ in range(2))
    for group in (a, b):
        group.all_reduce(torch.ones(4), [4, 4])
    handle = None if rank else a.all_reduce(torch.ones(4), [4, 4], async_op=True)
    with contextlib.suppress(RuntimeError):  # it fails where the circle is found before a's call times out
        b.all_reduce(torch.ones(4), [4, 4])  # process 0 completes the open call first, in vain
    if handle is not None:
        with pytest.raises(RuntimeError, match=r"all_reduce \(call \d\) on process 0 failed: .*process 1"):
            handle.wait()


def test_a_handle_tells_why_its_group_failed_in_a_call_of_another() -> None:
    run_processes(open_call_of_a_failed_group, 2)
