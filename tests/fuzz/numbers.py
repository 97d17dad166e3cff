"""Numbers of every dtype as numpy arrays, bf16 as its bits in uint16: random ones, conversions, comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray


@dataclass(frozen=True)
class Kind:
    """A dtype: what numpy stores it in, what torch calls it, and what its sums are accumulated in."""

    name: str
    stored: type[np.generic]
    torch: torch.dtype
    accumulator: type[np.generic]

    @property
    def is_float(self) -> bool:
        return self.accumulator is not np.uint64


KINDS = {
    k.name: k
    for k in [
        Kind("fp16", np.float16, torch.float16, np.float32),
        Kind("bf16", np.uint16, torch.bfloat16, np.float32),
        Kind("fp32", np.float32, torch.float32, np.float32),
        Kind("fp64", np.float64, torch.float64, np.float64),
        Kind("uint8", np.uint8, torch.uint8, np.uint64),
        Kind("int8", np.int8, torch.int8, np.uint64),
        Kind("int16", np.int16, torch.int16, np.uint64),
        Kind("int32", np.int32, torch.int32, np.uint64),
        Kind("int64", np.int64, torch.int64, np.uint64),
        Kind("bool", np.bool_, torch.bool, np.uint64),
    ]
}


def out_kinds(kind: Kind) -> list[Kind]:
    """The dtypes that a sum may have, the default first."""
    if not kind.is_float:
        return [KINDS["int64"]]
    if kind.name == "fp64":
        return [kind, KINDS["fp32"]]
    return [kind, *(KINDS[n] for n in ("fp16", "bf16", "fp32") if n != kind.name)]


def widened(x: Array, kind: Kind) -> Array:
    """Exactly, in the accumulator's dtype; integers modulo 2**64."""
    if kind.name == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.int64).view(np.uint64) if not kind.is_float else x.astype(kind.accumulator)


def rounded(x: Array, kind: Kind) -> Array:
    """Once, to the nearest, ties to even."""
    if kind.name == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16)
    return x.view(np.int64) if not kind.is_float else x.astype(kind.stored)


def random(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> Array:
    """Values whose sum depends on order and precision, one in twenty any bits: NaN, infinities, -0.0, denormals."""
    width = np.dtype(kind.stored).itemsize
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * width), dtype=f"u{width}").reshape(shape)
    if kind.name == "bool":
        return (bits & 1).astype(np.bool_)
    if not kind.is_float:
        return bits.view(kind.stored)
    usual = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 13, shape)
    usual = rounded(usual.astype(kind.accumulator), kind)
    return np.where(rng.random(shape) < 0.05, bits.view(kind.stored), usual)


def to_torch(x: Array, kind: Kind) -> torch.Tensor:
    """A tensor with memory of its own."""
    x = np.array(x, order="C")
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if kind.name == "bf16" else torch.from_numpy(x)


def from_torch(t: torch.Tensor, kind: Kind) -> Array:
    t = t.detach().contiguous()
    return t.view(torch.int16).numpy().view(np.uint16) if kind.name == "bf16" else t.numpy()


def difference(actual: torch.Tensor, expected: Array, kind: Kind, any_nan: bool = True) -> str | None:
    """The first element whose bits differ; with ``any_nan`` every NaN is as good as any other."""
    if actual.dtype != kind.torch or tuple(actual.shape) != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)}, not {kind.torch} {expected.shape}"
    got = from_torch(actual, kind)
    unsigned = f"u{got.dtype.itemsize}"
    wrong = got.view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    if any_nan and kind.is_float:
        wrong &= ~(np.isnan(widened(got, kind)) & np.isnan(widened(expected, kind)))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} elements differ, first {at}: {got[at]!r}, not {expected[at]!r}"
