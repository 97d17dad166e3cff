"""Processes that are stopped, or end while others call on: the others name them within the timeout plus two seconds,
and go on in a fresh group."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardsum import ShardGroup
from tests.processes import run_processes

TIMEOUT = 2.0


def shards(group: ShardGroup, lengths: list[int]) -> list[torch.Tensor]:
    return [torch.ones(lengths[v]) for v in group.virtual_ranks]


def calls_end_in_an_error(group: ShardGroup, lengths: list[int], given: list[int] | None) -> str:
    """The last transfer that a process sent may still be complete, so there are three calls."""
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            started = time.monotonic()
            group.all_reduce(shards(group, lengths), given, size=4)
    took = time.monotonic() - started
    assert took < TIMEOUT + 2, (took, str(caught.value))
    return str(caught.value)


def stop(rank: int, world_size: int, lengths: list[int], given: bool, transport: str) -> str | None:
    """Process 1 is stopped. It does not host the store, and where its shard is empty nobody needs rows of it."""
    group = ShardGroup(3, timeout=TIMEOUT, transport=transport)
    known = lengths if given else None
    group.all_reduce(shards(group, lengths), known, size=4)
    pid = group.gather_ints("pid", [os.getpid()], 1)[1][0]
    store, message = _get_default_store(), None
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError):
            group.all_reduce(shards(group, lengths), known, size=4)
    else:
        try:
            message = calls_end_in_an_error(group, lengths, known)
        finally:
            if store.add("told", 1) == 2:
                os.kill(pid, signal.SIGCONT)
    fresh = ShardGroup(3, timeout=30)
    assert fresh.all_reduce(shards(fresh, [4, 4, 4]), [4, 4, 4]).tolist() == [3.0] * 4
    return message


@pytest.mark.parametrize(
    ("lengths", "given", "transport"),
    [
        ([4, 3, 2], True, "all_to_all"),
        ([4, 3, 2], False, "gather"),
        ([4, 0, 2], True, "gather"),
        ([4, 0, 2], True, "all_to_all"),
        ([4, 0, 2], True, "carry"),
    ],
)
def test_a_stopped_process_is_named_and_may_come_back(lengths: list[int], given: bool, transport: str) -> None:
    messages = run_processes(stop, 3, lengths, given, transport)
    for message in (messages[0], messages[2]):
        assert "no word from process 1" in message or "process 1 did not come" in message, messages


def leave(rank: int, world_size: int, how: str, given: bool) -> str | None:
    """Process 1 ends after a call; the others call on, then without it."""
    group = ShardGroup(4, timeout=TIMEOUT)
    lengths = [4, 3, 2, 1]
    known = lengths if given else None
    group.all_reduce(shards(group, lengths), known)
    if rank == 1:
        if how == "raises":
            raise ArithmeticError("of the program, between two calls")
        if how == "exits":
            sys.exit(3)
        return None
    message = calls_end_in_an_error(group, lengths, known)
    rest = dist.new_group([0, 2, 3], use_local_synchronization=True)
    fresh = ShardGroup(4, rest, timeout=30)
    assert fresh.all_reduce(shards(fresh, lengths), lengths).tolist() == [4.0, 3.0, 2.0, 1.0]
    return message


@pytest.mark.parametrize(("how", "given"), [("returns", True), ("returns", False), ("raises", True), ("exits", True)])
def test_a_process_that_ends_early_is_named_and_the_others_go_on_without_it(how: str, given: bool) -> None:
    messages = run_processes(leave, 4, how, given, may_die=(1,))
    for message in (messages[0], *messages[2:]):
        assert "no word from process 1" in message or "connection with process 1 was closed" in message, messages
