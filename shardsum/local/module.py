"""Modules: the sum over virtual ranks of masked positions, with everything about the mask worked out beforehand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.checks import describe, is_strided, needs_grad
from ..core.numerics import resolve_out_dtype
from ..native import loader as native
from . import kernels
from . import ops as operators
from .functional import masked_sum, ragged_sum


class MaskedSum(nn.Module):
    """Drop-in for ``(x * mask).sum(0)`` that adds in rank order and never reads what is masked out into a sum.

    At construction the mask is read once: where every row is one interval (a length per virtual rank is), forward sums
    intervals and reads no mask at all; else the mask is packed to one bit a position.

    Args:
        mask: bool ``(R, S_MAX)``; True contributes. It is fixed: writing to it later has no effect.

    Attributes:
        shard_mask: the mask, a non-persistent buffer (not in ``state_dict``; follows ``.to(device)``).
        intervals: ``[(begin, end)]`` per virtual rank when every row is one interval, else None.

    Raises:
        ValueError: the mask is not a bool tensor of two dimensions with R >= 1.

    Example:
        >>> module = MaskedSum(torch.tensor([[True, False, False], [True, True, False]]))
        >>> module(torch.tensor([[1.0, float("nan"), 5.0], [10.0, 20.0, 30.0]]))
        tensor([11., 20.,  0.])
    """

    shard_mask: Tensor
    packed_mask: Tensor | None

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not is_strided(mask) or mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] == 0 or mask.is_meta:
            where = " on meta" if isinstance(mask, Tensor) and mask.is_meta else ""
            raise ValueError(f"mask: expected a bool Tensor (R, S_MAX) with R >= 1, got {describe(mask)}{where}")
        mask = mask.detach().clone(memory_format=torch.contiguous_format)
        self.intervals = row_intervals(mask)
        self.register_buffer("shard_mask", mask, persistent=False)
        self.register_buffer("packed_mask", pack_bits(mask) if self.intervals is None else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Sum ``x`` ``(R, S_MAX, *F)`` to ``(S_MAX, *F)`` of x's dtype (int64 for integers and bool).

        Raises:
            ValueError: x has another R or S_MAX than the mask, or is on another device.
        """
        if not is_strided(x) or x.dim() < 2 or x.shape[:2] != self.shard_mask.shape:
            raise ValueError(f"x: {describe(x)} does not begin with the mask's {tuple(self.shard_mask.shape)}")
        if x.device != self.shard_mask.device:
            raise ValueError(f"x: on {x.device}, but the mask is on {self.shard_mask.device}")
        if self.intervals is not None:
            return self._sum_intervals(x, self.intervals)
        if torch.compiler.is_compiling() or needs_grad([x]):
            return masked_sum(x, self.shard_mask)
        native.load()
        out = x.new_empty(x.shape[1:], dtype=resolve_out_dtype(x.dtype, None))
        kernels.sum_masked(out, operators.readable(operators.row_contiguous(x)), self.packed_mask, False, None, False)
        return out

    def _sum_intervals(self, x: Tensor, intervals: list[tuple[int, int]]) -> Tensor:
        lengths = [end - begin for begin, end in intervals]
        if all(begin == 0 for begin, _ in intervals):
            return ragged_sum(x, lengths, size=x.shape[1])
        shards = [row.narrow(0, begin, n) for row, (begin, _), n in zip(x.unbind(0), intervals, lengths)]
        return ragged_sum(shards, starts=[begin for begin, _ in intervals], size=x.shape[1])

    def extra_repr(self) -> str:
        ranks, capacity = self.shard_mask.shape
        what = f"intervals={self.intervals}" if self.intervals is not None else "packed to bits"
        return f"num_virtual_ranks={ranks}, s_max={capacity}, {what}"


def row_intervals(mask: Tensor) -> list[tuple[int, int]] | None:
    """``(begin, end)`` of the True positions of every row of ``(R, S)``, or None when a row has a gap.

    An all-False row is ``(0, 0)``.
    """
    if mask.shape[1] == 0:
        return [(0, 0)] * mask.shape[0]
    position = torch.arange(mask.shape[1], device=mask.device)
    count = mask.sum(1)
    begin = torch.where(mask, position, mask.shape[1]).amin(1)
    end = torch.where(mask, position + 1, 0).amax(1)
    rows = torch.stack([count, begin, end], dim=1).tolist()
    if any(n and hi - lo != n for n, lo, hi in rows):
        return None
    return [(lo, hi) if n else (0, 0) for n, lo, hi in rows]


def pack_bits(mask: Tensor) -> Tensor:
    """int32 words ``(R, ceil(S / 32))`` of a bool mask ``(R, S)``: position j is bit ``j % 32`` of word ``j // 32``."""
    padded = nn.functional.pad(mask, (0, -mask.shape[1] % 32)).unflatten(1, (-1, 32))
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (padded.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)
