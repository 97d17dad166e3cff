"""Calls and training steps leave nothing behind: memory, Python objects, file descriptors, threads.

Short by default; SHARDSUM_LONG_TESTS=1 makes 20,000 calls of every kind and 1,000 training steps (an hour).
With ``-s`` a line "figure: ..." a kind tells what it has left.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardsum import ShardGroup, context_parallel_attention
from shardsum.core.layout import split_evenly
from shardsum.tools.train import loop, run
from shardsum.tools.train.metrics import METRICS
from shardsum.tools.train.step import Step
from tests.processes import run_processes
from tests.tools.runs import copy_text, tiny

LONG = bool(os.environ.get("SHARDSUM_LONG_TESTS"))
CALLS, STEPS, GROUPS = (20_000, 1_000, 300) if LONG else (40, 40, 20)
#: What caches and the allocator may still take after the first calls. The long test finds a leak of 200 bytes a call,
#: the short one a Python object a call. (Its pages come and go with what else the machine does.)
MEMORY, OBJECTS = (4 << 20) if LONG else (16 << 20), 30


def usage() -> dict[str, int]:
    gc.collect()  # after gc.freeze(), of what the test has made alone
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
    }


def growth(do: Callable[[], object], times: int) -> dict[str, int]:
    """What ``times`` more calls take, after as many (at most 30, in a long test 1,000) have filled what is kept."""
    gc.freeze()
    for _ in range(min(1000 if LONG else 30, times)):
        do()
    before = usage()
    for _ in range(times):
        do()
    after, deadline = usage(), time.monotonic() + 5
    while after["threads"] > before["threads"] and time.monotonic() < deadline:  # one may be about to end
        time.sleep(0.05)
        after = usage()
    return {name: after[name] - before[name] for name in before}


def assert_nothing_left(grown: dict[str, int], what: str, memory: int = MEMORY) -> None:
    allowed = {"memory": memory, "objects": OBJECTS}
    left = {name: n for name, n in grown.items() if n > allowed.get(name, 0)}
    assert not left, f"{what}: {left}"


def figure(what: str, grown: list[tuple[str, dict[str, int]]]) -> None:
    """Print the most that any kind has left of anything."""
    most = {name: max(grown, key=lambda kind: kind[1][name]) for name in grown[0][1]}
    left = ", ".join(f"{grew[name]:,} {name} ({kind})" for name, (kind, grew) in most.items() if grew[name] > 0)
    print(f"\nfigure: {what}: at most {left or 'nothing'} left")


def kinds(group: ShardGroup) -> dict[str, Callable[[], object]]:
    """Every kind of call, on shards of this process."""
    ranks, size = group.num_virtual_ranks, 12
    lengths = [5, 12, 0, 7][:ranks]
    shards = [torch.randn(lengths[v], 8) for v in group.virtual_ranks]
    leaves = [s.clone().requires_grad_() for s in shards]
    parts = split_evenly(size, ranks)
    held = [(0, n) for n in lengths]
    wanted = [(v, size - v) for v in range(ranks)]
    plan = group.plan("all_reduce", lengths, size=size, row_shape=(8,))
    out = torch.empty(size, 8)
    module = torch.nn.Linear(8, 4)
    replicas = group.replicas(module)
    chunks = split_evenly(20, ranks)
    qkv = [[torch.randn(chunks[v], 2, 8, requires_grad=True) for v in group.virtual_ranks] for _ in range(3)]

    def step() -> None:
        for replica, shard in zip(replicas, shards):
            replica(shard).sum().backward()
        group.reduce_gradients(replicas)

    def refused() -> None:
        with pytest.raises(ValueError):
            group.all_reduce(shards, lengths, size=size, op="avg")

    return {
        "all_reduce": lambda: group.all_reduce(shards, lengths, size=size),
        "all_reduce, lengths unknown": lambda: group.all_reduce(shards, size=size),
        "all_reduce, async": lambda: group.all_reduce(shards, lengths, size=size, async_op=True).wait(),
        "all_reduce, backward": lambda: group.all_reduce(leaves, lengths, size=size).sum().backward(),
        "a plan with out=": lambda: plan(shards, out=out),
        "a plan's handle": lambda: plan.start(shards).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(shards, lengths, size=size, splits=parts),
        "reduce_scatter, backward": lambda: sum(y.sum() for y in group.reduce_scatter(leaves, lengths)).backward(),  # type: ignore[union-attr]
        "all_gather": lambda: group.all_gather(shards, lengths),
        "all_gather, backward": lambda: group.all_gather(leaves, lengths).sum().backward(),
        "exchange": lambda: group.exchange(shards, held, wanted, size=size, op="mean"),
        "exchange, backward": lambda: sum(y.sum() for y in group.exchange(leaves, held, wanted, size=size)).backward(),  # type: ignore[union-attr]
        "token_mean": lambda: group.token_mean([s.sum() for s in shards], [s.shape[0] for s in shards]),
        "reduce_gradients": step,
        "attention": lambda: sum(y.sum() for y in context_parallel_attention(*qkv, group, lengths=chunks)).backward(),  # type: ignore[union-attr]
        "a refused call": refused,
    }


#: What takes the same way whatever the transport: tried with one of them.
ANY_TRANSPORT = {"token_mean", "reduce_gradients", "attention", "a refused call"}


def _calls(rank: int, world_size: int, transport: str) -> list[tuple[str, dict[str, int]]]:
    group = ShardGroup(4, transport=transport)
    skipped = ANY_TRANSPORT if transport in ("all_to_all", "carry") else set()
    return [(name, growth(do, CALLS)) for name, do in kinds(group).items() if name not in skipped]


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize(("world_size", "transport"), [(1, "local"), (2, "gather"), (2, "all_to_all"), (2, "carry")])
def test_calls_leave_nothing(world_size: int, transport: str) -> None:
    torch.set_num_threads(1)
    for results in run_processes(_calls, world_size, transport, timeout=7000 if LONG else 120):
        figure(f"{len(results)} kinds of calls, {CALLS:,} each, {transport}", results)
        for name, grown in results:
            assert_nothing_left(grown, f"{transport}, {name}")


def _torch_group() -> None:
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


def _groups(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    def dropped() -> None:
        group = ShardGroup(4)
        group.all_reduce([torch.ones(3) for _ in group.virtual_ranks], [3] * 4)
        group.all_gather([torch.ones(3, requires_grad=True) for _ in group.virtual_ranks], [3] * 4).sum().backward()

    def closed() -> None:
        with ShardGroup(4) as group:
            group.all_reduce([torch.ones(3) for _ in group.virtual_ranks], [3] * 4)

    kinds = {"torch's new_group and destroy_process_group": _torch_group, "dropped": dropped, "closed": closed}
    return {name: growth(do, GROUPS) for name, do in kinds.items()}


@pytest.mark.timeout(1800 if LONG else 300)
def test_groups_leave_what_those_of_torch_do() -> None:
    """A group of torch's leaves the addresses of its processes in the store, and pieces of memory between."""
    for grown in run_processes(_groups, 2, timeout=900 if LONG else 120):
        figure(f"{GROUPS} groups of each kind", list(grown.items()))
        of_torch = grown.pop("torch's new_group and destroy_process_group")["memory"]
        for name, left in grown.items():
            print(f"figure: {name}: {left['memory'] // GROUPS:,} bytes a group, torch's own {of_torch // GROUPS:,}")
            allowed = max(of_torch, 0) + (4 << 10) * GROUPS if LONG else MEMORY
            assert_nothing_left(left, f"groups, {name}", allowed)


def _dropped_at_once(rank: int, world_size: int) -> None:
    gc.collect()
    gc.disable()
    group = ShardGroup(4)
    shards = [torch.ones(3, requires_grad=True) for _ in group.virtual_ranks]
    group.all_gather(shards, [3] * 4).sum().backward()
    plan = group.plan("all_reduce", [3] * 4)
    wire = weakref.ref(group.wire)
    dist.barrier()
    del group
    assert wire() is not None and plan(shards).tolist() == [4.0] * 3  # a plan keeps what it needs
    del plan
    assert wire() is None


def test_a_dropped_group_gives_its_connections_back_without_the_collector() -> None:
    run_processes(_dropped_at_once, 2)


def _steps(rank: int, world_size: int, text: str, folder: str) -> dict[str, int]:
    honest, seen = Step.__call__, []

    def step(self: Step, batches: list) -> object:
        if len(seen) in (STEPS // 2, STEPS - 1):
            counts.append(usage())
        seen.append(1)
        return honest(self, batches)

    counts: list[dict[str, int]] = []
    batch = loop.Run._batch
    loop.Run._batch = lambda self, micro_step: batch(self, micro_step % 8)  # type: ignore[method-assign]  # known plans
    Step.__call__ = step  # type: ignore[method-assign,assignment]
    loop.draw_run = lambda **_: b""
    loop.Reporter.step = lambda self, metrics: self.write(METRICS, metrics)  # type: ignore[method-assign]  # no progress bar
    run(tiny(text, Path(folder), steps=STEPS, save_every=5))
    return {name: counts[1][name] - counts[0][name] for name in counts[0]}


@pytest.mark.timeout(3600 if LONG else 300)
def test_training_steps_and_checkpoints_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = copy_text(tmp_path / "text")
    for world_size in (1, 2):
        folder = str(tmp_path / f"run-{world_size}")
        for grown in run_processes(_steps, world_size, text, folder, timeout=3400 if LONG else 120):
            figure(f"{STEPS // 2} steps on {world_size} processes", [("steps", grown)])
            assert_nothing_left(grown, f"training on {world_size}")
