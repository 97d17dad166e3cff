"""Random programs of several processes: groups with other virtual ranks, placements and transports over the same
processes, calls of every collective, up to four of them under way and waited for in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardsum import ShardGroup

from . import oracle
from .local import arguments, random_finish
from .numbers import KINDS, Array, Kind, difference, random, to_torch

TRANSPORTS = ["auto", "gather", "all_to_all", "carry"]
TRAILING = [(), (1,), (3,), (2, 5), (40,)]
MOST_OPEN = 4


@dataclass
class Call:
    """What a call returned, or its handle, and what this process must find in it."""

    name: str
    result: Any
    is_open: bool
    expected: list[Array]
    kind: Kind
    any_nan: bool = True

    def check(self) -> None:
        results = self.result.wait() if self.is_open else self.result
        results = results if isinstance(results, list) else [results]
        assert len(results) == len(self.expected), f"{self.name}: {len(results)} results"
        for actual, expected in zip(results, self.expected):
            wrong = difference(actual, expected, self.kind, self.any_nan)
            assert wrong is None, f"{self.name}: {wrong}"


def program(rank: int, world_size: int, seed: int, calls: int) -> int:
    """Run a seed's program on every process. Which calls there are, and all the shards, come from the seed alone.

    Raises:
        AssertionError: a result has other bits than the oracle's.
    """
    rng = np.random.default_rng([seed, world_size])
    groups = [_random_group(rng, world_size) for _ in range(3)]
    open_calls: list[Call] = []
    for number in range(calls):
        group = groups[rng.integers(len(groups))]
        make = COLLECTIVES[rng.integers(len(COLLECTIVES))]
        call = make(rng, group, bool(rng.random() < 0.5))
        call.name = f"call {number} ({call.name}, R = {group.num_virtual_ranks}, owners {list(group.owners)})"
        if call.is_open:
            open_calls.append(call)
        else:
            call.check()
        while open_calls and (len(open_calls) > MOST_OPEN or rng.random() < 0.4):
            open_calls.pop(rng.integers(len(open_calls))).check()
    for call in open_calls:
        call.check()
    return calls


def _random_group(rng: np.random.Generator, world_size: int) -> ShardGroup:
    ranks = int(rng.integers(world_size, 3 * world_size + 1))
    owners = [*range(world_size), *(int(p) for p in rng.integers(0, world_size, ranks - world_size))]
    rng.shuffle(owners)
    placement = ["contiguous", "zigzag", owners][rng.integers(3)]
    if placement == "zigzag" and ranks < 2 * world_size - 1:
        placement = "contiguous"  # zigzag hands nothing to the first processes before all had one
    return ShardGroup(
        ranks,
        placement=placement,
        transport=TRANSPORTS[rng.integers(len(TRANSPORTS))],
        check=["first", "always"][rng.integers(2)],
    )


@dataclass
class Shards:
    """Those of all virtual ranks, and the hosted ones as a call takes them."""

    kind: Kind
    lengths: list[int]
    all: list[Array]
    hosted: list[torch.Tensor]
    trailing: tuple[int, ...]


def _random_shards(rng: np.random.Generator, group: ShardGroup, kinds: list[str]) -> Shards:
    kind, trailing = KINDS[rng.choice(kinds)], TRAILING[rng.integers(len(TRAILING))]
    most = 2000 if rng.random() < 0.05 else 12
    lengths = [int(n) for n in rng.integers(0, most + 1, group.num_virtual_ranks)]
    shards = [random(rng, (n, *trailing), kind) for n in lengths]
    return Shards(kind, lengths, shards, [to_torch(shards[v], kind) for v in group.virtual_ranks], trailing)


def _lengths(rng: np.random.Generator, lengths: list[int]) -> list[int] | None:
    return None if rng.random() < 0.3 else lengths


def _all_reduce(rng: np.random.Generator, group: ShardGroup, is_open: bool) -> Call:
    s = _random_shards(rng, group, list(KINDS))
    finish, size = random_finish(rng, s.kind), max(s.lengths) + int(rng.integers(0, 3))
    y = group.all_reduce(s.hosted, _lengths(rng, s.lengths), size=size, async_op=is_open, **arguments(finish))
    total = oracle.ragged_sum(s.all, [0] * len(s.all), (size, *s.trailing), s.kind, finish)
    return Call("all_reduce", y, is_open, [total], finish.out)


def _reduce_scatter(rng: np.random.Generator, group: ShardGroup, is_open: bool) -> Call:
    s = _random_shards(rng, group, list(KINDS))
    finish, size = random_finish(rng, s.kind), max(s.lengths)
    borders = np.sort(rng.integers(0, size + 1, len(s.all) - 1))
    splits = [int(n) for n in np.diff([0, *borders, size])]
    y = group.reduce_scatter(
        s.hosted, _lengths(rng, s.lengths), size=size, splits=splits, async_op=is_open, **arguments(finish)
    )
    total = oracle.ragged_sum(s.all, [0] * len(s.all), (size, *s.trailing), s.kind, finish)
    parts = np.split(total, np.cumsum(splits)[:-1])
    return Call("reduce_scatter", y, is_open, [parts[v] for v in group.virtual_ranks], finish.out)


def _all_gather(rng: np.random.Generator, group: ShardGroup, is_open: bool) -> Call:
    s = _random_shards(rng, group, list(KINDS))
    y = group.all_gather(s.hosted, _lengths(rng, s.lengths), async_op=is_open)
    return Call("all_gather", y, is_open, [np.concatenate(s.all)], s.kind, any_nan=False)


def _exchange(rng: np.random.Generator, group: ShardGroup, is_open: bool) -> Call:
    s = _random_shards(rng, group, list(KINDS))
    finish, size = random_finish(rng, s.kind), max(s.lengths) + int(rng.integers(0, 6))
    begins = [int(rng.integers(0, size - n + 1)) for n in s.lengths]
    held = [(b, b + n) for b, n in zip(begins, s.lengths)]
    wanted = [tuple(map(int, np.sort(rng.integers(0, size + 1, 2)))) for _ in s.all]
    needs_grad = s.kind.is_float and not is_open and rng.random() < 0.5
    for shard in s.hosted:
        shard.requires_grad_(needs_grad)
    y = group.exchange(s.hosted, held, wanted, size=size, async_op=is_open, **arguments(finish))
    total = oracle.ragged_sum(s.all, begins, (size, *s.trailing), s.kind, finish)
    call = Call("exchange", y, is_open, [total[slice(*wanted[v])] for v in group.virtual_ranks], finish.out)
    if not needs_grad:
        return call
    call.check()
    cotangents = [random(rng, (e - b, *s.trailing), finish.out) for b, e in wanted]
    torch.autograd.backward(y, [to_torch(cotangents[v], finish.out) for v in group.virtual_ranks])
    counts = oracle.counts_of(s.lengths, begins, size)
    whole = oracle.gradient(cotangents, [b for b, _ in wanted], counts, (size, *s.trailing), s.kind, finish)
    expected = [whole[slice(*held[v])] for v in group.virtual_ranks]
    return Call("backward of exchange", [shard.grad for shard in s.hosted], False, expected, s.kind)


COLLECTIVES: list[Callable[[np.random.Generator, ShardGroup, bool], Call]] = [
    _all_reduce, _reduce_scatter, _all_gather, _exchange,
]  # fmt: skip
