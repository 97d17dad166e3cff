"""Which checkpointed region a call is in: in a backward pass torch.utils.checkpoint runs it again, calls included.

Regions are run again in the order in which a process's backward needs them. Equal calls of two regions must not meet,
so messages of a recomputation carry the number of the first call that the region made in its forward pass, as those of
a backward pass carry the number of the call that they belong to.

torch says nothing of this in public. Its checkpoint without reentrant autograd is recognised by the innermost hooks for
saved tensors, which hold what torch keeps of the region. Where that cannot be seen, nothing is said and nothing is
compared: with reentrant autograd, where the user's own hooks lie inside the region, in a region inside a region.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.utils.checkpoint

_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_Region: Any = getattr(torch.utils.checkpoint, "_CheckpointFrame", ())  # (): no object is an instance


class Regions:
    """The checkpointed regions in which calls of one group were made, for as long as torch keeps them."""

    def __init__(self) -> None:
        self._first_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def origin(self, call: int) -> int:
        """What a new call repeats: the number of its region's first call in the forward pass; 0 where it is new."""
        hooks = _innermost_hooks(True)
        return 0 if hooks is None else self._origin(call, hooks[0])

    def _origin(self, call: int, pack: Any) -> int:
        for cell in getattr(inspect.unwrap(pack), "__closure__", None) or ():
            try:
                held = cell.cell_contents
            except ValueError:  # empty
                continue
            if isinstance(held, _Region):
                self._first_calls.setdefault(held, call)
            elif isinstance(held, ReferenceType) and isinstance(region := held(), _Region):
                return self._first_calls.get(region, 0)
        return 0
