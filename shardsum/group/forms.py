"""The forms in which a call takes and returns tensors: one Tensor, a list, a stack, checked against its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checks import check_out, overlap
from ..core.layout import Interval, length
from .arguments import Shards, check_outs, check_rows, hosted_shards, refuse_batches
from .compiled import Kept, exchange
from .terms import Terms

if TYPE_CHECKING:
    from .planner import Planner


def traced(planner: Planner, terms: Terms, hosted: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    """The results of a call as torch.compile sees it: those of the registered operator, never computed twice."""
    results = exchange(hosted, lengths, terms, None, planner.name)
    results = results if lengths is None else results[:-1]
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
    return [
        s if s.is_contiguous() and not (s.is_conj() or s.is_neg()) else s.resolve_conj().resolve_neg().contiguous()
        for s in shards
    ]


def fillable(outs: list[Tensor] | None) -> list[Tensor] | None:
    """``outs`` where kernels can write all of them in place."""
    if outs is None or not all(o.is_contiguous() and not (o.is_neg() or o.is_conj()) for o in outs):
        return None
    return outs


def stack(shards: list[Tensor]) -> Tensor:
    """Padded shards as one Tensor ``(k, S_MAX, *F)``."""
    return shards[0][None] if len(shards) == 1 else torch.stack(shards)


class Tensors:
    """What the calls of one plan take on this process: ``bounds`` ``(begin, length)`` are those of the hosted sources,
    ``sinks`` intervals of the hosted sinks."""

    def __init__(
        self, planner: Planner, terms: Terms, bounds: Sequence[tuple[int, int]], sinks: Sequence[Interval]
    ) -> None:
        self._planner, self.terms, self.bounds, self._sinks = planner, terms, bounds, sinks
        self._single, self.num_results = len(bounds) == 1, len(sinks)

    def take(self, shards: Shards) -> list[Tensor]:
        """The valid rows of the hosted shards; ValueError where they do not fit."""
        terms, bounds = self.terms, self.bounds
        if type(shards) is list and len(shards) == len(bounds):
            hosted = shards
        elif self._single and type(shards) is Tensor and shards.dim() == len(terms.row_shape) + 1:
            hosted = [shards]
        else:
            hosted = self._checked(shards)
        if not self._fit(hosted):
            hosted = self._checked(hosted)
        if terms.grad == "adjoint" or torch._C._are_functorch_transforms_active():
            refuse_batches(hosted)
        if terms.device_lengths:
            return hosted
        return [x if x.shape[0] == n else x[:n] for x, (_, n) in zip(hosted, bounds)]

    def _fit(self, hosted: list[Tensor]) -> bool:
        """Whether the shards are all that they must be, in one look."""
        dtype, row_shape = self.terms.dtype, self.terms.row_shape
        device = self._planner.shard_device
        for x, (_, n) in zip(hosted, self.bounds):
            if type(x) is not Tensor or x.dtype is not dtype or x.layout is not torch.strided:
                return False
            if x.shape[1:] != row_shape or x.shape[0] < n:
                return False
            if x.device != device:
                if device is not None or self._planner.world_size > 1:
                    return False
                device = x.device  # a lone process takes any, all shards on one
        return True

    def _checked(self, shards: Shards) -> list[Tensor]:
        hosted = hosted_shards(shards, self.sources(), self._planner.shard_device, len(self.terms.row_shape))
        check_rows(self.terms, self.sources(), hosted, [n for _, n in self.bounds])
        return hosted

    def sources(self) -> Sequence[int]:
        """The virtual ranks of the hosted sources, or this process where each process has one."""
        return self._planner.virtual_ranks if self.terms.kinds[0] == "v" else (self._planner.rank,)

    def take_outs(self, hosted: list[Tensor], out: Any) -> list[Tensor] | None:
        """The tensors that receive the results; ValueError where one cannot."""
        if out is None:
            return None
        outs = check_outs(out, len(self._sinks), self.terms.replicated)
        for sink, tensor in zip(self._sinks, outs):
            check_out(tensor, hosted, (length(sink), *self.terms.row_shape), self.terms.reduce.dtype)
        if any(overlap(a, b) for i, a in enumerate(outs) for b in outs[:i]):
            raise ValueError("out: two of its Tensors share memory")
        return outs
