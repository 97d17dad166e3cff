"""Attention by a function of the caller's, chunk by chunk. The exchange of K and V, and its gradient, are done here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import context_ops as ops
from .context_checks import QKV
from .context_chunks import Borders

if TYPE_CHECKING:
    from .context import ContextBatch


def attend_by(
    inner: Callable[[Tensor, Tensor, Tensor, Borders], Any],
    batch: ContextBatch,
    qkv: QKV,
    return_lse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """``(outs, lses)`` per hosted chunk; no lses unless they are asked for."""
    qs, ks, vs = qkv
    keys, values = ops.send(batch, ks, vs, "attention")
    outs, lses = [], []
    for q, key, value, chunk in zip(qs, keys, values, batch.chunks):
        if not chunk.calls:
            # Nothing to attend to, but the result must hang on the exchanges: their backward is a collective. A
            # product saves its inputs: under activation checkpointing, needing them runs the exchanges again.
            found = [q[..., :1].expand(-1, -1, value.shape[-1]) * key[:, :1, :1] * value[:, :1]]
            found += [q.new_zeros(q.shape[:2], dtype=torch.float32)]
        else:
            parts = [
                inner(q[c.queries], key[c.keys], value[c.keys], c.borders(q.device))
                if len(chunk.calls) > 1
                else inner(q, key, value, c.borders(q.device))
                for c in chunk.calls
            ]
            found = _joined(parts, return_lse)
        outs.append(found[0])
        lses += found[1:]
    return outs, lses


def _joined(parts: list[Any], return_lse: bool) -> list[Tensor]:
    """The results of ``inner`` for one chunk."""
    if not return_lse:
        outs = [part[0] if isinstance(part, tuple) else part for part in parts]
        return [outs[0] if len(outs) == 1 else torch.cat(outs)]
    if not isinstance(parts[0], tuple):
        raise ValueError("return_lse: inner returned no (out, lse)")
    return list(parts[0])
