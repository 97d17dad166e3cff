"""All-reduces that have run before, launched again with next to no Python: for peers, whose launch takes 5 us itself.

A call with ``out`` and host lengths whose arguments were checked, compared and launched once is remembered by all that
the checks looked at, except what can differ between two calls alike: addresses, layout and whether a gradient is
needed. Those are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import overlap

Launch = Callable[[list[Tensor], list[Tensor]], None]
_MAX = 1024


class Replays:
    """The remembered calls of one group. ``key`` is None for calls that are not remembered."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Launch] = {}

    def key(self, shards: Any, lengths: Any, out: Tensor | None, *rest: Hashable) -> Hashable | None:
        if out is None or type(lengths) is not list or torch.compiler.is_dynamo_compiling():
            return None
        if type(shards) is Tensor:
            return (shards.shape, shards.dtype, out.shape, out.dtype, *lengths, *rest)
        if type(shards) is not list:
            return None
        return (*[(s.shape, s.dtype) for s in shards], out.shape, out.dtype, *lengths, *rest)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._launches

    def remember(self, key: Hashable, launch: Launch) -> None:
        """``launch(outs, shards)`` runs the call."""
        if len(self._launches) == _MAX:
            del self._launches[next(iter(self._launches))]
        self._launches[key] = launch

    def run(self, key: Hashable, shards: Tensor | Sequence[Tensor], out: Tensor) -> bool:
        """Launch such a call again; False where it is not known, or an address, layout or gradient forbids it."""
        launch = self._launches.get(key)
        if launch is None or not out.is_contiguous() or out.requires_grad:
            return False
        tensors = [shards] if isinstance(shards, Tensor) else list(shards)
        device = out.get_device()
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.get_device() != device or overlap(out, tensor):
                return False
            if tensor.requires_grad and torch.is_grad_enabled():
                return False
        launch([out], tensors)
        return True
