"""Parts that every process gets cross to every domain once; the sums that they make up keep their bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.group import routes
from shardsum.transports import domains as named
from shardsum.transports import share
from tests.processes import run_processes
from tests.values import assert_same, random_values

CASES = [["a", "a", "b", "b"], ["a", "b", "b", "c"], ["a", "b", "a", "a"]]


@pytest.mark.parametrize("names", [*CASES, [0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 1]])
def test_a_part_reaches_all_and_every_domain_once(names: list) -> None:
    domains = named.agree(names)
    world = len(names)
    assert share.pays(domains, ring=False) and not share.pays(domains, ring=True)
    has = {(p, p) for p in range(world)}  # (process, part)
    crossed: Counter[tuple[int, int]] = Counter()
    for a in range(world):
        for b in share.first_receivers(domains, a):
            assert (b, a) not in has
            has.add((b, a))
            crossed[a, domains.of[b]] += domains.of[a] != domains.of[b]
    for a in range(world):
        for part in share.passed_on(domains, a):
            for b in domains.members[domains.of[a]]:
                assert b == a or (b, part) not in has
                has.add((b, part))
    assert len(has) == world * world
    assert set(crossed.values()) <= {0, 1} and sum(crossed.values()) == world * (domains.count - 1)
    between = sum(n for a, b, n in share.transfers(domains, 5) if domains.of[a] != domains.of[b])
    assert between == 5 * world * (domains.count - 1)


def sums(rank: int, world: int, names: list, chunk_bytes: int) -> None:
    routes.CHUNK_BYTES = chunk_bytes
    group = ShardGroup(5, transport="all_to_all", domains=names)
    for size, width in ((1, 1), (3, 7), (41, 6)):
        lengths = [size * (r % 3) // 2 for r in range(5)]
        shards = [random_values((n, width), torch.bfloat16, r) for r, n in enumerate(lengths)]
        got = group.all_reduce([shards[v] for v in group.virtual_ranks], lengths, size=size)
        assert_same(got, reference.ragged_sum(shards, [0] * 5, size, out_dtype=torch.bfloat16))
        stats = group.stats()
        assert stats.route.two_shot and stats.sent == stats.route.egress[rank]
        assert stats.received == stats.route.ingress[rank]
    assert stats.route.chunks == (1 if chunk_bytes > 1000 else 5)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 100])
@pytest.mark.parametrize("names", CASES)
def test_the_bits_of_the_definition(names: list, chunk_bytes: int) -> None:
    run_processes(sums, 4, names, chunk_bytes)
