"""The raw operators that csrc/ implements, and their plain-torch fallback.

``out`` is contiguous ``(size, *F)`` and is overwritten (or added to, with ``accumulate``). Callers have checked
shapes, dtypes and devices: these schemas are the boundary to native code, not an interface for users. None has
autograd or a fake implementation; :mod:`shardsum.local.functional` wraps them in operators that do.

sum_rows           rows[r] is ``(length_r, *F)``, contiguous, at position ``starts[r]``; what lies outside
                   ``[0, size)`` is dropped (starts may be negative). Read in place.
sum_rows_carry     the same sum, going on from ``carry``, which has out's shape and the accumulator's dtype: what rows
                   elsewhere added up to, unrounded, never -0.0, ``carried`` of them at every position (for the mean).
                   None is +0.0. With ``out`` in that dtype, no mean and no scale, the sum can go on elsewhere; ``out``
                   may be ``carry``.
sum_padded         x is ``(R, S_MAX, *F)``, each ``x[r]`` contiguous (any stride between them);
                   ``starts`` empty means all 0.
sum_padded_device  the same with int32 or int64 tensors on x's device, never synchronised; values are clamped
                   (csrc/row_table.h).
sum_masked         mask is bool ``(R, size)``, or int32 words ``(R, ceil(size / 32))``: bit ``j % 32`` of word
                   ``j // 32``.

Two more are for the usual call with as little of the host's time as possible: ``sum_checked`` is ``sum_padded``
without starts into any ``out``, and ``sum_checked_new`` allocates the result. They take tensors alone, which cost the
dispatcher least, and run only through ``native.make_usual_sum``'s function or ``native.call_with(operator, lengths,
size, mean, scale, *tensors)``, which hand them the rest. ``lengths`` are a list, or a CPU int64 tensor (``_lengths``).
``_list`` takes whole shards, all from position 0, and ``lengths`` None. ``size`` are the positions of ``out``, -1 for
the longest shard's or x's, which have to be these (``sum_checked_new_list`` ignores it). They check everything
themselves except gradients, raise a RuntimeError that says little where a call is bad or unusual, and have no fallback.

The native library, once loaded, registers CPU (and CUDA) kernels that take precedence over the fallback here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import reference
from ..core.numerics import resolve_out_dtype
from ..native import loader as native

_library = torch.library.Library("shardsum", "FRAGMENT")
_TAIL = "bool mean, float? scale, bool accumulate) -> ()"
for _schema in (
    "sum_rows(Tensor(a!) out, Tensor[] rows, int[] starts, " + _TAIL,
    "sum_rows_carry(Tensor(a!) out, Tensor? carry, Tensor[] rows, int[] starts, int carried, bool mean, float? scale) "
    "-> ()",
    "sum_padded(Tensor(a!) out, Tensor x, int[] starts, int[] lengths, " + _TAIL,
    "sum_padded_device(Tensor(a!) out, Tensor x, Tensor? starts, Tensor lengths, " + _TAIL,
    "sum_masked(Tensor(a!) out, Tensor x, Tensor mask, " + _TAIL,
    "sum_checked(Tensor(a!) out, Tensor x) -> ()",
    "sum_checked.lengths(Tensor(a!) out, Tensor x, Tensor lengths) -> ()",
    "sum_checked.list(Tensor(a!) out, Tensor[] shards) -> ()",
    "sum_checked_new(Tensor x) -> Tensor",
    "sum_checked_new.lengths(Tensor x, Tensor lengths) -> Tensor",
    "sum_checked_new.list(Tensor[] shards) -> Tensor",
):
    _library.define(_schema)


def _sum_rows(
    out: Tensor, rows: list[Tensor], starts: list[int], mean: bool, scale: float | None, accumulate: bool
) -> None:
    native.note_fallback(out.device)
    previous = out if accumulate else None
    op = "mean" if mean else "sum"
    out.copy_(
        reference.ragged_sum(rows, starts, out.shape[0], op=op, scale=scale, out_dtype=out.dtype, previous=previous)
    )


def _sum_rows_carry(
    out: Tensor, carry: Tensor | None, rows: list[Tensor], starts: list[int], carried: int, mean: bool,
    scale: float | None,
) -> None:  # fmt: skip
    native.note_fallback(out.device)
    op = "mean" if mean else "sum"
    total = reference.ragged_sum(
        rows, starts, out.shape[0], op=op, scale=scale, out_dtype=out.dtype, carry=carry, carried=carried
    )
    out.copy_(total)


def _sum_padded(
    out: Tensor, x: Tensor, starts: list[int], lengths: list[int], mean: bool, scale: float | None, accumulate: bool
) -> None:
    if len(lengths) != x.shape[0] or any(not 0 <= n <= x.shape[1] for n in lengths):
        raise RuntimeError(f"sum_padded: lengths {lengths} do not fit {tuple(x.shape)}")  # as the native one does
    resolve_out_dtype(x.dtype, out.dtype)
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    _sum_rows(out, rows, starts or [0] * len(rows), mean, scale, accumulate)


def _sum_padded_device(
    out: Tensor, x: Tensor, starts: Tensor | None, lengths: Tensor, mean: bool, scale: float | None, accumulate: bool
) -> None:
    # Without a synchronisation the bounds are a mask over gathered positions.
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
    _sum_masked(out, rows, mask, mean, scale, accumulate)


def _sum_masked(out: Tensor, x: Tensor, mask: Tensor, mean: bool, scale: float | None, accumulate: bool) -> None:
    if mask.dtype != torch.bool:
        shifts = torch.arange(32, device=mask.device, dtype=torch.int32)
        mask = ((mask[..., None] >> shifts) & 1).flatten(1)[:, : x.shape[1]].to(torch.bool)
    native.note_fallback(out.device)
    previous = out if accumulate else None
    op = "mean" if mean else "sum"
    out.copy_(reference.masked_sum(x, mask, op=op, scale=scale, out_dtype=out.dtype, previous=previous))


def _refuse(*args: object) -> None:
    raise RuntimeError("no native kernel")


for _name, _fallback in (
    ("sum_rows", _sum_rows),
    ("sum_rows_carry", _sum_rows_carry),
    ("sum_padded", _sum_padded),
    ("sum_padded_device", _sum_padded_device),
    ("sum_masked", _sum_masked),
):
    _library.impl(_name, _fallback, "CompositeExplicitAutograd")

# A batch would hide that it requires grad; modes and traces would record what has no fake and no fallback; where lazy
# signs are resolved into a copy, nobody sees that it shared memory with `out`.
_REFUSED = (
    "CompositeExplicitAutograd", "FuncTorchBatched", "Batched", "Python", "Tracer", "Negative", "Conjugate",
    "ZeroTensor",
)  # fmt: skip
for _name in ("sum_checked", "sum_checked_new"):
    for _form in ("", ".lengths", ".list"):
        for _key in _REFUSED:
            _library.impl(_name + _form, _refuse, _key)
        for _key in ("AutogradCPU", "AutogradCUDA"):  # who calls them has looked: the dispatcher need not again
            _library.impl(_name + _form, torch.library.fallthrough_kernel, _key)

# OpOverload.__call__ only forwards to _op, and costs a tenth of a small call.
sum_rows = torch.ops.shardsum.sum_rows.default._op
sum_rows_carry = torch.ops.shardsum.sum_rows_carry.default._op
sum_padded = torch.ops.shardsum.sum_padded.default._op
sum_padded_device = torch.ops.shardsum.sum_padded_device.default._op
sum_masked = torch.ops.shardsum.sum_masked.default._op
sum_checked = torch.ops.shardsum.sum_checked.default._op
sum_checked_lengths = torch.ops.shardsum.sum_checked.lengths._op
sum_checked_list = torch.ops.shardsum.sum_checked.list._op
sum_checked_new = torch.ops.shardsum.sum_checked_new.default._op
sum_checked_new_lengths = torch.ops.shardsum.sum_checked_new.lengths._op
sum_checked_new_list = torch.ops.shardsum.sum_checked_new.list._op
