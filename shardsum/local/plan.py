"""What a local sum does, decided and checked once: a plan holds everything about it but its tensors.

A plan is a CPU int64 tensor that the operators of :mod:`shardsum.local.kernels` read (csrc/plan.h): version, size,
capacity, out dtype, mean, has scale, the scale's bits, accumulate, number of rows; then start, first and length of
every row: rows ``[first, first + length)`` of a shard, at the positions from ``start`` on.

:func:`planned` keeps the plans of recent arguments. It tells arguments apart by value and type: True and 8.0 equal
ints, 0.0 equals -0.0.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from marshal import dumps
from typing import Any

import torch
from torch import Tensor

from ..core.numerics import NATIVE_DTYPES

_VERSION = 1
_HEADER, _ROW = 9, 3
_MAX_PLANS = 1024
_plans: dict[Any, Tensor] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class SumPlan:
    """The contents of a plan.

    Attributes:
        rows: ``(start, first, length)`` of every shard; () for whole shards, however many, all from position 0.
        size: positions of the result; None for as many as the longest shard has rows.
        capacity: rows of the longest shard; None for any that suffice.
        op, scale: as of :func:`shardsum.ragged_sum`.
        out_dtype: None for that of ``out``; of a new result the shards', int64 for integers and bool.
        accumulate: add to ``out``.
    """

    rows: Sequence[tuple[int, int, int]] = ()
    size: int | None = None
    capacity: int | None = None
    op: str = "sum"
    scale: float | None = None
    out_dtype: torch.dtype | None = None
    accumulate: bool = False

    def words(self) -> Tensor:
        """The plan itself."""
        size, capacity = (-1 if n is None else n for n in (self.size, self.capacity))
        dtype = -1 if self.out_dtype is None else NATIVE_DTYPES.index(self.out_dtype)
        (bits,) = struct.unpack("q", struct.pack("d", 0.0 if self.scale is None else self.scale))
        numerics = [dtype, self.op == "mean", self.scale is not None, bits, self.accumulate]
        words = [_VERSION, size, capacity, *numerics, len(self.rows), *[n for row in self.rows for n in row]]
        # No operator makes it: a dispatch mode, a trace or a transform at work would change it for others.
        return torch.frombuffer(bytearray(struct.pack(f"{len(words)}q", *words)), dtype=torch.int64)

    @classmethod
    def from_words(cls, plan: Tensor) -> SumPlan:
        """The contents of a plan. RuntimeError where the words are not those of a plan."""
        words = plan.tolist()
        if len(words) < _HEADER or words[0] != _VERSION or len(words) != _HEADER + _ROW * words[_HEADER - 1]:
            raise RuntimeError("shardsum: this is not a plan")
        _, size, capacity, dtype, mean, has_scale, bits, accumulate, _ = words[:_HEADER]
        (scale,) = struct.unpack("d", struct.pack("q", bits))
        return cls(
            tuple(zip(*[iter(words[_HEADER:])] * _ROW)), None if size < 0 else size, None if capacity < 0 else capacity,
            "mean" if mean else "sum", scale if has_scale else None, None if dtype < 0 else NATIVE_DTYPES[dtype],
            bool(accumulate),
        )  # fmt: skip


def planned(
    lengths: Any, starts: Any, size: Any, op: Any, scale: Any, out_dtype: Any, accumulate: Any, firsts: Any = None
) -> Tensor | None:
    """The plan of these arguments, as of :func:`shardsum.ragged_sum` (``firsts``: row of each shard to begin with,
    default 0). None where one is wrong, or of another type than is usual: who asks then checks what it got.
    """
    try:
        key = dumps((lengths, starts, size, op, scale, accumulate, firsts), 2)
        return _plans[key if out_dtype is None else (key, out_dtype)]
    except KeyError:
        pass
    except (ValueError, TypeError):  # a tensor, or another object
        return None
    plan = _make(lengths, starts, size, op, scale, out_dtype, accumulate, firsts)
    if plan is not None:
        with _lock:
            if len(_plans) >= _MAX_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key if out_dtype is None else (key, out_dtype)] = plan
    return plan


def _make(
    lengths: Any, starts: Any, size: Any, op: Any, scale: Any, out_dtype: Any, accumulate: Any, firsts: Any
) -> Tensor | None:
    if type(op) is not str or op not in ("sum", "mean") or type(accumulate) is not bool:
        return None
    if type(scale) not in (type(None), float, int) or (type(scale) is int and abs(scale) > 1 << 1023):
        return None
    if out_dtype is not None and out_dtype not in NATIVE_DTYPES:
        return None
    if not _are_counts([] if size is None else [size]):
        return None
    if lengths is None:
        if starts is not None or firsts is not None:
            return None
        return SumPlan((), size, None, op, scale, out_dtype, accumulate).words()
    columns = [lengths, *[c for c in (starts, firsts) if c is not None]]
    if not all(type(c) in (list, tuple) and len(c) == len(lengths) > 0 and _are_counts(c) for c in columns):
        return None
    zeros = [0] * len(lengths)
    rows = list(zip(zeros if starts is None else starts, zeros if firsts is None else firsts, lengths))
    end = max(start + n for start, _, n in rows)
    if size is not None and end > size:
        return None
    if starts is not None and size is None:
        size = end
    return SumPlan(rows, size, None, op, scale, out_dtype, accumulate).words()


def _are_counts(values: Sequence[Any]) -> bool:
    """Whether all are ints that a tensor may have as rows."""
    return {*map(type, values)} <= {int} and (not values or 0 <= min(values) <= max(values) < 1 << 48)
