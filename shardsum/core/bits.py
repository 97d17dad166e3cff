"""What "the same bits" means here, and where two results first differ.

Two tensors are equal when shape and dtype agree and their integer views agree, any NaN being equal to any NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def int_view(x: Tensor) -> Tensor:
    """The bits of ``x`` as an integer tensor of the same shape, every NaN replaced by one NaN."""
    x = x.detach().contiguous()
    if x.dtype.is_floating_point:
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    elif x.dtype == torch.bool:
        x = x.to(torch.uint8)
    return x.view(_INT_VIEW[x.element_size()])


def equal(a: Tensor, b: Tensor) -> bool:
    """True when the two tensors (on any devices) are the same bit pattern."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(int_view(a).cpu(), int_view(b).cpu())


def digest(*tensors: Tensor) -> str:
    """A SHA-256 over dtype, shape and bits of the tensors, in hexadecimal."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(f"{t.dtype}{tuple(t.shape)}".encode())
        sha.update(int_view(t).cpu().numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class Difference:
    """The first element in which two results differ (in row-major order)."""

    name: str
    index: tuple[int, ...]
    a: object
    b: object
    ulps: int | None
    count: int

    def __str__(self) -> str:
        where = f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name
        distance = "" if self.ulps is None else f", {self.ulps} ulp apart"
        more = f"; {self.count} elements differ" if self.count > 1 else ""
        return f"{where}: {self.a!r} against {self.b!r}{distance}{more}"


def first_difference(a: Tensor | Mapping[str, Tensor], b: Tensor | Mapping[str, Tensor]) -> Difference | None:
    """The first difference between two tensors or two state dicts, or None when they are the same bits.

    State dicts are compared by sorted key; a key that only one of them has is a difference. ``ulps`` counts
    representable values between two finite floats of one dtype (None for integers, NaN and infinities).

    Raises:
        ValueError: anything else than two tensors or two mappings of tensors.

    Example:
        >>> first_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]))
        Difference(name='tensor', index=(1,), a=2.0, b=2.000000238418579, ulps=1, count=1)
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference("tensor", a, b)
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        raise ValueError("first_difference: pass two tensors or two mappings of tensors, not one of each")
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return Difference(name, (), name in a, name in b, None, 1)
        if not (isinstance(a[name], Tensor) and isinstance(b[name], Tensor)):
            raise ValueError(f"first_difference: {name} is {a[name]!r} and {b[name]!r}, expected two tensors")
        found = _tensor_difference(name, a[name], b[name])
        if found is not None:
            return found
    return None


def _tensor_difference(name: str, a: Tensor, b: Tensor) -> Difference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(name, (), f"{a.dtype}{tuple(a.shape)}", f"{b.dtype}{tuple(b.shape)}", None, 1)
    bits_a, bits_b = int_view(a).cpu(), int_view(b).cpu()
    differs = (bits_a != bits_b).flatten()
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(differs.to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), a.shape)) if a.dim() else ()
    value_a, value_b = a.detach().flatten()[flat].item(), b.detach().flatten()[flat].item()
    ulps = None
    if a.dtype.is_floating_point and all(abs(v) < float("inf") for v in (value_a, value_b)):
        ulps = abs(_ordered(bits_a.flatten()[flat]) - _ordered(bits_b.flatten()[flat]))
    return Difference(name, index, value_a, value_b, ulps, count)


def _ordered(bits: Tensor) -> int:
    """Sign-magnitude bits as an integer that grows with the float's value; both zeros are 0."""
    value, width = int(bits), bits.element_size() * 8
    return value if value >= 0 else -(value + (1 << (width - 1)))
