"""From what a user passes to a collective to what the engine runs: checked arguments as intervals and shards.

A request holds only plain values; its ``signature`` is what all processes must pass alike and enters the agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.checks import (
    as_ints,
    check_index_tensor,
    check_shards,
    check_size,
    check_writable,
    describe,
    is_count,
    is_strided,
    needs_grad,
    overlap,
)
from ..core.layout import Interval, split_evenly
from ..core.numerics import check_op, resolve_out_dtype
from .executor import Reduce

Shards = Tensor | Sequence[Tensor]


@dataclass
class Request:
    """One collective call. ``sources`` is None for padded shards with device lengths (``shards[0]`` is padded then)."""

    name: str
    shards: list[Tensor]
    sources: tuple[Interval, ...] | None
    sinks: tuple[Interval, ...]
    kinds: str
    reduce: Reduce
    grad: str
    signature: dict[str, Any]
    size: int = 0  # the end of all positions
    device_lengths: Tensor | None = None
    out: Tensor | None = None
    out_rows: Sequence[int] = ()  # rows of every process's out, -1 without one, where they came with the lengths

    @property
    def needs_grad(self) -> bool:
        return needs_grad(self.shards)


def hosted_shards(shards: Shards, hosted: Sequence[int], device: torch.device | None) -> list[Tensor]:
    """One tensor per hosted virtual rank, from any accepted form; ValueError when they do not fit together.

    ``device`` is the group's; None accepts any (a lone process).
    """
    k = len(hosted)
    if isinstance(shards, Tensor):
        if k == 1:
            shards = [shards]
        elif shards.dim() < 2 or shards.shape[0] != k:
            raise ValueError(
                f"shards: this process hosts {k} virtual ranks {list(hosted)}; "
                f"pass a list of {k} Tensors or one Tensor ({k}, S_MAX, *F), got {describe(shards)}"
            )
        else:
            shards = list(shards.unbind(0))
    if isinstance(shards, (list, tuple)) and shards and len(shards) != k:
        raise ValueError(f"shards: {len(shards)} shards, but this process hosts {k} virtual ranks {list(hosted)}")
    shards = check_shards(shards, hosted)
    if device is not None and shards[0].device != device:
        raise ValueError(f"shards: on {shards[0].device}, but the group exchanges tensors on {device}")
    return shards


def describe_rows(shards: Sequence[Tensor]) -> dict[str, Any]:
    """The part of a signature that shards determine: never a local length."""
    return {"dtype": str(shards[0].dtype), "trailing shape": list(shards[0].shape[1:])}


def describe_reduce(reduce: Reduce) -> dict[str, Any]:
    """The part of a signature that says what is computed. A scale as text: NaN equals NaN, 0.0 differs from -0.0."""
    scale = None if reduce.scale is None else repr(reduce.scale)
    return {"op": reduce.op, "scale": scale, "out_dtype": str(reduce.dtype)}


def check_reduce(op: str, scale: float | None, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Reduce:
    return Reduce(op, check_op(op, scale, dtype), resolve_out_dtype(dtype, out_dtype))


def check_grad(grad: str) -> str:
    if not isinstance(grad, str) or grad not in ("identity", "sum"):
        raise ValueError(f'grad: expected "identity" or "sum", got {grad!r}')
    return grad


def classify_lengths(
    lengths: Any, num_virtual_ranks: int, hosted: Sequence[int], device: torch.device
) -> tuple[str, Any]:
    """``("counted", None)``, ``("host", R ints)`` or ``("device", hosted index tensor)``.

    A CPU tensor of R values is read like ints; any other is form (c) and lies on the shards' device.
    """
    if lengths is None:
        return "counted", None
    if not isinstance(lengths, Tensor):
        return "host", as_ints("lengths", lengths, num_virtual_ranks)
    if lengths.is_cpu and tuple(lengths.shape) == (num_virtual_ranks,):
        return "host", check_index_tensor("lengths", lengths, num_virtual_ranks).tolist()
    if lengths.device != device:
        raise ValueError(f"lengths: on {lengths.device}, but the shards are on {device}")
    return "device", check_index_tensor("lengths", lengths, len(hosted)).to(torch.int64)


def check_lengths(lengths: Sequence[int], shards: Sequence[Tensor], hosted: Sequence[int], size: int | None) -> None:
    """Host lengths of all virtual ranks against the hosted shards and the size."""
    for r, n in enumerate(lengths):
        if n < 0:
            raise ValueError(f"lengths: virtual rank {r} has {n}, a length is at least 0")
        if size is not None and n > size:
            raise ValueError(f"lengths: virtual rank {r} has {n}, beyond size {size}")
    for r, shard in zip(hosted, shards):
        if lengths[r] > shard.shape[0]:
            raise ValueError(f"lengths: virtual rank {r} has {lengths[r]}, but its shard holds {shard.shape[0]} rows")


def check_intervals(name: str, intervals: Any, count: int, size: int) -> tuple[Interval, ...]:
    """R half-open intervals inside ``[0, size)`` as plain ints."""
    if isinstance(intervals, Tensor):
        intervals = intervals.tolist()
    try:
        pairs = [(begin, end) for begin, end in intervals]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {count} pairs (begin, end), got {intervals!r}") from None
    if len(pairs) != count:
        raise ValueError(f"{name}: {len(pairs)} intervals for {count} virtual ranks")
    checked = []
    for r, pair in enumerate(pairs):
        begin, end = as_ints(f"{name} of virtual rank {r}", pair, 2)
        if not torch.compiler.is_compiling() and not 0 <= begin <= end <= size:  # symbols; the operator sees values
            raise ValueError(
                f"{name}: virtual rank {r} has ({begin}, {end}), expected 0 <= begin <= end <= size {size}"
            )
        checked.append((begin, end))
    return tuple(checked)


def check_splits(splits: Sequence[int] | None, count: int, size: int) -> list[int]:
    """How ``size`` positions are divided over the virtual ranks."""
    if splits is None:
        return split_evenly(check_size(size), count)
    checked = as_ints("splits", splits, count)
    for r, n in enumerate(checked):
        if n < 0:
            raise ValueError(f"splits: virtual rank {r} has {n}, a length is at least 0")
    if sum(checked) != size:
        raise ValueError(f"splits: they sum to {sum(checked)}, but size is {size}")
    return checked


def narrow(shards: Sequence[Tensor], lengths: Sequence[int], hosted: Sequence[int]) -> list[Tensor]:
    """The valid rows of each hosted shard."""
    return [s if s.shape[0] == lengths[r] else s[: lengths[r]] for r, s in zip(hosted, shards)]


def check_out(out: Tensor | None, shards: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``out`` can receive a result of these shards and this dtype, of any number of rows."""
    if out is None:
        return
    if not is_strided(out):
        raise ValueError(f"out: expected a Tensor, got {describe(out)}")
    if out.dim() == 0 or out.shape[1:] != shards[0].shape[1:] or out.dtype != dtype:
        result = f"{dtype} {('size', *shards[0].shape[1:])}"
        raise ValueError(f"out: {describe(out)}, but the result is {result}")
    if out.device != shards[0].device:
        raise ValueError(f"out: on {out.device}, but the shards are on {shards[0].device}")
    if torch.compiler.is_compiling():  # the result is copied there, with its gradient
        return
    check_writable(out)
    if needs_grad([*shards, out]):
        raise ValueError("out: not possible where gradients are needed; use the returned tensor")
    if any(overlap(out, s) for s in shards):
        raise ValueError("out: shares memory with the shards")


def check_scalars(name: str, values: Any, hosted: Sequence[int], floating: bool) -> list[Any]:
    """One number per hosted virtual rank: floating Tensors of one element, or integer ones and ints."""
    try:
        values = list(values) if len(hosted) > 1 or isinstance(values, (list, tuple)) else [values]
    except TypeError:
        raise ValueError(f"{name}: expected one value per hosted virtual rank, got {describe(values)}") from None
    if len(values) != len(hosted):
        raise ValueError(f"{name}: {len(values)} values, but this process hosts {len(hosted)} virtual ranks")
    for v, x in zip(hosted, values):
        if is_strided(x):
            fits = x.numel() == 1 and x.dtype != torch.bool and not x.is_complex() and x.is_floating_point() == floating
        else:
            fits = not floating and is_count(x)
        if not fits:
            what = "a floating Tensor of one element" if floating else "an integer Tensor of one element, or an int"
            raise ValueError(f"{name}: virtual rank {v} has {describe(x)}, expected {what}")
    return values


def into(result: Tensor, out: Tensor | None) -> Tensor:
    """``out`` with the result's values, or the result itself."""
    if out is None:
        return result
    if out is not result:
        return out.copy_(result)
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that a kernel overwrote
    return out
