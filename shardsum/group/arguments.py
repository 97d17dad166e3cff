"""Checks of what users pass to a collective: a ValueError names the argument, the virtual rank and both values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import (
    as_index,
    as_ints,
    check_index_tensor,
    check_shards,
    check_size,
    describe,
    is_count,
)
from ..core.layout import Interval, split_evenly
from ..core.numerics import check_op, resolve_out_dtype
from .terms import Reduce, Terms

Shards = Tensor | Sequence[Tensor]


def hosted_shards(
    shards: Shards, hosted: Sequence[int], device: torch.device | None, row_dims: int | None = None
) -> list[Tensor]:
    """One tensor per hosted virtual rank, from any accepted form; ValueError when they do not fit together.

    Args:
        device: the group's; None accepts any (a lone process).
        row_dims: the number of trailing dimensions, where it is known. It tells one shard ``(n, *F)`` from a stacked
            tensor ``(1, S_MAX, *F)``.
    """
    k = len(hosted)
    if isinstance(shards, Tensor):
        if k == 1 and (row_dims is None or shards.dim() != row_dims + 2 or shards.shape[0] != 1):
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


NO_BATCHES = "shards: collectives cannot be batched by vmap (nor by jacrev and hessian, which use it)"


def refuse_batches(shards: Sequence[Tensor]) -> None:
    """Raise ValueError for tensors that stand for a batch: inside torch.func.vmap, or gradients (is_grads_batched)."""
    batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
    if any(of(shard) for of in batched for shard in shards):
        raise ValueError(NO_BATCHES)


def check_reduce(op: str, scale: float | None, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Reduce:
    return Reduce(op, check_op(op, scale, dtype), resolve_out_dtype(dtype, out_dtype))


def check_rows(terms: Terms, ranks: Sequence[int], shards: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Raise ValueError unless the shards have the dtype, the trailing shape and at least the rows of a plan."""
    for r, shard, n in zip(ranks, shards, lengths):
        if shard.dtype != terms.dtype:
            raise ValueError(f"shards: virtual rank {r} has dtype {shard.dtype}, the plan was made for {terms.dtype}")
        if tuple(shard.shape[1:]) != tuple(terms.row_shape):
            raise ValueError(
                f"shards: virtual rank {r} has trailing shape {tuple(shard.shape[1:])}, the plan was made for "
                f"{tuple(terms.row_shape)}"
            )
        if terms.device_lengths and shard.shape[0] != n:
            raise ValueError(f"shards: virtual rank {r} is padded to {shard.shape[0]} rows, the plan was made for {n}")
        if shard.shape[0] < n:
            raise ValueError(f"lengths: virtual rank {r} has {n}, but its shard holds {shard.shape[0]} rows")


def check_row_shape(shape: Any) -> tuple[int, ...]:
    """A trailing shape as plain ints."""
    try:
        checked = tuple(map(as_index, shape))
    except TypeError:
        checked = (-1,)
    if min(checked, default=0) < 0:
        raise ValueError(f"row_shape: expected a tuple of ints, at least 0, got {shape!r}")
    return checked


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


def check_planned_lengths(name: str, lengths: Any, s_max: Any, num_virtual_ranks: int, device: torch.device) -> Any:
    """What a plan of the collective ``name`` is given: R ints, or ``s_max`` where lengths come with each call."""
    if name == "exchange":
        if lengths is not None or s_max is not None:
            raise ValueError("lengths: an exchange takes in_intervals and out_intervals in their place")
        return None
    if (lengths is None) == (s_max is None):
        raise ValueError("lengths: a plan takes R ints, or s_max where lengths are on the device")
    if lengths is not None:
        return classify_lengths(lengths, num_virtual_ranks, (), device)[1]
    if not is_count(s_max):
        raise ValueError(f"s_max: expected an int, at least 0, got {s_max!r}")
    return int(s_max)


def check_device_lengths(lengths: Tensor, shards: Sequence[Tensor]) -> Tensor:
    """Lengths of the hosted ranks as an int64 tensor on the shards' device; on the CPU their values are checked."""
    if not isinstance(lengths, Tensor):
        raise ValueError(f"lengths: expected an integer Tensor ({len(shards)},), got {lengths!r}")
    if lengths.device != shards[0].device:
        raise ValueError(f"lengths: on {lengths.device}, but the shards are on {shards[0].device}")
    checked = check_index_tensor("lengths", lengths, len(shards)).to(torch.int64)
    if checked.is_cpu and not torch.compiler.is_compiling():
        for i, n in enumerate(checked.tolist()):
            if not 0 <= n <= shards[i].shape[0]:
                raise ValueError(f"lengths: hosted shard {i} has {n}, expected 0 to its {shards[i].shape[0]} rows")
    return checked


def check_bounds(terms: Terms) -> None:
    """Raise ValueError for lengths and intervals that do not fit the size: their values, of all virtual ranks."""
    if terms.name == "exchange":
        for name, intervals in (("in_intervals", terms.sources), ("out_intervals", terms.sinks)):
            for r, (begin, end) in enumerate(intervals):
                if not 0 <= begin <= end <= terms.size:
                    fits = f"0 <= begin <= end <= size {terms.size}"
                    raise ValueError(f"{name}: virtual rank {r} has ({begin}, {end}), expected {fits}")
    elif not terms.device_lengths:
        for r, n in enumerate(end - begin for begin, end in terms.sources):
            if n < 0:
                raise ValueError(f"lengths: virtual rank {r} has {n}, a length is at least 0")
            if n > terms.size and terms.name != "all_gather":
                raise ValueError(f"lengths: virtual rank {r} has {n}, beyond size {terms.size}")


def check_intervals(name: str, intervals: Any, count: int) -> tuple[Interval, ...]:
    """R intervals as plain ints; :func:`check_bounds` checks their values, which may be symbols here."""
    if isinstance(intervals, Tensor):
        intervals = intervals.tolist()
    try:
        pairs = [(begin, end) for begin, end in intervals]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {count} pairs (begin, end), got {intervals!r}") from None
    if len(pairs) != count:
        raise ValueError(f"{name}: {len(pairs)} intervals for {count} virtual ranks")
    checked = (as_ints(f"{name} of virtual rank {r}", pair, 2) for r, pair in enumerate(pairs))
    return tuple((begin, end) for begin, end in checked)


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


def check_outs(out: Any, count: int, replicated: bool) -> list[Tensor]:
    """``out`` as a list with one Tensor a result."""
    outs = [out] if isinstance(out, Tensor) else out
    if not isinstance(outs, (list, tuple)) or len(outs) != count or (replicated and outs is out):
        what = "a Tensor" if replicated else f"a list of {count} Tensors, one a hosted virtual rank"
        raise ValueError(f"out: expected {what}, got {describe(out)}")
    return list(outs)


def check_label(name: object) -> str | None:
    """The user's name of a call, which all processes must pass alike."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name: expected a str, got {name!r}")
    return name
