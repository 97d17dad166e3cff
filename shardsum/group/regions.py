"""What a call in a backward pass belongs to, where autograd does not say it: calls of equal signatures must not meet in
another order there.

*Checkpointed regions*, which torch.utils.checkpoint runs again, calls included, in the order in which a process's
backward needs them. Messages of a recomputation carry the number of the first call that the region made in its forward
pass, as those of a backward pass carry the number of the call that they belong to. torch says nothing of this in
public. Its checkpoint without reentrant autograd is recognised by the innermost hooks for saved tensors, which hold
what torch keeps of the region. Where the user's own hooks lie inside the region (on all processes, or on none), nothing
is said, so nothing is compared; nor in a region inside a region.

*Nodes* of autograd whose forward makes calls: of a compiled graph, and of torch's reentrant checkpoint, which runs
without gradients. In its forward the node is the last one that this thread has made, in its backward it is the current
one.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.utils.checkpoint

_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_grad_enabled, _current_backward = torch.is_grad_enabled, torch._C._current_graph_task_id
_Region: Any = getattr(torch.utils.checkpoint, "_CheckpointFrame", ())  # (): no object is an instance
_MOST_NODES = 1 << 14


class _Thread(threading.local):
    """``mark``: an object of the current thread alone. (The number of a thread that has ended is given again, and its
    nodes' numbers begin anew.)"""

    def __init__(self) -> None:
        self.mark = object()


_thread = _Thread()


class Regions:
    """The checkpointed regions and the nodes in which calls of one group were made."""

    def __init__(self) -> None:
        self._first_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # The first call of each node, by the node's sequence number and the thread of its forward. Backward may run in
        # another thread, so the last call noted for a number stands under (number, None), too.
        self._nodes: dict[tuple[int, object], int] = {}

    def origin(self, call: int) -> int:
        """What a new call repeats: the number of its region's first call in the forward pass; 0 where it is new."""
        hooks = _innermost_hooks(True)
        if hooks is not None:
            return self._of_region(call, hooks[0])
        if not _is_grad_enabled():
            self._note(call)
        elif self._nodes and _current_backward() != -1:
            node = torch._C._current_autograd_node()
            if type(node).__name__ == "CheckpointFunctionBackward":
                return self._of_node(node)
        return 0

    def _of_region(self, call: int, pack: Any) -> int:
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

    def of_operator(self, call: int) -> int:
        """Of a call that a registered operator makes. In a node's backward: the number of the first call that was noted
        in its forward. In a forward: 0, and the call is noted."""
        if _current_backward() != -1:
            return self._of_node(torch._C._current_autograd_node())
        self._note(call)
        return 0

    def _of_node(self, node: Any) -> int:
        if node is None:
            return 0
        number = node._sequence_nr()
        return self._nodes.get((number, _thread.mark)) or self._nodes.get((number, None), 0)

    def _note(self, call: int) -> None:
        """Note a call in what may be a node's forward; of several calls of one node the first counts."""
        if _current_backward() != -1:
            return
        number, thread = torch.autograd._get_sequence_nr() - 1, _thread.mark
        if (number, thread) not in self._nodes:
            self._nodes.pop((number, None), None)  # to the end of the dictionary: the oldest entries are dropped first
            self._nodes[number, thread] = self._nodes[number, None] = call
            while len(self._nodes) > _MOST_NODES:
                del self._nodes[next(iter(self._nodes))]
