"""The raw operators that csrc/ implements, and their plain-torch fallback.

These schemas are the boundary to native code, not an interface for users. No operator has autograd or a fake
implementation; :mod:`shardsum.local.ops` wraps them in operators that do.

Sums by a plan, a CPU int64 tensor that :mod:`shardsum.local.plan` makes. Shards have any layout. The operators check
all that depends on the tensors and raise a RuntimeError where a call is bad; :mod:`shardsum.local.functional` explains:

sum_plan          into ``out``, contiguous ``(size, *F)``, of x ``(R, S_MAX, *F)``
sum_plan.list     of a list of shards ``(capacity_r, *F)``
sum_plan.masked   of x where mask is True: bool ``(R, S_MAX)``, or int32 words ``(R, ceil(S_MAX / 32))``, in which
                  position j is bit ``j % 32`` of word ``j // 32``; the plan has no rows
sum_plan_new      the same three into a new tensor
spread_plan       the adjoint: a new ``(num_shards, capacity, *F)`` in which every shard's rows are copies of the
                  positions of x ``(size, *F)`` that they contribute to, and all other rows zeros; any dtype. What a
                  mean or a scale does to x, the caller has done.

Sums of rows as collectives have them. Callers have checked shapes, dtypes and devices; ``out`` is contiguous
``(size, *F)`` and is overwritten:

sum_rows           rows[r] is ``(length_r, *F)``, contiguous, at position ``starts[r]``; what lies outside
                   ``[0, size)`` is dropped (starts may be negative). Read in place. The sum goes on from ``carry``,
                   which has out's shape and the accumulator's dtype: what rows elsewhere added up to, unrounded, never
                   -0.0, ``carried`` of them at every position (for the mean). None is +0.0. With ``out`` in that
                   dtype, no mean and no scale, the sum can go on elsewhere; ``out`` may be ``carry``.
sum_padded_device  x is ``(R, S_MAX, *F)``, each ``x[r]`` contiguous (any stride between them), with int32 or int64
                   lengths and starts on x's device, never synchronised; values are clamped (csrc/row_table.h).

The native library, once loaded, registers CPU (and CUDA) kernels that take precedence over the fallback here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core import reference
from ..core.checks import overlap
from ..core.numerics import check_op, resolve_out_dtype
from ..native import loader as native
from .plan import SumPlan

_library = torch.library.Library("shardsum", "FRAGMENT")
for _schema in (
    "sum_plan(Tensor(a!) out, Tensor x, Tensor plan) -> ()",
    "sum_plan.list(Tensor(a!) out, Tensor[] shards, Tensor plan) -> ()",
    "sum_plan.masked(Tensor(a!) out, Tensor x, Tensor mask, Tensor plan) -> ()",
    "sum_plan_new(Tensor x, Tensor plan) -> Tensor",
    "sum_plan_new.list(Tensor[] shards, Tensor plan) -> Tensor",
    "sum_plan_new.masked(Tensor x, Tensor mask, Tensor plan) -> Tensor",
    "spread_plan(Tensor x, Tensor plan, int num_shards, int capacity) -> Tensor",
    "sum_rows(Tensor(a!) out, Tensor? carry, Tensor[] rows, int[] starts, int carried, bool mean, float? scale) -> ()",
    "sum_padded_device(Tensor(a!) out, Tensor x, Tensor? starts, Tensor lengths, bool mean, float? scale) -> ()",
):
    _library.define(_schema)


# The fallback


def _sum_plan_new(x: Tensor, plan: Tensor, out: Tensor | None = None) -> Tensor:
    if x.dim() < 2 or x.layout != torch.strided:
        raise RuntimeError("sum_plan: x is not (R, S_MAX, *F)")
    return _sum_plan_new_list(list(x.unbind(0)), plan, out)


def _sum_plan_new_list(shards: list[Tensor], plan: Tensor, out: Tensor | None = None) -> Tensor:
    p = SumPlan.from_words(plan)
    if not shards or any(s.dim() == 0 or s.layout != torch.strided for s in shards):
        raise RuntimeError("sum_plan: shards are not (length, *F)")
    first, capacities = shards[0], [s.shape[0] for s in shards]
    for shard in shards:
        if shard.dtype != first.dtype or shard.device != first.device or shard.shape[1:] != first.shape[1:]:
            raise RuntimeError("sum_plan: the shards differ in dtype, device or trailing shape")
    rows = p.rows or [(0, 0, n) for n in capacities]
    size = max(capacities) if p.size is None else p.size
    fits = len(rows) == len(shards) and p.capacity in (None, max(capacities))
    if not fits or any(f + n > c or s + n > size for (s, f, n), c in zip(rows, capacities)):
        raise RuntimeError(f"sum_plan: {p} does not fit shards of {capacities} rows")
    native.note_fallback(first.device)
    cut = [shard[first : first + n] for shard, (_, first, n) in zip(shards, rows)]
    return reference.ragged_sum(cut, [start for start, _, _ in rows], size, **_numerics(p, first.dtype, out))


def _sum_plan_new_masked(x: Tensor, mask: Tensor, plan: Tensor, out: Tensor | None = None) -> Tensor:
    p = SumPlan.from_words(plan)
    mask = unpack_bits(mask, x.shape[1])
    if p.rows or x.dim() < 2 or mask.shape != x.shape[:2] or {p.size, p.capacity} - {None, x.shape[1]}:
        raise RuntimeError("sum_plan: mask and plan do not fit x")
    native.note_fallback(x.device)
    return reference.masked_sum(x, mask, **_numerics(p, x.dtype, out))


def _spread_plan(x: Tensor, plan: Tensor, num_shards: int, capacity: int) -> Tensor:
    p = SumPlan.from_words(plan)
    rows = p.rows or [(0, 0, capacity)] * num_shards
    if len(rows) != num_shards or x.shape[0] != (capacity if p.size is None else p.size):
        raise RuntimeError(f"spread_plan: {p} does not fit {num_shards} shards and {x.shape[0]} positions")
    native.note_fallback(x.device)
    spread = x.new_zeros((num_shards, capacity, *x.shape[1:]))
    for shard, (start, first, n) in zip(spread, rows):
        shard[first : first + n] = x[start : start + n]
    return spread


def _numerics(plan: SumPlan, dtype: torch.dtype, out: Tensor | None) -> dict[str, Any]:
    if plan.accumulate and out is None:
        raise RuntimeError("sum_plan: nothing to add to")
    if out is not None and plan.out_dtype not in (None, out.dtype):
        raise RuntimeError(f"sum_plan: out is {out.dtype}, but the plan's is {plan.out_dtype}")
    wanted = plan.out_dtype if out is None else out.dtype
    return {
        "op": plan.op,
        "scale": check_op(plan.op, plan.scale, dtype),
        "out_dtype": resolve_out_dtype(dtype, wanted),
        "previous": out if plan.accumulate else None,
    }


def _into(compute: Callable[..., Tensor]) -> Callable[..., None]:
    """The form of a fallback that writes into ``out``."""

    def write(out: Tensor, shards: Tensor | list[Tensor], *rest: Any) -> None:
        if any(overlap(out, x) for x in ([shards] if isinstance(shards, Tensor) else shards)):
            raise RuntimeError("sum_plan: out shares memory with the shards")
        result = compute(shards, *rest, out)
        if result.shape != out.shape or result.device != out.device or not out.is_contiguous():
            raise RuntimeError(f"sum_plan: out is {tuple(out.shape)} on {out.device}, not what the plan gives")
        out.copy_(result)

    return write


def unpack_bits(mask: Tensor, size: int) -> Tensor:
    """A bool mask ``(R, size)`` of int32 words ``(R, ceil(size / 32))``; a bool mask itself."""
    if mask.dtype == torch.bool:
        return mask
    shifts = torch.arange(32, device=mask.device, dtype=torch.int32)
    return ((mask[..., None] >> shifts) & 1).flatten(1)[:, :size].to(torch.bool)


def _sum_rows(
    out: Tensor, carry: Tensor | None, rows: list[Tensor], starts: list[int], carried: int, mean: bool,
    scale: float | None,
) -> None:  # fmt: skip
    native.note_fallback(out.device)
    op = "mean" if mean else "sum"
    total = reference.ragged_sum(
        rows, starts, out.shape[0], op=op, scale=scale, out_dtype=out.dtype, carry=carry, carried=carried
    )
    out.copy_(total)


def _sum_padded_device(
    out: Tensor, x: Tensor, starts: Tensor | None, lengths: Tensor, mean: bool, scale: float | None
) -> None:
    # Without a synchronisation the bounds are a mask over gathered positions.
    native.note_fallback(out.device)
    capacity, size = x.shape[1], out.shape[0]
    begin = torch.zeros_like(lengths) if starts is None else starts.clamp(0, size)
    local = torch.arange(size, device=x.device) - begin[:, None]
    mask = (local >= 0) & (local < lengths.clamp(0, capacity)[:, None])
    if starts is None and capacity == size:
        rows = x
    elif capacity == 0:
        rows = x.new_zeros((x.shape[0], size, *x.shape[2:]))
    else:
        index = local.clamp(0, capacity - 1).reshape(*local.shape, *[1] * (x.dim() - 2))
        rows = torch.gather(x, 1, index.expand(-1, -1, *x.shape[2:]))
    op = "mean" if mean else "sum"
    out.copy_(reference.masked_sum(rows, mask, op=op, scale=scale, out_dtype=out.dtype))


def _after_loading(overload: Any, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The fallback. It first loads the native library where that has not been done: that may have the kernel."""
    return lambda *args: overload(*args) if native.load() else fallback(*args)


_ops = torch.ops.shardsum
for _overload, _fallback in (
    (_ops.sum_plan.default, _into(_sum_plan_new)),
    (_ops.sum_plan.list, _into(_sum_plan_new_list)),
    (_ops.sum_plan.masked, _into(_sum_plan_new_masked)),
    (_ops.sum_plan_new.default, _sum_plan_new),
    (_ops.sum_plan_new.list, _sum_plan_new_list),
    (_ops.sum_plan_new.masked, _sum_plan_new_masked),
    (_ops.spread_plan.default, _spread_plan),
    (_ops.sum_rows.default, _sum_rows),
    (_ops.sum_padded_device.default, _sum_padded_device),
):
    _library.impl(_overload.name(), _after_loading(_overload, _fallback), "CompositeExplicitAutograd")


# Callers of the sums by a plan have checked requires_grad and forward mode, so the dispatcher need not. What they have
# not checked is refused, and goes to the operators with autograd, fake implementations and batching rules:
# transforms of torch.func and batches, dispatch modes and subclasses. So are lazy signs where there is an `out`: the
# dispatcher would resolve them into a copy, and nobody would see that it shared memory with `out`.
def _refuse(*args: object) -> None:
    raise RuntimeError("shardsum: for plain tensors only")


_TRANSFORMS = ("FuncTorchDynamicLayerFrontMode", "Batched", "Python")
for _name, _refused in (("sum_plan", (*_TRANSFORMS, "Negative", "Conjugate")), ("sum_plan_new", _TRANSFORMS)):
    for _form in ("", ".list", ".masked"):
        for _key in _refused:
            _library.impl(_name + _form, _refuse, _key)
        for _key in ("AutogradCPU", "AutogradCUDA"):
            _library.impl(_name + _form, torch.library.fallthrough_kernel, _key)

# OpOverload.__call__ only forwards to _op, and costs a tenth of a small call.
sum_plan = _ops.sum_plan.default._op
sum_plan_list = _ops.sum_plan.list._op
sum_plan_masked = _ops.sum_plan.masked._op
sum_plan_new = _ops.sum_plan_new.default._op
sum_plan_new_list = _ops.sum_plan_new.list._op
sum_plan_new_masked = _ops.sum_plan_new.masked._op
spread_plan = _ops.spread_plan.default._op
sum_rows = _ops.sum_rows.default._op
sum_padded_device = _ops.sum_padded_device.default._op
