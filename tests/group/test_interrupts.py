"""Interrupts and a store that stops: never a wrong number, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum import ShardGroup
from tests.processes import run_processes

EVERY = 11  # lines, of which one is interrupted; 1 tries all of them


def interrupt_at(line: int) -> Any:
    """A trace function that raises KeyboardInterrupt at one line of the package, counted from now."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if f"{os.sep}shardsum{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    return trace


def interrupted_anywhere(rank: int, world_size: int) -> int:
    """Process 0 is interrupted at some line of a call, and makes its next call."""
    line = 1
    while True:
        group = ShardGroup(2, timeout=6, transport="all_to_all")

        def call(name: str, value: float, group: ShardGroup = group) -> float | None:
            try:
                return group.all_reduce(torch.full((4,), value * (1 + rank)), [4, 4], name=name)[0].item()
            except (RuntimeError, KeyboardInterrupt):
                return None

        for name in ("first", "second"):
            call(name, 1.0)
        if rank == 0:
            sys.settrace(interrupt_at(line))
        first = call("first", 1.0)
        sys.settrace(None)
        assert first in (None, 3.0), (line, first)
        second = call("second", 100.0)
        assert second in (None, 300.0), (line, second)
        interrupted = torch.tensor([first is None])
        dist.broadcast(interrupted, 0)
        if not interrupted.item():
            return line
        line += EVERY


def test_a_call_interrupted_at_any_line_is_never_mixed_with_the_next() -> None:
    lines = run_processes(interrupted_anywhere, 2)
    assert lines[0] == lines[1] > 50, "the call has fewer lines than that"


def store_stops(rank: int, world_size: int, known: bool, sent: int) -> tuple[str, float] | None:
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        host = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        port[0] = host.port
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = host if rank == 0 else dist.TCPStore("127.0.0.1", int(port), world_size, False)
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=30), world_size=world_size, rank=rank)
    group = ShardGroup(3, timeout=3)
    x = torch.ones(4)
    group.all_reduce(x, [4] * 3)
    pid = group.gather_ints("pid", [os.getpid()], 1)[0][0]
    if rank == 0:
        os.kill(os.getpid(), sent)
        time.sleep(60)
    time.sleep(0.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            group.all_reduce(x, [4] * 3, scale=None if known else 0.5)
    took = time.monotonic() - started
    if rank == 1:
        time.sleep(max(0.0, 6 - took))
        with contextlib.suppress(ProcessLookupError):  # it was killed before
            os.kill(pid, signal.SIGKILL)
    return str(caught.value), took


@pytest.mark.parametrize(("known", "sent"), [(True, signal.SIGSTOP), (False, signal.SIGSTOP), (False, signal.SIGKILL)])
def test_a_store_that_is_gone_is_said_to_be(known: bool, sent: int) -> None:
    results = run_processes(store_stops, 3, known, sent, timeout=10, may_die=(0,))
    for message, took in filter(None, results):
        assert took < 5.5, (took, message)
        assert "store" in message and "nothing is known of the other processes" in message, message
