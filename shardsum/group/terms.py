"""What one collective computes: intervals in, intervals out, and the arithmetic. Plain values that all processes share.

Every collective is an exchange. Its *sources* hold intervals of positions, its *sinks* want intervals; each source and
sink belongs to a virtual rank ("v") or to a process ("p", a result that every process gets):

    all_reduce      sources: valid rows of v        sinks: [0, size) of every process      kinds "vp"
    reduce_scatter  sources: valid rows of v        sinks: the part of v                   kinds "vv"
    all_gather      sources: the rows of v          sinks: all rows, of every process      kinds "vp"
    exchange        sources: in_intervals of v      sinks: out_intervals of v              kinds "vv"

The gradient of an exchange is the exchange with sources and sinks swapped (:meth:`Terms.adjoint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.layout import Interval
from ..core.numerics import Reduce, accumulator_dtype


@dataclass(frozen=True)
class Terms:
    """One exchange.

    Attributes:
        name: the collective, for errors.
        sources, sinks: intervals of global positions, in virtual-rank or process order. With lengths on the device
            every source is the whole padded shard, ``(0, S_MAX)``.
        kinds: what sources and sinks belong to, one letter each: "v" virtual ranks, "p" processes.
        reduce: the arithmetic.
        grad: what the gradient of a replicated result means. "sum" adds the processes' cotangents, "identity" takes
            this process's own as the whole one. "adjoint" marks an exchange of cotangents.
        size: the end of all positions.
        row_shape, dtype: ``*F`` and dtype of the shards.
        device_lengths: the valid rows of every shard are known to the device alone and come with each call.
        label: the user's name of the call; calls with different labels never meet.
    """

    name: str
    sources: tuple[Interval, ...]
    sinks: tuple[Interval, ...]
    kinds: str
    reduce: Reduce
    grad: str
    size: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    device_lengths: bool = False
    label: str | None = None

    @property
    def replicated(self) -> bool:
        """Whether every process gets the same result."""
        return self.kinds[1] == "p"

    @property
    def local_adjoint(self) -> bool:
        """Whether the gradient needs no communication: each process has the whole cotangent."""
        return self.replicated and self.grad == "identity"

    def adjoint(self) -> Terms:
        """The exchange of cotangents, added in the accumulator's dtype; of a mean the plain sum in that dtype, which
        the caller divides by the count of contributions."""
        acc = accumulator_dtype(self.dtype)
        mean = self.reduce.op == "mean"
        # A float32 result of float64 shards: their gradient is added in float64.
        dtype = acc if acc == torch.float64 else self.reduce.dtype
        scale = None if mean else self.reduce.scale
        reduce = Reduce("sum", scale, acc if mean else self.dtype)
        name = f"backward of {self.name}"
        return Terms(
            name, self.sinks, self.sources, self.kinds[::-1], reduce, "adjoint", self.size, self.row_shape, dtype,
            label=self.label,
        )  # fmt: skip

    def signature(self) -> dict[str, Any]:
        """What all processes must pass alike, by the names that users know, for comparison and error texts."""
        scale = None if self.reduce.scale is None else repr(self.reduce.scale)
        said: dict[str, Any] = {
            "dtype": str(self.dtype),
            "trailing shape": list(self.row_shape),
            "op": self.reduce.op,
            "scale": scale,
            "out_dtype": str(self.reduce.dtype),
            "size": self.size,
        }
        if self.grad != "adjoint" and self.replicated:
            said["grad"] = self.grad
        if self.device_lengths:
            said |= {"lengths": "device", "S_MAX": self.sources[0][1]}
        elif self.name in ("all_reduce", "reduce_scatter", "all_gather"):
            said["lengths"] = [end - begin for begin, end in self.sources]
        else:
            said["in_intervals"] = list(self.sources)
        if self.kinds == "vv" and self.name != "reduce_scatter":
            said["out_intervals"] = list(self.sinks)
        elif self.name == "reduce_scatter":
            said["splits"] = [end - begin for begin, end in self.sinks]
        if self.label is not None:
            said["name"] = self.label
        return said


def flatten(intervals: Sequence[Interval]) -> list[int]:
    """Intervals as begin, end, begin, end, ...: what crosses an operator's boundary."""
    return [bound for interval in intervals for bound in interval]


def pairs(flat: Sequence[int]) -> tuple[Interval, ...]:
    """The intervals of :func:`flatten`."""
    return tuple(zip(flat[::2], flat[1::2]))
