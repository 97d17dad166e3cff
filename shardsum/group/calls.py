"""The group's collectives as users write them: look a plan up, make it if it is new, call it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from marshal import dumps, loads
from typing import Any

import torch
from torch import Tensor

from ..core.checks import as_ints, check_out, describe, is_count, needs_grad
from .agreement import common_error
from .arguments import Shards, classify_lengths, hosted_shards
from .collectives import TAKES, Options
from .forms import deliver, is_single, traced
from .handle import Handle
from .plan import Plan
from .planner import Planner
from .terms import Terms

_is_compiling = torch.compiler.is_compiling


def call(
    planner: Planner,
    name: str,
    shards: Shards,
    lengths: Any,
    options: tuple[Any, ...],
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Run one collective of a group.

    A dictionary leads from the arguments, as they were written, to their plan. New arguments, and those of unusual
    types, are checked first; then the planner finds the plan or makes it.

    Args:
        lengths: of "exchange", both lists of intervals.
        options: the values of :data:`.collectives.TAKES`.
    """
    if _is_compiling():
        return _trace(planner, name, shards, lengths, _named(name, lengths, options), out, async_op)
    lengths = list(map(_read_once, lengths)) if name == "exchange" else _read_once(lengths)
    if lengths is None:
        plan = _count(planner, name, shards, _named(name, lengths, options), out, async_op)
    else:
        try:
            key = _key(name, shards, lengths, options)
            found = planner.by_arguments.get(key)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # not plain: left to the checks
            key, found = None, None
        plan = found or _make(planner, name, shards, lengths, _named(name, lengths, options), out, async_op)
        if found is None and key is not None and _is_unique(key):
            planner.remember(key, plan)
    given = lengths if plan.terms.device_lengths else None
    if async_op:
        return plan.start(shards, out, lengths=given)
    return plan.run_call(shards, out, given)


def _read_once(values: Any) -> Any:
    """``values``; a list of them where they may be gone once they have been read (a generator, a zip)."""
    if type(values) is list:  # isinstance with an abstract class takes a quarter of a microsecond
        return values
    return list(values) if isinstance(values, Iterator) else values


def _named(name: str, lengths: Any, options: tuple[Any, ...]) -> Options:
    held, wanted = lengths if name == "exchange" else (None, None)
    return Options(**dict(zip(TAKES[name], options)), in_intervals=held, out_intervals=wanted)


def _make(
    planner: Planner, name: str, shards: Shards, lengths: Any, options: Options, out: Any, async_op: bool
) -> Plan:
    """The plan of checked arguments; new ones are compared with the other processes'."""
    try:
        hosted, terms = _describe(planner, name, shards, lengths, options, out)
        planner.check_values(terms)
        other = _other_reading(planner, shards, terms, out)
        plan = planner.find(terms)
        if plan is None and other is not None:
            plan = planner.find(other)
        if plan is not None:
            return plan
        plan = Plan(planner, terms)
        plan.tensors.take(hosted)
        plan.tensors.take_outs(hosted, out)
        _refuse_async_gradient(hosted, async_op)
    except Exception as error:
        with planner.calling(name):
            raise planner.refuse(name, error) from error
    grads = not terms.local_adjoint and needs_grad(hosted)
    with planner.calling(name):
        return planner.agreed(terms, grads, other)


def _describe(
    planner: Planner, name: str, shards: Shards, lengths: Any, options: Options, out: Any
) -> tuple[list[Tensor], Terms]:
    if name != "exchange" and not isinstance(lengths, Tensor):
        lengths = as_ints("lengths", lengths, planner.num_virtual_ranks)
    row_dims = _row_dims(shards, options.in_intervals if name == "exchange" else lengths, options, planner, out)
    hosted = hosted_shards(shards, planner.virtual_ranks, planner.shard_device, row_dims)
    first = hosted[0]
    if name != "exchange":
        form, values = classify_lengths(lengths, planner.num_virtual_ranks, planner.virtual_ranks, first.device)
        lengths = values if form == "host" else first.shape[0]
        if form == "device" and len({s.shape for s in hosted}) > 1:
            shapes = [tuple(s.shape) for s in hosted]
            raise ValueError(f"shards: device lengths need equally padded shards, got {shapes}")
    return hosted, planner.describe(name, tuple(first.shape[1:]), first.dtype, lengths, options)


def _refuse_async_gradient(hosted: list[Tensor], async_op: bool) -> None:
    if async_op and needs_grad(hosted):
        raise ValueError("async_op: not possible with shards that require grad")


def _count(planner: Planner, name: str, shards: Shards, options: Options, out: Any, async_op: bool) -> Plan:
    """The plan of a call whose lengths are the shards' row counts: one small all_gather on the host."""
    with planner.calling(name):
        try:
            _refuse_stacked(shards, planner)
            hosted = hosted_shards(shards, planner.virtual_ranks, planner.shard_device)
            counts, first = [s.shape[0] for s in hosted], hosted[0]
            # These hold but for lengths, sinks and a default size.
            longest, checked = [max(counts)] * planner.num_virtual_ranks, replace(options, splits=None)
            terms = planner.describe(name, tuple(first.shape[1:]), first.dtype, longest, checked)
            for v, n in zip(planner.virtual_ranks, counts):
                if options.size is not None and n > terms.size:
                    raise ValueError(f"lengths: virtual rank {v} has {n}, beyond size {terms.size}")
            _refuse_async_gradient(hosted, async_op)
            if out is not None and terms.replicated:
                check_out(out, hosted, (None, *terms.row_shape), terms.reduce.dtype)
        except Exception as error:
            raise planner.refuse(name, error, counted=True) from error
        grads = not terms.local_adjoint and needs_grad(hosted)
        size = None if options.size is None else terms.size
        splits = None if options.splits is None else list(options.splits)
        said = {**terms.signature(), "size": size, "lengths": "counted", "splits": splits, "requires grad": grads}
        rows = out.shape[0] if isinstance(out, Tensor) and terms.replicated else -1
        everyone = planner.agreement.gather_values(name, said, [*counts, rows], planner.most_hosted + 1)
        lengths = [everyone[owner][slot] for owner, slot in map(planner.position, range(planner.num_virtual_ranks))]
        # From here on everything is computed from values that all share: all raise, or none.
        terms = planner.describe(name, terms.row_shape, terms.dtype, lengths, options)
        planner.check_values(terms)
        end = terms.sinks[0][1]
        for process, theirs in enumerate(everyone):
            if theirs[-1] not in (-1, end):
                where = "" if planner.world_size == 1 else f"{name}: process {process}: "
                raise common_error(f"{where}out: {theirs[-1]} rows, but the result has {end}")
        plan = planner.derived(terms)
        plan.mark_agreed(grads)
        return plan


def _refuse_stacked(shards: Shards, planner: Planner) -> None:
    """ValueError for stacked shards whose rows are to be counted: of one hosted rank they could not be told from a
    shard of one row, and a program's meaning must not depend on the number of processes."""
    k = len(planner.virtual_ranks)
    if k > 1 and isinstance(shards, Tensor) and shards.dim() > 1 and shards.shape[0] == k:
        raise ValueError(
            f"shards: one stacked Tensor ({k}, S_MAX, *F) goes with lengths; pass them, or a list of {k} Tensors: "
            "list(shards)"
        )


def _trace(
    planner: Planner, name: str, shards: Shards, lengths: Any, options: Options, out: Any, async_op: bool
) -> Any:
    """The call as torch.compile sees it: the registered operator, with lengths that may be symbols."""
    if lengths is None:
        if planner.world_size > 1:
            raise ValueError(
                "lengths: None needs a host exchange on every call; pass ints or a tensor in compiled code"
            )
        _refuse_stacked(shards, planner)
        lengths = [s.shape[0] for s in hosted_shards(shards, planner.virtual_ranks, planner.shard_device)]
    hosted, terms = _describe(planner, name, shards, lengths, options, out)
    given = lengths if terms.device_lengths else None
    if out is not None:
        check_out(out, hosted, (None, *terms.row_shape), terms.reduce.dtype)
    result = deliver(traced(planner, terms, hosted, given), terms, out, is_single(shards, planner, terms))
    return Handle(lambda: result) if async_op else result


def _key(name: str, shards: Any, lengths: Any, options: tuple[Any, ...]) -> Hashable:
    """The key of a call among those seen before; None, or an error, for arguments of unusual types.

    Their values are in it as bytes: nobody can change them later, and they differ where only the type does (True and
    8.0 equal ints, but the checks refuse them) or the sign of a zero.
    """
    first = shards if type(shards) is Tensor else shards[0] if type(shards) is list else None
    if type(first) is not Tensor:  # a DTensor would communicate where one looks into it
        return None
    told: Hashable = None
    if type(lengths) is Tensor:
        told = lengths.is_cpu, lengths.shape, lengths.dtype
        lengths = lengths.tolist() if lengths.is_cpu else None
    dtype = None
    if name != "all_gather":
        dtype, options = options[0], options[1:]
        if dtype is not None and type(dtype) is not torch.dtype:
            return None
    return name, type(shards), first.shape, first.dtype, dtype, told, dumps((lengths, options), 2)


def _is_unique(key: Any) -> bool:
    """Whether no other arguments have this key. Of numpy's arrays and scalars (and other buffers) it holds the bytes
    alone: the same for bools and uint8, or for a float and an int, of which only one may be what the checks take."""
    return not _holds_buffer(loads(key[-1]))


def _holds_buffer(value: Any) -> bool:
    return any(map(_holds_buffer, value)) if isinstance(value, (list, tuple)) else isinstance(value, bytes)


def _row_dims(shards: Shards, held: Any, options: Options, planner: Planner, out: Any) -> int | None:
    """The number of trailing dimensions where a Tensor ``(1, n, ...)`` of one hosted rank is to be read as stacked
    shards ``(1, S_MAX, *F)``; None where it is one shard of one row, or nothing tells.

    It is stacked where one row would be too few: the length is above 1, or, with lengths on the device, the result has
    more rows. It is stacked, too, where ``out`` has the dimensions of such a result. ValueError with lengths on the
    device and a result of one row: both readings fit.

    Args:
        held: lengths of any form, or the intervals that the ranks hold.
    """
    if not _has_one_row(shards, planner):
        return None
    assert isinstance(shards, Tensor)
    stacked, count = shards.dim() - 2, planner.num_virtual_ranks
    if isinstance(held, Tensor) and not (held.is_cpu and tuple(held.shape) == (count,)):
        if options.size is None or options.size > 1:  # None is refused later
            return stacked
        raise ValueError(
            f"shards: {describe(shards)} may be one shard of one row, or stacked shards (1, S_MAX, *F); with "
            "lengths on the device and a result of one row pass a list of one Tensor"
        )
    first = out[0] if isinstance(out, (list, tuple)) and len(out) == 1 else out
    if isinstance(first, Tensor) and first.dim() == stacked + 1:
        return stacked
    if held is None or len(held) != count:  # refused later
        return None
    mine = held[planner.virtual_ranks[0]]
    if options.in_intervals is not None:
        try:
            mine = mine[1] - mine[0]
        except (TypeError, IndexError):  # refused later
            return None
    return stacked if (_is_compiling() or is_count(mine)) and mine > 1 else None


def _other_reading(planner: Planner, shards: Shards, terms: Terms, out: Any) -> Terms | None:
    """The terms of stacked shards ``(1, S_MAX, *F)``, where one row that was taken for a shard may be meant so: what
    the other processes pass decides."""
    if planner.world_size == 1 or out is not None or not _has_one_row(shards, planner):
        return None
    if terms.device_lengths or len(terms.row_shape) != shards.dim() - 1:  # type: ignore[union-attr]
        return None
    begin, end = terms.sources[planner.virtual_ranks[0]]
    return replace(terms, row_shape=terms.row_shape[1:]) if end - begin <= terms.row_shape[0] else None


def _has_one_row(shards: Shards, planner: Planner) -> bool:
    """Whether the shards may be one shard of one row, or stacked shards of one hosted rank."""
    return len(planner.virtual_ranks) == 1 and isinstance(shards, Tensor) and shards.dim() > 1 and shards.shape[0] == 1
