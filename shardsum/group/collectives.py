"""From the arguments of a collective to its :class:`~.terms.Terms`: the only place that tells collectives apart.

Everything here is computed from values that all processes pass alike. While torch.compile traces, lengths, intervals
and size may be symbols: they pass through unchecked, and the operator checks them when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Setting:
    """What the group and the shards bring: R, G, ``*F`` and the dtype."""

    num_virtual_ranks: int
    world_size: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype


#: Lengths of all virtual ranks, or the padded length S_MAX of every shard where the device alone knows them.
Lengths = Sequence[int] | int


def _end(lengths: Lengths, size: Any) -> int:
    """The end of all positions."""
    if size is not None:
        return check_size(size)
    if isinstance(lengths, int):
        raise ValueError("size: required with lengths on the device (the host never reads them)")
    return max(lengths)


def _valid_rows(setting: Setting, lengths: Lengths) -> tuple[tuple[int, int], ...]:
    if isinstance(lengths, int):
        return ((0, lengths),) * setting.num_virtual_ranks
    return tuple((0, n) for n in lengths)


def _all_reduce(setting: Setting, lengths: Lengths, options: Options) -> Terms:
    reduce = check_reduce(options.op, options.scale, setting.dtype, options.out_dtype)
    grad, end = check_grad(options.grad), _end(lengths, options.size)
    sources, sinks = _valid_rows(setting, lengths), ((0, end),) * setting.world_size
    return _terms("all_reduce", setting, sources, sinks, "vp", reduce, grad, end, options, isinstance(lengths, int))


def _reduce_scatter(setting: Setting, lengths: Lengths, options: Options) -> Terms:
    reduce = check_reduce(options.op, options.scale, setting.dtype, options.out_dtype)
    end = _end(lengths, options.size)
    sources = _valid_rows(setting, lengths)
    sinks = tuple(intervals_of(check_splits(options.splits, setting.num_virtual_ranks, end)))
    on_device = isinstance(lengths, int)
    return _terms("reduce_scatter", setting, sources, sinks, "vv", reduce, "sum", end, options, on_device)


def _all_gather(setting: Setting, lengths: Lengths, options: Options) -> Terms:
    if isinstance(lengths, int):
        raise ValueError("lengths: a device tensor does not tell the host how long the result is; pass ints or None")
    grad, sources = check_grad(options.grad), tuple(intervals_of(lengths))
    total = sources[-1][1]
    sinks, copy = ((0, total),) * setting.world_size, Reduce("copy", None, setting.dtype)
    return _terms("all_gather", setting, sources, sinks, "vp", copy, grad, total, options)


def _exchange(setting: Setting, lengths: Lengths, options: Options) -> Terms:
    reduce = check_reduce(options.op, options.scale, setting.dtype, options.out_dtype)
    end, count = check_size(options.size), setting.num_virtual_ranks
    sources = check_intervals("in_intervals", options.in_intervals, count)
    sinks = check_intervals("out_intervals", options.out_intervals, count)
    return _terms("exchange", setting, sources, sinks, "vv", reduce, "sum", end, options)


def _terms(
    name: str,
    setting: Setting,
    sources: tuple[tuple[int, int], ...],
    sinks: tuple[tuple[int, int], ...],
    kinds: str,
    reduce: Reduce,
    grad: str,
    end: int,
    options: Options,
    on_device: bool = False,
) -> Terms:
    return Terms(
        name, sources, sinks, kinds, reduce, grad, end, setting.row_shape, setting.dtype, on_device,
        check_label(options.name),
    )  # fmt: skip


COLLECTIVES: dict[str, Callable[[Setting, Lengths, Options], Terms]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "exchange": _exchange,
}


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
    if not isinstance(name, str) or name not in COLLECTIVES:
        raise ValueError(f"collective: expected one of {', '.join(COLLECTIVES)}, got {name!r}")
    takes = {*TAKES[name], *(_INTERVALS if name == "exchange" else ())}
    odd = sorted(options.keys() - takes)
    if odd:
        raise ValueError(f"{odd[0]}: {name} takes no such argument; it takes {', '.join(sorted(takes))}")
    return Options(**options)


def describe(name: str, setting: Setting, lengths: Lengths, options: Options) -> Terms:
    """The exchange that a collective of :data:`COLLECTIVES` is. ``lengths`` are ignored by "exchange".

    Raises:
        ValueError: an argument is malformed; the message names it.
    """
    return COLLECTIVES[name](setting, lengths, options)
