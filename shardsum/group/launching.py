"""The fast path of a plan over peer memory: one operator that looks at its tensors itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..transports.peer.operators import peer_call, peer_call_new

if TYPE_CHECKING:
    from .planner import Planner


def launch(planner: Planner, bound: Tensor, shards: Any, out: Any) -> Tensor | None:
    """The result of a plain call; None, and nothing has happened, where anything is unusual.

    Args:
        bound: the plan of the operators (:meth:`.executor.OverPeers.bind`).
    """
    if type(shards) is not Tensor or planner.always_agrees:
        return None
    if forward_ad._current_level >= 0 or (shards.requires_grad and torch.is_grad_enabled()):
        return None
    planner.announce_call()
    try:
        if out is None:
            return peer_call_new(shards, bound)
        if type(out) is not Tensor or out.requires_grad:
            return None
        peer_call(out, shards, bound)
    except RuntimeError:
        planner.check_peers()
        return None
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that are gone
    return out
