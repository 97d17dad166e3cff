"""One random local sum a seed: ragged, of a list, masked, or by a module; gradients, given outputs, odd layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import shardsum

from . import oracle
from .numbers import KINDS, Kind, difference, out_kinds, random, to_torch

TRAILING = [(), (1,), (3,), (8,), (33,), (2, 5), (0,), (150,)]


def run(seed: int) -> str | None:
    """What is wrong in this seed's call, or None."""
    rng = np.random.default_rng(seed)
    kind = KINDS[rng.choice(list(KINDS))]
    trailing = TRAILING[rng.integers(len(TRAILING))]
    finish = random_finish(rng, kind)
    return (_masked if rng.random() < 0.3 else _ragged)(rng, kind, trailing, finish)


def random_finish(rng: np.random.Generator, kind: Kind) -> oracle.Finish:
    wanted = out_kinds(kind)
    scale = [None, 0.1, -3.0][rng.integers(3)] if kind.is_float else None
    return oracle.Finish(kind.is_float and rng.random() < 0.4, scale, wanted[rng.integers(len(wanted))])


def arguments(finish: oracle.Finish) -> dict[str, Any]:
    return {"op": "mean" if finish.mean else "sum", "scale": finish.scale, "out_dtype": finish.out.torch}


def _ragged(rng: np.random.Generator, kind: Kind, trailing: tuple[int, ...], finish: oracle.Finish) -> str | None:
    ranks = int(rng.integers(1, 10)) if rng.random() < 0.95 else int(rng.integers(65, 140))
    capacity, size = int(rng.integers(0, 9)), int(rng.integers(0, 12))
    lengths = [int(rng.integers(0, min(capacity, size) + 1)) for _ in range(ranks)]
    begins = [int(rng.integers(0, size - n + 1)) for n in lengths] if rng.random() < 0.5 else [0] * ranks
    x = random(rng, (ranks, capacity, *trailing), kind)
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    needs_grad = kind.is_float and rng.random() < 0.3
    previous, out = None, None
    if not needs_grad and rng.random() < 0.4:
        before = random(rng, (size, *trailing), finish.out)
        out = torch.empty(before.shape, dtype=finish.out.torch).copy_(to_torch(before, finish.out))
        previous = before if rng.random() < 0.5 else None
    shards: Any
    if rng.random() < 0.4:
        shards, form = [_laid_out(rng, to_torch(row, kind)).requires_grad_(needs_grad) for row in rows], None
    else:
        shards = _laid_out(rng, to_torch(x, kind)).requires_grad_(needs_grad)
        form = [lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32)][rng.integers(3)]
    starts: Any = begins if any(begins) or rng.random() < 0.3 else None
    if isinstance(form, torch.Tensor) and starts is not None:
        starts = torch.tensor(begins, dtype=form.dtype)
    y = shardsum.ragged_sum(
        shards, form, starts=starts, size=size, out=out, accumulate=previous is not None, **arguments(finish)
    )
    expected = oracle.ragged_sum(rows, begins, (size, *trailing), kind, finish, previous)
    wrong = difference(y, expected, finish.out)
    if wrong is not None or not needs_grad:
        return wrong
    g = random(rng, (size, *trailing), finish.out)
    y.backward(to_torch(g, finish.out))
    counts = oracle.counts_of(lengths, begins, size)
    whole = oracle.local_gradient(g, counts, kind, finish)
    for r, (n, begin) in enumerate(zip(lengths, begins)):
        actual = shards[r].grad if isinstance(shards, list) else shards.grad[r]
        want = np.zeros((len(actual), *trailing), kind.stored)
        want[:n] = whole[begin : begin + n]
        if wrong := difference(actual, want, kind):
            return f"gradient of shard {r}: {wrong}"
    return None


def _masked(rng: np.random.Generator, kind: Kind, trailing: tuple[int, ...], finish: oracle.Finish) -> str | None:
    ranks, size = int(rng.integers(1, 10)), int(rng.integers(0, 80))
    x = random(rng, (ranks, size, *trailing), kind)
    mask = rng.random((ranks, size)) < rng.random()
    if rng.random() < 0.3:  # an interval a rank
        ends = np.sort(rng.integers(0, size + 1, (ranks, 2)), axis=1)
        mask = np.array([(np.arange(size) >= b) & (np.arange(size) < e) for b, e in ends]).reshape(ranks, size)
    tensor = _laid_out(rng, to_torch(x, kind))
    if rng.random() < 0.4:
        plain = oracle.Finish(False, None, out_kinds(kind)[0])
        y = shardsum.MaskedSum(torch.from_numpy(mask))(tensor)
        return difference(y, oracle.masked_sum(x, mask, kind, plain), plain.out)
    y = shardsum.masked_sum(tensor, torch.from_numpy(mask), **arguments(finish))
    return difference(y, oracle.masked_sum(x, mask, kind, finish), finish.out)


def _laid_out(rng: np.random.Generator, x: torch.Tensor) -> torch.Tensor:
    """The same values, sometimes at an odd address, in every second row of a buffer, or transposed in memory."""
    way = rng.integers(5)
    if way == 0:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if way == 1 and x.dim() > 1:
        return torch.stack([x, torch.zeros_like(x)], 1).flatten(0, 1)[::2]
    if way == 2 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x
