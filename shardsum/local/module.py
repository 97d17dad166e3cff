"""MaskedSum: a sum over virtual ranks whose mask or lengths stay the same, with all about them worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.checks import as_ints, check_index_tensor, check_size, describe, is_strided
from ..core.numerics import NATIVE_DTYPES, check_op
from ..core.words import Op
from . import ops as operators
from .arguments import check_numerics, check_out
from .functional import deliver, run
from .kernels import unpack_bits
from .plan import SumPlan

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class MaskedSum(nn.Module):
    """Drop-in for ``(x * mask).sum(0)`` that adds in rank order and never reads what is masked out into a sum.

    It is a plan that its user holds: at construction the mask is read once. Where every row is one interval (a length
    per virtual rank is), forward sums intervals and reads no mask; else the mask is packed to one bit a position.
    Calling it costs the host less than :func:`shardsum.ragged_sum`, which has to look up what this module holds, plus
    what :class:`torch.nn.Module` adds to any call (``module.forward(x)`` goes without).

    Args:
        mask: bool ``(R, S_MAX)``; True contributes. It is fixed: writing to it later has no effect, nor has anything
            that converts, empties or fills the module's buffers.
        op, scale, out_dtype: as of :func:`shardsum.ragged_sum`.

    Attributes:
        intervals: ``[(begin, end)]`` per virtual rank when every row is one interval, else None.
        packed_mask: of a mask with gaps the words on the module's device, int32 ``(R, ceil(S_MAX / 32))``: position j
            is bit ``j % 32`` of word ``j // 32``. A non-persistent buffer: not in ``state_dict``, follows
            ``.to(device)``.

    Raises:
        ValueError: the mask is not a bool tensor of two dimensions with R >= 1, or another argument is malformed.

    Example:
        >>> module = MaskedSum(torch.tensor([[True, False, False], [True, True, False]]))
        >>> module(torch.tensor([[1.0, float("nan"), 5.0], [10.0, 20.0, 30.0]]))
        tensor([11., 20.,  0.])
    """

    packed_mask: Tensor | None
    _mask: Tensor | None

    if TYPE_CHECKING:  # nn.Module's is Any

        def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...

    def __init__(
        self, mask: Tensor, *, op: Op = "sum", scale: float | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        if not is_strided(mask) or mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] == 0 or mask.is_meta:
            where = " on meta" if isinstance(mask, Tensor) and mask.is_meta else ""
            raise ValueError(f"mask: expected a bool Tensor (R, S_MAX) with R >= 1, got {describe(mask)}{where}")
        intervals = row_intervals(mask)
        self._set(mask.shape[0], mask.shape[1], intervals, op, scale, out_dtype)
        if intervals is None:
            words = pack_bits(mask.detach())
            self._words = words.cpu()
            self.packed_mask = self._mask = words

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        size: int,
        *,
        op: Op = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> MaskedSum:
        """The sum of the first ``lengths[r]`` rows of every ``x[r]``, without a mask.

        Args:
            lengths: R ints, or an integer Tensor ``(R,)``, which is read once.
            size: S_MAX.

        Raises:
            ValueError: a length is not in [0, size], or another argument is malformed.

        Example:
            >>> MaskedSum.from_lengths([1, 3], 3)(torch.tensor([[10, 11, 12], [20, 21, 22]]))
            tensor([30, 21, 22])
        """
        if isinstance(lengths, Tensor):
            lengths = check_index_tensor("lengths", lengths, lengths.numel()).tolist()
        try:
            lengths = list(lengths)
        except TypeError:
            raise ValueError(f"lengths: expected ints or an integer Tensor, got {lengths!r}") from None
        lengths, size = as_ints("lengths", lengths, len(lengths)), check_size(size)
        if not lengths:
            raise ValueError("lengths: no virtual ranks")
        for r, n in enumerate(lengths):
            if not 0 <= n <= size:
                raise ValueError(f"lengths: virtual rank {r} has {n}, expected 0 to size {size}")
        module = cls.__new__(cls)
        module._set(len(lengths), size, [(0, n) for n in lengths], op, scale, out_dtype)
        return module

    def _set(
        self,
        num_ranks: int,
        capacity: int,
        intervals: list[tuple[int, int]] | None,
        op: str,
        scale: float | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        scale = check_op(op, scale, torch.float64)  # the shards' dtype is not known yet
        if out_dtype is not None and out_dtype not in NATIVE_DTYPES:
            raise ValueError(f"out_dtype: {out_dtype!r} is not a dtype that a sum has")
        self.shape, self.intervals = (num_ranks, capacity), intervals
        self._op, self._scale, self._out_dtype = op, scale, out_dtype
        rows = [(begin, begin, end - begin) for begin, end in intervals or ()]
        self._begins = [begin for begin, _, _ in rows] if any(begin for begin, _, _ in rows) else []
        self._lengths = [n for _, _, n in rows]
        self._plan = SumPlan(rows, capacity, capacity, op, scale, out_dtype).words()
        self.register_buffer("packed_mask", None, persistent=False)
        self._mask = None  # the buffer, found without nn.Module's search

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Sum ``x`` ``(R, S_MAX, *F)`` to ``(S_MAX, *F)`` of x's dtype (int64 for integers and bool) or ``out_dtype``.

        Args:
            out: receives the result, as of :func:`shardsum.ragged_sum`.

        Raises:
            ValueError: x has another R or S_MAX than the mask, or is on another device; or ``out`` is malformed.
        """
        if not _is_dynamo_compiling() and isinstance(x, Tensor):
            result = run(self._plan, x, out, self._mask)
            if result is not None:
                return result
        return self._checked(x, out)

    def _checked(self, x: Tensor, out: Tensor | None) -> Tensor:
        if not is_strided(x) or x.dim() < 2 or tuple(x.shape[:2]) != self.shape:
            raise ValueError(f"x: {describe(x)} does not begin with the mask's {self.shape}")
        scale, dtype = check_numerics(self._op, self._scale, x.dtype, self._out_dtype, out)
        check_out(out, [x], x.shape[1:], dtype)
        numerics = self._op, scale, dtype
        if self.packed_mask is not None:
            if x.device != self.packed_mask.device:
                raise ValueError(f"x: on {x.device}, but the mask is on {self.packed_mask.device}")
            return deliver(operators.masked_sum(x, self.packed_mask, *numerics), out)
        bounds = self._begins, self._begins, self._lengths
        return deliver(operators.padded_sum(x, *bounds, self.shape[1], *numerics), out)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MaskedSum:
        super()._apply(fn, recurse)
        if self.packed_mask is not None:  # converted or emptied: only where it went counts
            self.packed_mask = self._mask = self._words.to(self.packed_mask.device)
        return self

    @property
    def shard_mask(self) -> Tensor:
        """The mask, bool ``(R, S_MAX)``: a new tensor each time."""
        if self.packed_mask is not None:
            return unpack_bits(self.packed_mask, self.shape[1])
        position = torch.arange(self.shape[1], device="cpu")
        begin, end = torch.tensor(self.intervals, dtype=torch.int64, device="cpu").T[..., None]
        return (position >= begin) & (position < end)

    def extra_repr(self) -> str:
        what = f"intervals={self.intervals}" if self.intervals is not None else "packed to bits"
        return f"num_virtual_ranks={self.shape[0]}, s_max={self.shape[1]}, {what}"


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
