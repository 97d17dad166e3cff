"""From the arguments of a collective to its :class:`~.terms.Terms`: the only place that tells collectives apart.

Everything here is computed from values that all processes pass alike. While torch.compile traces, lengths, intervals
and size may be symbols: they pass through unchecked, and the operator checks them when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.checks import check_size
from ..core.layout import intervals_of
from .arguments import check_grad, check_intervals, check_label, check_reduce, check_splits
from .terms import Reduce, Terms


@dataclass(frozen=True)
class Options:
    """What users pass beside shards and lengths; the fields are the arguments of those names."""

    size: Any = None
    op: Any = "sum"
    scale: Any = None
    out_dtype: Any = None
    grad: Any = "sum"
    splits: Any = None
    in_intervals: Any = None
    out_intervals: Any = None
    name: Any = None


#: Lengths of all virtual ranks, or the padded length S_MAX of every shard where the device alone knows them.
Lengths = Sequence[int] | int


def describe(
    num_virtual_ranks: int,
    world_size: int,
    name: str,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    lengths: Lengths,
    options: Options,
) -> Terms:
    """The exchange that a collective is. ``lengths`` are ignored by "exchange".

    Raises:
        ValueError: an argument is malformed; the message names it.
    """
    on_device = isinstance(lengths, int)
    if name == "all_gather":
        if isinstance(lengths, int):
            raise ValueError(
                "lengths: a device tensor does not tell the host how long the result is; pass ints or None"
            )
        reduce, sources = Reduce("copy", None, dtype), tuple(intervals_of(lengths))
        end = sources[-1][1]
    else:
        reduce = check_reduce(options.op, options.scale, dtype, options.out_dtype)
        if name == "exchange":
            end = check_size(options.size)
            sources = check_intervals("in_intervals", options.in_intervals, num_virtual_ranks)
        else:
            end = _end(lengths, options.size)
            rows = [lengths] * num_virtual_ranks if isinstance(lengths, int) else lengths
            sources = tuple((0, n) for n in rows)
    grad, kinds = "sum", "vv"
    if name in ("all_reduce", "all_gather"):
        grad, kinds, sinks = check_grad(options.grad), "vp", ((0, end),) * world_size
    elif name == "reduce_scatter":
        sinks = tuple(intervals_of(check_splits(options.splits, num_virtual_ranks, end)))
    else:
        sinks = check_intervals("out_intervals", options.out_intervals, num_virtual_ranks)
    label = check_label(options.name)
    return Terms(name, sources, sinks, kinds, reduce, grad, end, row_shape, dtype, on_device, label)


def _end(lengths: Lengths, size: Any) -> int:
    """The end of all positions."""
    if size is not None:
        return check_size(size)
    if isinstance(lengths, int):
        raise ValueError("size: required with lengths on the device (the host never reads them)")
    return max(lengths)


#: The options of each collective, in the order in which its calls pass them.
TAKES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("out_dtype", "size", "op", "scale", "grad", "name"),
    "reduce_scatter": ("out_dtype", "size", "op", "scale", "splits", "name"),
    "all_gather": ("grad", "name"),
    "exchange": ("out_dtype", "size", "op", "scale", "name"),
}
_INTERVALS = ("in_intervals", "out_intervals")


def check_options(name: str, options: Mapping[str, Any]) -> Options:
    """The options of a plan; ValueError for one that the collective does not take."""
    if not isinstance(name, str) or name not in TAKES:
        raise ValueError(f"collective: expected one of {', '.join(TAKES)}, got {name!r}")
    takes = {*TAKES[name], *(_INTERVALS if name == "exchange" else ())}
    odd = sorted(options.keys() - takes)
    if odd:
        raise ValueError(f"{odd[0]}: {name} takes no such argument; it takes {', '.join(sorted(takes))}")
    return Options(**options)
