"""The fast path of a plan over peer memory: one operator that looks at its tensors itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..transports.peer.operators import peer_call, peer_call_new, peer_call_new_list

if TYPE_CHECKING:
    from .planner import Planner


def launch(planner: Planner, bound: Tensor, single: bool, shards: Any, out: Any) -> Tensor | list[Tensor] | None:
    """The result of a plain call, of a list of shards one a hosted sink; None, and nothing has happened, where anything
    is unusual. ``bound`` and ``single`` are of :meth:`.Prepared.bind`."""
    several = type(shards) is list
    if planner.always_agrees or forward_ad._current_level >= 0 or (out is not None if several else not single):
        return None
    for shard in shards if several else (shards,):
        if type(shard) is not Tensor or not shard.is_contiguous():
            return None
        if shard.requires_grad and torch.is_grad_enabled():
            return None
    planner.announce_call()
    try:
        if out is None:
            return peer_call_new_list(shards, bound) if several else peer_call_new(shards, bound)
        if type(out) is not Tensor or out.requires_grad:
            return None
        peer_call(out, shards, bound)
    except RuntimeError:
        planner.check_peers()
        return None
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that are gone
    return out
