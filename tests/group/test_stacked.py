"""Stacked shards (k, S_MAX, *F) mean the same for k = 1, where they may look like one shard of one row."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shardsum import ShardGroup
from tests.processes import run_processes
from tests.values import assert_same


def stacked_shards(rank: int, world_size: int) -> None:
    """(k, S_MAX, *F) means the same for k = 1."""
    group = ShardGroup(world_size)
    lengths, x = [2, 3][:world_size], torch.arange(6.0).view(1, 3, 2) + rank
    want = sum((torch.arange(6.0).view(3, 2) + r) * (torch.arange(3) < n)[:, None] for r, n in enumerate(lengths))
    assert_same(group.all_reduce(x, lengths, size=3), want)
    plan = group.plan("reduce_scatter", lengths, size=3, row_shape=(2,), dtype=torch.float32)
    assert isinstance(plan(x), list) and isinstance(plan(x[0]), torch.Tensor)
    assert_same(plan(x)[0], plan(x[0]))
    assert_same(group.all_reduce(x, torch.tensor(lengths), size=3), want)
    if world_size > 1:  # alone, these are lengths of all ranks
        mine = torch.tensor([lengths[rank]], dtype=torch.int32)
        for given in (x, x[0], [x[0]]):
            assert_same(group.all_reduce(given, mine, size=3), want)
        with pytest.raises(ValueError, match=r"may be one shard of one row, or stacked shards \(1, S_MAX, \*F\)"):
            group.all_reduce(x, mine, size=1)
        assert_same(group.all_reduce([x[0]], mine, size=1), want[:1])
        assert_same(group.all_reduce([x[0, :1]], mine.clamp(max=1), size=1), want[:1])
        compiled = torch.compile(lambda x: group.all_reduce(x, mine, size=3), backend="aot_eager", fullgraph=True)
        assert_same(compiled(x), want)
    compiled = torch.compile(lambda x: group.all_reduce(x, lengths, size=3), backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), want)


def test_stacked_shards_of_one_hosted_rank() -> None:
    stacked_shards(0, 1)
    run_processes(stacked_shards, 2)


def one_row_or_stacked(rank: int, world_size: int) -> None:
    """(1, S_MAX, *F) with a length of 0 or 1 is what the other processes' shards make of it."""
    group = ShardGroup(2, timeout=5)
    x = torch.arange(10.0).view(1, 5, 2)
    for lengths in ([5, 1], [0, 5], [1, 5]):
        want = sum(x[0] * (torch.arange(5) < n)[:, None] for n in lengths)
        for shards in (x, x, [x[0]]):
            assert_same(group.all_reduce(shards, lengths), want)
        assert_same(group.all_reduce(x, lengths, out=torch.empty(5, 2)), want)
    for _ in range(2):
        assert group.all_reduce(torch.ones(1 if rank else 4, 3), [4, 1]).tolist() == [[2.0] * 3, *[[1.0] * 3] * 3]
        assert group.all_reduce(torch.ones(1, 3), [1, 1]).tolist() == [[2.0] * 3]
        assert group.all_reduce(x if rank else [x[0]], [1, 1]).tolist() == [[0.0, 2.0]]
        assert group.all_reduce(torch.ones(1, 3), [1, 1], out=torch.empty(1)).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"trailing shape differs: process 0 has \[7\], process 1 has \[5, 2\]"):
        group.all_reduce(x if rank else torch.ones(4, 7), [4, 1])
    for held in ([(0, 5), (2, 4)], [(0, 5), (2, 3)], [(0, 1), (2, 5)]):
        found = [group.exchange(shards, held, [(0, 3), (1, 5)], size=5) for shards in ([x[0]], x)]
        assert_same(found[1][0], found[0][0])
    exchange = partial(group.exchange, in_intervals=[(0, 1), (0, 1)], out_intervals=[(0, 1), (0, 1)], size=1)
    assert_same(torch.compile(exchange, backend="aot_eager", fullgraph=True)(x[0, :1]), 2 * x[0, :1])


def test_one_row_is_told_from_stacked_shards() -> None:
    run_processes(one_row_or_stacked, 2)


def uneven_hosts(rank: int, world_size: int) -> None:
    group = ShardGroup(3, timeout=5)  # process 0 hosts two ranks, process 1 one
    x = torch.arange(10.0).view(1, 5, 2).repeat(len(group.virtual_ranks), 1, 1)
    for _ in range(2):
        assert group.all_reduce(x, [1, 1, 1]).tolist() == [[0.0, 3.0]]
    with pytest.raises(ValueError, match=r"process 0: shards: one stacked Tensor \(2, S_MAX, \*F\) goes with lengths"):
        group.all_reduce(x)
    assert group.all_reduce(list(x)).shape == (5, 2)


def test_stacked_shards_of_processes_that_host_one_or_two_ranks() -> None:
    run_processes(uneven_hosts, 2)
