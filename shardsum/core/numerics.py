"""Which dtypes a sum takes, in which dtype it accumulates, and what it may return.

======================  ===========  =======================================
input                   accumulator  output (default first)
======================  ===========  =======================================
float16 bfloat16        float32      the input's, or any of float16, bfloat16,
float32                              float32
float64                 float64      float64, float32
integers, bool          int64        int64 (wraps modulo 2^64)
======================  ===========  =======================================

``float64 -> float16/bfloat16`` is refused because torch rounds it twice (through float32).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from numbers import Real

import torch

_SHORT_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
)  # fmt: skip

#: Dtypes the native kernels read directly; the other integers are converted to int64 first.
NATIVE_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


def accumulator_dtype(dtype: torch.dtype, name: str = "shards") -> torch.dtype:
    """The dtype in which values of ``dtype`` are added.

    Raises:
        ValueError: ``dtype`` cannot be summed (complex, float8, quantized). ``name`` is the argument's.
    """
    if dtype in _SHORT_FLOATS:
        return torch.float32
    if dtype == torch.float64:
        return torch.float64
    if dtype in _INTEGERS:
        return torch.int64
    raise ValueError(
        f"{name}: dtype {dtype} cannot be summed; use a float16/bfloat16/float32/float64, integer or bool tensor"
    )


def resolve_out_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result for inputs of ``dtype``.

    Raises:
        ValueError: the pair is not in the module's table.
    """
    acc = accumulator_dtype(dtype)
    if out_dtype is None:
        return torch.int64 if acc == torch.int64 else dtype
    if acc == torch.float32:
        allowed: tuple[torch.dtype, ...] = _SHORT_FLOATS
    elif acc == torch.float64:
        allowed = (torch.float64, torch.float32)
    else:
        allowed = (torch.int64,)
    if out_dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise ValueError(f"out_dtype: {out_dtype} is not possible for inputs of {dtype}; choose from {names}")
    return out_dtype


@dataclass(frozen=True, eq=False)
class Reduce:
    """What happens to the rows of a sink. ``op`` "copy" moves bits (disjoint sources); "sum" and "mean" add.

    ``scale`` multiplies the result; ``dtype`` is the result's. Scales are equal where they print alike: NaN equals NaN,
    0.0 differs from -0.0.
    """

    op: str
    scale: float | None
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduce) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str, torch.dtype]:
        return self.op, repr(self.scale), self.dtype

    @property
    def empty(self) -> float:
        """The sum of nothing: +0.0, multiplied like any other (a negative scale makes it -0.0)."""
        return 0.0 if self.scale is None else 0.0 * self.scale


def check_op(op: str, scale: float | None, dtype: torch.dtype) -> float | None:
    """``scale`` as a float, checked with ``op`` for shards of ``dtype``.

    Raises:
        ValueError: ``op`` is not "sum" or "mean"; mean or scale of integers; ``scale`` is not a number (a Tensor's
            gradient would be lost), or one that is finite but not in the accumulator's dtype. (It would turn the 0
            of every position that nobody contributes to into NaN. An explicit inf or NaN does what IEEE says.)
    """
    if not isinstance(op, str) or op not in ("sum", "mean"):  # an array equals a text, too
        raise ValueError(f'op: expected "sum" or "mean", got {op!r}')
    if accumulator_dtype(dtype) == torch.int64 and (op == "mean" or scale is not None):
        what = "mean" if op == "mean" else "scale"
        raise ValueError(f"{what} of {dtype} has no exact result; convert the shards to a floating dtype first")
    if scale is None or torch.compiler.is_compiling():  # may be a symbol there; the operator sees its value
        return scale
    try:
        if isinstance(scale, Real) and not isinstance(scale, bool):
            return check_scale(float(scale), dtype)
    except OverflowError:
        pass
    raise ValueError(f"scale: expected a float, got {scale!r}")


def check_scale(scale: float, dtype: torch.dtype) -> float:
    """``scale`` itself; ValueError when it is finite, but not in the dtype in which values of ``dtype`` are added."""
    acc = accumulator_dtype(dtype)
    if acc == torch.float32:
        try:
            struct.pack("<f", scale)
        except OverflowError:
            raise ValueError(f"scale: {scale} is beyond {acc}, in which shards of {dtype} are added") from None
    return scale
