"""Collectives whose accumulators travel between declared domains: the bits of one process, gradients, errors."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise

import pytest
import torch

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.core.layout import ExchangePlan
from shardsum.group.routes import Router
from shardsum.group.terms import Reduce
from shardsum.transports import domains as fast_links
from shardsum.transports.costs import Costs
from tests.carried import random_exchanges, sum_of_everything
from tests.processes import run_processes
from tests.values import random_values

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32]


def one(group: ShardGroup, seed: int, requires_grad: bool) -> tuple[ShardGroup, list[torch.Tensor]]:
    """What a problem's calls give on the virtual ranks of a group: results and gradients, by virtual rank."""
    rng, ranks = random.Random(seed), group.num_virtual_ranks
    dtype, size = rng.choice(DTYPES[:4] if requires_grad else DTYPES), rng.choice([9, 40])
    lengths = [rng.choice([0, size, rng.randint(0, size)]) for _ in range(ranks)]
    op, scale = (rng.choice(["sum", "mean"]), rng.choice([None, 0.3])) if dtype.is_floating_point else ("sum", None)
    bounds = sorted([0, *(rng.randint(0, size) for _ in range(ranks - 1)), size])
    windows = [(b, max(b, rng.randint(0, size))) for b in (rng.randint(0, size) for _ in range(ranks))]
    shards = [random_values((n, 3), dtype, seed + r) for r, n in enumerate(lengths)]
    mine = [shards[v].clone().requires_grad_(requires_grad) for v in group.virtual_ranks]
    common = dict(size=size, op=op, scale=scale)
    outs = [
        group.all_reduce(mine, lengths, grad="sum" if group.world_size == ranks else "identity", **common),
        *group.reduce_scatter(mine, lengths, splits=[b - a for a, b in pairwise(bounds)], **common),
        *group.exchange(mine, [(0, n) for n in lengths], windows, **common),
    ]
    hosted = len(mine)
    by_rank = [outs[0], *outs[1 : 1 + hosted], *outs[1 + hosted :]]
    if requires_grad:
        cotangents = [random_values(tuple(y.shape), y.dtype, seed) for y in outs[1:]]
        torch.autograd.backward(outs[1:], cotangents)
        by_rank += [x.grad for x in mine]
    return [y.detach() for y in by_rank]


def several(rank: int, world: int, domains: list, ranks: int, placement: str, seeds: list[int]) -> list[list]:
    group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement)
    results = []
    for seed in seeds:
        results.append([group.virtual_ranks, one(group, seed, seed % 2 == 0)])
        route = group.stats().route
        assert group.stats().sent == route.egress[rank] and group.stats().received == route.ingress[rank]
    return results


@pytest.mark.parametrize(
    ("domains", "ranks", "placement"),
    [
        (["a", "b"], 5, "contiguous"), (["a", "a", "b"], 8, "zigzag"), ([0, 0, 1, 1], 16, "contiguous"),
        ([0, 1, 0, 2], 9, "zigzag"),
    ],
)  # fmt: skip
def test_the_bits_of_one_process(domains: list, ranks: int, placement: str) -> None:
    seeds = list(range(8))
    alone = ShardGroup(ranks)
    found = run_processes(several, len(domains), domains, ranks, placement, seeds)
    for i, seed in enumerate(seeds):
        want = one(alone, seed, seed % 2 == 0)
        for hosted, got in (process[i] for process in found):
            kinds = len(got[1:]) // len(hosted)
            expected = [want[0], *(want[1 + k * ranks + v] for k in range(kinds) for v in hosted)]
            for a, b in zip(got, expected, strict=True):
                assert bits.equal(a, b), (seed, domains, bits.first_difference(a, b))


def described(rank: int, world: int) -> list[str]:
    default = ShardGroup(8)
    hosts = ShardGroup(8, domains=["left", "left", "right", "right"], transport="carry")
    texts = [repr(default), repr(hosts), str(hosts.explain([400] * 8, row_shape=(64,), dtype=torch.bfloat16))]
    texts.append(str(hosts.explain([3] * 8, collective="all_gather")))
    hosts.all_reduce(torch.ones(2, 3, 4), torch.tensor([3, 1]), size=3)  # lengths on the device
    texts.append(hosts.stats().route.reason)
    with pytest.raises(ValueError, match="domains differs"):
        ShardGroup(8, domains=[rank, 1, 1, 1])
    return texts


def test_domains_and_bytes_are_explained() -> None:
    texts = run_processes(described, 4)
    assert all(t[2:] == texts[0][2:] for t in texts)
    default, hosts, summed, moved, device = texts[0]
    assert "domains" not in default and "domains=[0, 0, 1, 1]" in hosts
    assert "all_reduce by carry (2 runs" in summed and "2 domains: left [0-1], right [2-3]" in summed
    assert f"between them {400 * 64 * (4 + 2)}" in summed, summed
    assert "what is moved has no sums" in moved
    assert 'transport="carry" needs lengths that the host knows' in device


@pytest.mark.parametrize("transport", ["auto", "carry"])
@pytest.mark.parametrize(("owners", "over_domains"), [([0] * 16 + [1] * 16, False), ([0, 1] * 16, True)])
def test_folds_over_peer_memory_are_named_where_there_are_any(
    transport: str, owners: list[int], over_domains: bool
) -> None:
    """Two hosts, one of two processes. Where each of these holds one run of ranks, accumulators go from the one to the
    other, and nothing is folded over peer memory."""
    ranks, size, where = 48, 1 << 20, fast_links.agree(["a", "a", "b"])
    plan = ExchangePlan(((0, size),) * ranks, (*owners, *[2] * 16), ((0, size),) * 3, (0, 1, 2), 3)
    costs = {"cuda": Costs(9.0, 230.0, 4000.0, 9.0, 1.0, launch_us=1.3)}
    of_sum = (plan, 8, torch.bfloat16, Reduce("sum", None, torch.bfloat16), "cuda")
    route = Router(where, transport, costs, inside=True).route(*of_sum)
    assert route.carry is not None and (route.carry.domains == where.of) == over_domains
    assert ("over peer memory" in route.reason) == over_domains, route.reason
    text = Router(where, transport, costs, not_inside="process 1: no driver").route(*of_sum).reason
    assert "over peer memory" not in text and text.endswith("; no peer memory inside domains: process 1: no driver")


def stall(rank: int, world: int, dies: bool) -> str | None:
    group = ShardGroup(8, transport="carry", domains=[0, 1, 2, 3], timeout=2)
    x = [torch.ones(4000, 8) for _ in group.virtual_ranks]
    group.all_reduce(x, [4000] * 8)
    if rank == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            group.all_reduce(x, [4000] * 8)
    assert time.monotonic() - started < 6
    return str(caught.value)


@pytest.mark.parametrize("dies", [False, True])
def test_a_host_that_is_lost_amid_a_chain_is_named_on_all_others(dies: bool) -> None:
    messages = run_processes(stall, 4, dies, may_die=(1,) if dies else ())
    for message in (messages[0], *messages[2:]):
        assert "no word from process 1:" in message, messages


def defined(rank: int, world: int, domains: list, ranks: int, placement: str) -> None:
    group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement)
    for seed, dtype in enumerate(DTYPES):
        sum_of_everything(group, dtype, 40, (3,), 100 * seed)
    random_exchanges(group, 6, ranks)


@pytest.mark.parametrize(("ranks", "placement"), [(4, "zigzag"), (16, "contiguous")])
def test_all_collectives_and_gradients_of_two_processes(ranks: int, placement: str) -> None:
    run_processes(defined, 2, ["a", "b"], ranks, placement)
