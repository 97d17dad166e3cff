"""One virtual rank's chunk of a batch, as a model's layers see it: tensors with a batch dim, never empty.

Models hand a :class:`Chunk` on to their attention as an argument of their forward, so a recomputation in the backward
finds it, in whatever thread that runs. The rows of a batch (B) share the documents' borders; they attend as heads of
their own. Linear layers and reshapes of models do not all take 0 rows, and torch.compile compiles anew for 0 and for 1.
So a chunk of fewer than two rows is filled up to two: nobody attends to a *filler* row, and it has no target, so its
part of every gradient is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..training.context import ContextBatch
    from ..training.shard_group import ShardGroup


_LEAST = 2  # rows


@dataclass(frozen=True)
class Chunk:
    """Attributes:
    batch: from ``group.context_parallel``; without a window, since layers bring their own.
    virtual_rank: whose rows the model runs on.
    """

    batch: ContextBatch
    virtual_rank: int
    _windows: dict[tuple[int, int], ContextBatch] = field(default_factory=dict, repr=False)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: tuple[int, int] = (-1, 0), scale: float | None = None
    ) -> Tensor:
        """A layer's attention.

        Args:
            q, k, v: ``(B, rows, heads, dim)``, rows of this chunk.
            window: ``(left, right)``, how many positions to each side a query sees; -1 for no limit.
            scale: factor of the scores; None is ``1 / sqrt(dim)``.

        Returns:
            ``(B, rows, heads, value_dim)``.

        Raises:
            ValueError: another number of rows; a layer's window in a batch with a window of its own.
        """
        length = self.batch.lengths[self.virtual_rank]
        if {x.shape[1] for x in (q, k, v)} != {max(length, _LEAST)}:
            raise ValueError(
                f"context_batch: virtual rank {self.virtual_rank} has {length} rows, but the layer passes "
                f"{q.shape[1]} queries and {k.shape[1]} keys; a cache of earlier keys cannot be used"
            )
        rows = [x.transpose(0, 1).flatten(1, 2) for x in (q, k, v)]
        if length < _LEAST:
            rows = [x[:length] for x in rows]
        out = self._plan(window).attention(*rows, scale=scale).unflatten(1, q.shape[::2]).transpose(0, 1)
        return out if length >= _LEAST else F.pad(out, (0, 0, 0, 0, 0, _LEAST - length))

    def _plan(self, window: tuple[int, int]) -> ContextBatch:
        """The batch's plan for a layer with this window, made once a batch."""
        batch, group = self.batch, cast("ShardGroup", self.batch.group)
        if batch.window == window:
            return batch
        if batch.window != (-1, window[1] if window[1] < 1 else -1):
            raise ValueError(f"context_batch: made with window {batch.window}, but a layer's attention has {window}")
        if window not in self._windows:
            causal = window[1] == 0
            self._windows[window] = group.context_parallel(batch.lengths, batch.cu_seqlens, causal, window)
        return self._windows[window]


def chunks_of(batch: ContextBatch) -> list[Chunk]:
    """A chunk for every hosted virtual rank."""
    windows: dict[tuple[int, int], ContextBatch] = {}
    return [Chunk(batch, v, windows) for v in batch.group.virtual_ranks]


def rows_of(batch: ContextBatch, x: Tensor, filler: int) -> list[Tensor]:
    """The hosted chunks of whole sequences ``(B, size)``, with ``filler`` behind those of fewer than two rows."""
    return [_filled(chunk, filler) for chunk in hosted(batch.split(x, dim=1))]


def positions_of(batch: ContextBatch) -> list[Tensor]:
    """``(1, rows)``: the positions in their documents of the hosted chunks' rows."""
    return [_filled(p[None], 0) for p in hosted(batch.positions)]


def hosted(x: Tensor | Sequence[Tensor]) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


def _filled(x: Tensor, filler: int) -> Tensor:
    return x if x.shape[1] >= _LEAST else F.pad(x, (0, _LEAST - x.shape[1]), value=filler)
