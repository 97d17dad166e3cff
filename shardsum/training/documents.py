"""Packed documents and windows: pure arithmetic.

One sequence holds documents, one after the other; ``cu_seqlens`` are their borders (``[0, 5, 9]``: documents ``[0, 5)``
and ``[5, 9)``). A window ``(left, right)`` lets the query at position p see the keys from ``p - left`` to
``p + right``; -1 is no limit. A causal mask is the window ``(-1, 0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..core.checks import as_index

Window = tuple[int, int]
CAUSAL: Window = (-1, 0)
UNLIMITED: Window = (-1, -1)
_FAR = 1 << 30


def effective_window(window: Sequence[int] | None, causal: bool) -> Window:
    """``(left, right)`` with the causal mask in it.

    Raises:
        ValueError: not a pair of ints of at least -1.
    """
    try:
        left, right = (-1, -1) if window is None else map(as_index, window)
    except (TypeError, ValueError):
        raise ValueError(f"window: expected a pair of ints (left, right), -1 for no limit, got {window!r}") from None
    if min(left, right) < -1:
        raise ValueError(f"window: ({left}, {right}), but both are at least -1 (no limit)")
    left, right = (-1 if side >= _FAR else side for side in (left, right))  # kernels take 32 bits, and add to them
    return left, 0 if causal else right


def check_borders(cu_seqlens: Sequence[int] | Tensor | None, total: int | None) -> list[int]:
    """Document borders as ints.

    Args:
        cu_seqlens: ints or an integer tensor on the CPU, from 0 to ``total``, never decreasing; None is one document.
        total: positions of the sequence; None where the borders tell.

    Raises:
        ValueError: no integers, or borders that do not start at 0, decrease, or end elsewhere.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            shape = tuple(cu_seqlens.shape)
            raise ValueError(f"cu_seqlens: expected integers of one dimension, got {cu_seqlens.dtype} {shape}")
        cu_seqlens = cu_seqlens.tolist()
    if cu_seqlens is None and total is None:
        raise ValueError("cu_seqlens: required where lengths are not given")
    try:
        borders = [0, total or 0] if cu_seqlens is None else list(map(as_index, cu_seqlens))
    except TypeError:
        raise ValueError(f"cu_seqlens: expected integers, got {cu_seqlens!r}") from None
    if not borders or borders[0] != 0:
        raise ValueError(f"cu_seqlens: the first border must be 0, got {borders[:1]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if b < a:
            raise ValueError(f"cu_seqlens: border {i + 1} is {b}, less than the {a} before it")
    if total is not None and borders[-1] != total:
        raise ValueError(f"cu_seqlens: the last border is {borders[-1]}, but the lengths sum to {total}")
    return borders


def documents_of(borders: Sequence[int], begin: int, end: int) -> tuple[Tensor, Tensor]:
    """``(document, position in it)`` of the positions ``[begin, end)``, int64 on the CPU.

    Example:
        >>> documents_of([0, 2, 5], 1, 4)
        (tensor([0, 1, 1]), tensor([1, 0, 1]))
    """
    starts = torch.tensor(borders, dtype=torch.int64, device="cpu")
    positions = torch.arange(begin, end, device="cpu")
    document = torch.searchsorted(starts, positions, right=True) - 1
    return document, positions - starts[document]


def cu_seqlens_from_position_ids(position_ids: Tensor) -> list[int]:
    """The borders of the documents that ``position_ids`` count: each starts at 0 and goes up by one.

    Args:
        position_ids: ``(S,)`` or ``(B, S)``, integers; rows follow each other, and each starts a document. On a GPU the
            host waits for it, once.

    Raises:
        ValueError: a position that is neither 0 nor the one after its predecessor.

    Example:
        >>> cu_seqlens_from_position_ids(torch.tensor([[0, 1, 2, 0, 1]]))
        [0, 3, 5]
    """
    if position_ids.dim() not in (1, 2) or position_ids.is_floating_point():
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids: expected integers (S,) or (B, S), got {position_ids.dtype} {shape}")
    rows = position_ids.detach().cpu().long()
    before = torch.nn.functional.pad(rows, (1, 0), value=-1)[..., :-1].flatten()
    flat = rows.flatten()
    wrong = ((flat != 0) & (flat != before + 1)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"position_ids: entry {i} is {flat[i]}, expected 0 or {before[i] + 1}")
    return [*(flat == 0).nonzero().flatten().tolist(), flat.numel()]
