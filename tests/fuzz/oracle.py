"""What every sum must give: loops over virtual ranks in numpy, one IEEE operation at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .numbers import Array, Kind, rounded, widened


@dataclass(frozen=True)
class Finish:
    """What happens to a sum: division by the number of contributions, then a factor, then one rounding."""

    mean: bool
    scale: float | None
    out: Kind


@np.errstate(all="ignore")
def ragged_sum(
    rows: Sequence[Array], begins: Sequence[int], shape: tuple[int, ...], kind: Kind, finish: Finish,
    previous: Array | None = None,
) -> Array:  # fmt: skip
    """Row r lies at ``begins[r]`` of the result's first dimension; it is added to ``previous`` where that is given."""
    acc, count = np.zeros(shape, kind.accumulator), np.zeros(shape[0], np.int64)
    for row, begin in zip(rows, begins):
        here = slice(begin, begin + len(row))
        acc[here] = acc[here] + widened(row, kind)
        count[here] += 1
    return _finished(acc, count, kind, finish, previous)


@np.errstate(all="ignore")
def masked_sum(x: Array, mask: Array, kind: Kind, finish: Finish) -> Array:
    acc, count = np.zeros(x.shape[1:], kind.accumulator), np.zeros(x.shape[1], np.int64)
    for row, selected in zip(x, mask):
        acc[selected] = acc[selected] + widened(row[selected], kind)
        count[selected] += 1
    return _finished(acc, count, kind, finish, None)


@np.errstate(all="ignore")
def gradient(
    cotangents: Sequence[Array],
    begins: Sequence[int],
    counts: Array,
    shape: tuple[int, ...],
    kind: Kind,
    finish: Finish,
) -> Array:
    """Of every position: the cotangents of the outputs that hold it, in their order, then what the sum did to it."""
    acc = np.zeros(shape, kind.accumulator)
    for cotangent, begin in zip(cotangents, begins):
        here = slice(begin, begin + len(cotangent))
        acc[here] = acc[here] + widened(cotangent, finish.out)
    return rounded(_divided(acc, counts, kind, finish), kind)


@np.errstate(all="ignore")
def local_gradient(cotangent: Array, counts: Array, kind: Kind, finish: Finish) -> Array:
    """Of every position of a local sum: the one cotangent, a copy and no sum (-0.0 stays), then what the sum did."""
    return rounded(_divided(widened(cotangent, finish.out).astype(kind.accumulator), counts, kind, finish), kind)


def counts_of(lengths: Sequence[int], begins: Sequence[int], size: int) -> Array:
    count = np.zeros(size, np.int64)
    for length, begin in zip(lengths, begins):
        count[begin : begin + length] += 1
    return count


def _divided(acc: Array, count: Array, kind: Kind, finish: Finish) -> Array:
    if finish.mean:
        divisor = np.maximum(count, 1).astype(kind.accumulator).reshape(-1, *[1] * (acc.ndim - 1))
        acc = acc / divisor
    return acc if finish.scale is None else acc * kind.accumulator(finish.scale)


def _finished(acc: Array, count: Array, kind: Kind, finish: Finish, previous: Array | None) -> Array:
    acc = _divided(acc, count, kind, finish)
    if previous is not None:
        acc = widened(previous, finish.out).astype(acc.dtype) + acc
    return rounded(acc, finish.out)
