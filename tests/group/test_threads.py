"""Several groups of one process at once, each driven by a thread of its own; shapes change from call to call."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardsum
from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.group import exchanges
from shardsum.group.busy import Busy
from shardsum.group.side_channel import SideChannel
from shardsum.transports import opened, watch
from tests.processes import run_processes
from tests.values import assert_same, random_values

CALLS = 40


def drive(group: ShardGroup, thread: int) -> int:
    """Calls of all four collectives whose results only this thread's seeds give; each is right, bit for bit."""
    ranks = group.num_virtual_ranks
    for number in range(CALLS):
        lengths = [(3 * v + number + thread) % 7 for v in range(ranks)]
        shards = [random_values((n, 2 + thread), torch.float32, 100 * number + v) for v, n in enumerate(lengths)]
        mine, size = [shards[v] for v in group.virtual_ranks], max(lengths)
        form = lengths if number % 2 else None
        total = reference.ragged_sum(shards, [0] * ranks, size, op="sum", scale=None, out_dtype=torch.float32)
        handle = group.all_reduce(mine, form, async_op=number % 3 == 0)
        assert_same(handle.wait() if number % 3 == 0 else handle, total)
        assert_same(group.all_gather(mine, form), torch.cat(shards))
        whole = [(0, size)] * ranks
        for part in group.exchange(mine, [(0, n) for n in lengths], whole, size=size):
            assert_same(part, total)
    return CALLS


def at_once(jobs: list[Callable[[], Any]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result(100)


def in_processes(rank: int, world_size: int, transports: tuple[str, ...]) -> None:
    groups = [ShardGroup(5, dist.new_group(), transport=t) for t in transports]
    at_once([lambda g=g, i=i: drive(g, i) for i, g in enumerate(groups)])


@pytest.mark.parametrize("transports", [("gather", "all_to_all"), ("auto", "auto", "all_to_all")])
def test_groups_of_other_process_groups_are_called_from_threads(transports: tuple[str, ...]) -> None:
    run_processes(in_processes, 2, transports)


def an_open_call(rank: int, world_size: int) -> None:
    """Two threads complete one call: that of its handle, or of the next call of its group, and one of another group."""
    groups = [ShardGroup(2, dist.new_group(), transport="all_to_all") for _ in range(2)]
    for group in groups:
        group.all_reduce(torch.ones(4), [4, 4])
    meet = threading.Barrier(2)

    def slowly(*args: Any) -> None:
        if not meet.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(1)  # the other thread comes while this one is at it
        time.sleep(0.2)
        fill(*args)

    fill, exchanges.fill = exchanges.fill, slowly
    for finish in ("wait", "call"):
        meet.reset()
        handle = groups[0].all_reduce(torch.full((4,), 1.0 + rank), [4, 4], async_op=True)

        def go_on(finish: str = finish, handle: Any = handle) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(1)
            if finish == "call":
                assert groups[0].all_reduce(torch.full((4,), 3.0), [4, 4]).tolist() == [6.0] * 4
            assert handle.wait().tolist() == [3.0] * 4

        def elsewhere() -> None:
            assert groups[1].all_reduce(torch.full((4,), 5.0), [4, 4]).tolist() == [10.0] * 4

        at_once([go_on, elsewhere])


def test_two_threads_complete_one_call() -> None:
    run_processes(an_open_call, 2)


def opened_in_another_order(rank: int, world_size: int, transport: Any) -> None:
    """Calls of two groups are open at once, left so in one order by process 0 and in the other by process 1."""
    groups = [ShardGroup(4, dist.new_group(), transport=transport) for _ in range(2)]
    both, first = threading.Barrier(2), threading.Event()

    def leave(group: Any, finish: Any) -> None:
        both.wait(10)  # none was open when these began
        if group is groups[rank].wire.group:
            leave_open(group, finish)
            first.set()
        else:
            first.wait(10)
            leave_open(group, finish)

    def call(group: ShardGroup) -> Any:
        return group.all_reduce([torch.ones(4)] * 2, [4] * 4, async_op=True)

    leave_open, opened.leave = opened.leave, leave
    with ThreadPoolExecutor(2) as pool:
        handles = list(pool.map(call, groups))
    opened.leave = leave_open
    in_order = threading.Thread(target=lambda: [handles[rank ^ i].wait() for i in range(2)])
    in_order.start()
    in_order.join(15)
    assert not in_order.is_alive()
    assert [h.wait().tolist() for h in handles] == [[4.0] * 4] * 2


@pytest.mark.parametrize("transport", ["all_to_all", "carry"])
def test_open_calls_of_two_threads_do_not_wait_for_each_other(transport: str) -> None:
    run_processes(opened_in_another_order, 2, transport, timeout=10)


def waits_across(rank: int, world_size: int) -> None:
    """Each process waits for the other one in one thread, until that one's other thread comes: no circle."""
    watch.TICK_S = 0.02
    groups = [ShardGroup(2, dist.new_group(), transport="all_to_all") for _ in range(2)]

    def call(i: int) -> None:
        if i != rank:
            time.sleep(1)  # by then each process has looked several times
        assert groups[i].all_reduce(torch.ones(4), [4, 4]).tolist() == [2.0] * 4

    at_once([lambda i=i: call(i) for i in range(2)])


def test_a_wait_of_one_thread_is_not_taken_for_one_of_the_whole_process() -> None:
    run_processes(waits_across, 2)


def test_two_threads_never_hold_a_group_at_once() -> None:
    held, errors, end = [0], [], time.monotonic() + 1
    together = threading.Event()  # in place of a process group

    def come_and_go() -> None:
        busy = Busy(together, errors.append)
        while time.monotonic() < end:
            try:
                busy.__enter__()
            except RuntimeError as error:
                assert "in use by another thread" in str(error)
                continue
            held[0] += 1
            if held[0] != 1:
                errors.append(RuntimeError(f"{held[0]} hold it"))
            held[0] -= 1
            busy.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        at_once([come_and_go] * 3)
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def constructed_at_once(rank: int, world_size: int) -> None:
    """Two threads construct groups over two process groups of the same processes: they come, and connect, in other
    orders."""
    process_groups, here, connect = [dist.new_group() for _ in range(2)], threading.local(), SideChannel.connect

    def wait() -> None:
        if here.i != rank:
            time.sleep(0.3)

    def connect_in_turn(*args: Any) -> None:
        wait()
        connect(*args)

    SideChannel.connect = connect_in_turn  # type: ignore[method-assign]

    def construct(i: int) -> None:
        here.i = i
        wait()
        group = ShardGroup(2 + i, process_groups[i], timeout=5)
        total = group.all_reduce([torch.ones(4)] * len(group.virtual_ranks), [4] * (2 + i))
        assert total.tolist() == [2.0 + i] * 4

    at_once([lambda i=i: construct(i) for i in range(2)])


def test_groups_are_constructed_from_threads() -> None:
    run_processes(constructed_at_once, 2)


def test_groups_of_a_lone_process_are_called_from_threads() -> None:
    at_once([lambda i=i: drive(ShardGroup(4), i) for i in range(4)])


def test_local_sums_are_called_from_threads() -> None:
    def sums(thread: int) -> None:
        for number in range(200):
            x = random_values((4, 9, 1 + thread), torch.bfloat16, number)
            lengths = [(number + thread + r) % 10 for r in range(4)]
            rows = [x[r, :n] for r, n in enumerate(lengths)]
            want = reference.ragged_sum(rows, [0] * 4, 9, op="sum", scale=None, out_dtype=torch.bfloat16)
            assert_same(shardsum.ragged_sum(x, lengths), want)

    at_once([lambda i=i: sums(i) for i in range(4)])
