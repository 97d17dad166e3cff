"""The forms in which a call takes and returns tensors: one Tensor, a list, a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import Shards
from .autograd import Kept, exchange
from .padded import exchange_padded
from .terms import Terms

if TYPE_CHECKING:
    from .planner import Planner


def traced(planner: Planner, terms: Terms, hosted: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    """The results of a call as torch.compile sees it: those of the registered operator, never computed twice."""
    if lengths is None:
        results = exchange(hosted, terms, None, planner.name)
    else:
        results = exchange_padded(stack(hosted), lengths, terms, planner.name)[:-1]
    return [Kept.apply(y) for y in results] if planner.world_size > 1 else results


def is_single(shards: Shards, planner: Planner, terms: Terms) -> bool:
    """Whether results come as ``shards`` did, as one Tensor."""
    return len(planner.virtual_ranks) == 1 and isinstance(shards, Tensor) and shards.dim() == len(terms.row_shape) + 1


def deliver(results: list[Tensor], terms: Terms, out: Any, single: bool) -> Any:
    """What a collective returns, from one result a hosted sink."""
    if out is not None:
        for tensor, result in zip([out] if isinstance(out, Tensor) else out, results):
            if tensor is not result:
                tensor.copy_(result)
            else:  # autograd must notice when it has saved the values that a kernel overwrote
                torch._C._increment_version((tensor,))
        return out
    return results[0] if terms.replicated or single else results


def movable(shards: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors without lazy signs: bytes travel."""
    return [s if s.is_contiguous() and not (s.is_conj() or s.is_neg()) else _plain(s) for s in shards]


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous()


def fillable(outs: list[Tensor] | None) -> list[Tensor] | None:
    """``outs`` where kernels can write all of them in place."""
    if outs is None or not all(o.is_contiguous() and not (o.is_neg() or o.is_conj()) for o in outs):
        return None
    return outs


def stack(shards: list[Tensor]) -> Tensor:
    """Padded shards as one Tensor ``(k, S_MAX, *F)``."""
    return shards[0][None] if len(shards) == 1 else torch.stack(shards)
