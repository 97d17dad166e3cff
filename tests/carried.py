"""Calls whose accumulators travel, each compared with the definition bit for bit, on the device of the group."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import torch

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import Interval, intervals_of, length, split_evenly
from tests.values import assert_same, random_values

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)


def placed(group: ShardGroup, shards: list[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
    """The shards that this process hosts, on the group's device."""
    return [shards[v].to(group.device, copy=True).requires_grad_(requires_grad) for v in group.virtual_ranks]


def cotangents(count: int, like: torch.Tensor, seed: int) -> list[torch.Tensor]:
    return [random_values(tuple(like.shape), like.dtype, 7 * seed + i) for i in range(count)]


def sum_of_everything(group: ShardGroup, dtype: torch.dtype, size: int, row: tuple[int, ...], seed: int) -> None:
    """all_reduce with both gradients, reduce_scatter, all_gather, exchange and token_mean, with their gradients."""
    pick, ranks, floats = random.Random(seed), group.num_virtual_ranks, dtype.is_floating_point
    lengths = [pick.choice([size, size, size * r // ranks, 0]) for r in range(ranks - 1)] + [size]
    sources: list[Interval] = [(0, n) for n in lengths]
    bounds = sorted([0, *(pick.randint(0, size) for _ in range(ranks - 1)), size])
    parts = list(pairwise(bounds))
    windows = [(b, pick.randint(b, size)) for b in (pick.randint(0, size) for _ in range(ranks))]
    shards = [random_values((n, *row), dtype, seed + r) for r, n in enumerate(lengths)]
    op, scale = (pick.choice(["sum", "mean"]), pick.choice([None, 0.3])) if floats else ("sum", None)
    common: dict[str, Any] = dict(size=size, op=op, scale=scale)
    out_dtype = dtype if floats else torch.int64

    def sums(sinks: list[Interval]) -> list[torch.Tensor]:
        return reference.exchange(shards, sources, sinks, op=op, scale=scale, out_dtype=out_dtype)

    mine = placed(group, shards, floats)
    (want,) = sums([(0, size)])
    uses = cotangents(group.world_size, want, seed) if floats else []
    for grad in ("identity", "sum"):
        total = group.all_reduce(mine, lengths, grad=grad, **common)
        assert group.stats().route.carry is not None
        assert_same(total.detach(), want)
        if floats and grad == "identity":
            adjoint = reference.ragged_sum_adjoint(uses[0], [0] * ranks, lengths, op=op, scale=scale, dtype=dtype)
            check_gradients(group, mine, [total], uses[:1], adjoint)
        elif floats:
            everywhere = [(0, size)] * len(uses)
            adjoint = reference.exchange_adjoint(uses, sources, everywhere, op=op, scale=scale, dtype=dtype)
            check_gradients(group, mine, [total], [uses[group.rank]], adjoint)
    for sinks, call in (
        (parts, lambda: group.reduce_scatter(mine, lengths, splits=[length(i) for i in parts], **common)),
        (windows, lambda: group.exchange(mine, sources, windows, **common)),
    ):
        wanted, got = sums(sinks), call()
        assert group.stats().route.carry is not None
        for v, y in zip(group.virtual_ranks, got, strict=True):
            assert_same(y.detach(), wanted[v])
        if floats:
            uses = [random_values(tuple(y.shape), y.dtype, 7 * seed + q) for q, y in enumerate(wanted)]
            adjoint = reference.exchange_adjoint(uses, sources, sinks, op=op, scale=scale, dtype=dtype)
            check_gradients(group, mine, got, [uses[v] for v in group.virtual_ranks], adjoint)
    # The gradient of a movement is a sum.
    whole = group.all_gather(mine, lengths)
    assert_same(whole.detach(), torch.cat(shards))
    if floats:
        uses = cotangents(group.world_size, torch.cat(shards), seed)
        held = list(pairwise([0, *accumulate(lengths)]))
        adjoint = reference.exchange(uses, [(0, sum(lengths))] * len(uses), held, out_dtype=dtype)
        check_gradients(group, mine, [whole], [uses[group.rank]], adjoint)
    if dtype == torch.float32:
        losses = [torch.tensor(1.0 + v, device=group.device, requires_grad=True) for v in group.virtual_ranks]
        mean, count = group.token_mean(losses, list(group.virtual_ranks))
        valid = sum(range(ranks))
        assert_same(mean.detach(), torch.tensor(float(sum(1 + v for v in range(1, ranks)))) / valid)
        assert count.item() == valid
        mean.backward()
        for v, x in zip(group.virtual_ranks, losses):
            assert_same(x.grad, torch.tensor(1.0 / valid if v else 0.0))


def check_gradients(
    group: ShardGroup, mine: list[torch.Tensor], outs: list[torch.Tensor], uses: list[torch.Tensor],
    adjoint: list[torch.Tensor],
) -> None:  # fmt: skip
    gradients = torch.autograd.grad(outs, mine, [g.to(group.device) for g in uses])
    for v, gradient in zip(group.virtual_ranks, gradients, strict=True):
        assert_same(gradient, adjoint[v])


def random_exchanges(group: ShardGroup, calls: int, seed: int) -> int:
    """Random intervals, dtypes and widths; sums and means; every third with its gradient. How many were carried from
    domain to domain, not from process to process."""
    pick, ranks, by_domain = random.Random(seed), group.num_virtual_ranks, 0
    for call in range(calls):
        dtype = pick.choice(DTYPES)
        floats = dtype.is_floating_point
        size, width = pick.choice([(1, 3), (40, 8), (300, 5), (5000, 16), (60000, 8)])
        op = pick.choice(["sum", "mean"]) if floats else "sum"
        scale = pick.choice([None, 0.3]) if floats else None
        out_dtype = pick.choice([dtype, torch.float32]) if floats and dtype != torch.float64 else None

        def interval(size: int = size) -> Interval:
            a, b = sorted(pick.randrange(size + 1) for _ in range(2))
            return pick.choice([(a, b), (0, b), (0, size), (0, size)])

        sources, sinks = [interval() for _ in range(ranks)], [interval() for _ in range(ranks)]
        if pick.random() < 0.5:
            sinks = intervals_of(split_evenly(size, ranks))
        shards = [random_values((length(i), width), dtype, 100 * call + r) for r, i in enumerate(sources)]
        mine = placed(group, shards, floats and call % 3 == 0)
        wanted = reference.exchange(
            shards, sources, sinks, op=op, scale=scale, out_dtype=out_dtype or (dtype if floats else torch.int64)
        )
        got = group.exchange(mine, sources, sinks, size=size, op=op, scale=scale, out_dtype=out_dtype)
        carry = group.stats().route.carry
        assert carry is not None
        by_domain += carry.domains == group.domains.of
        for v, y in zip(group.virtual_ranks, got, strict=True):
            assert_same(y.detach(), wanted[v])
        if mine[0].requires_grad:
            uses = [random_values(tuple(y.shape), y.dtype, 7 * call + q) for q, y in enumerate(wanted)]
            adjoint = reference.exchange_adjoint(uses, sources, sinks, op=op, scale=scale, dtype=dtype)
            check_gradients(group, mine, got, [uses[v] for v in group.virtual_ranks], adjoint)
    return by_domain
