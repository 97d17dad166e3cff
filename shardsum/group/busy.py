"""The scope of one call, and one call at a time: a second thread gets an error, an interrupted call ends its group, a
forked child is refused, and so is a call while Python ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from .planner import Planner

_is_finalizing = sys.is_finalizing


def refuse_at_exit() -> None:
    """RuntimeError while the interpreter clears its modules (in ``__del__``): a wait there ends the process (SIGABRT).
    Functions of atexit come before that."""
    if _is_finalizing():
        raise RuntimeError(
            "Python is ending: no more calls of a ShardGroup; make them before, or in an atexit function"
        )


#: By process group: who holds its ShardGroups, and in which thread. Each dict has one entry or none. The entry is made,
#: and removed, in one step of the interpreter: other threads and interrupts find it whole or not at all.
_holders: WeakKeyDictionary[Any, dict[None, tuple[Busy, int]]] = WeakKeyDictionary()
#: Ends with a fork: a child has another one. (Cheaper than to ask for the process's number in every call.)
_process = [object()]
os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, object()))
_get_ident = threading.get_ident


class Busy:
    """Hold it for as long as a call touches a group: ``with busy: ...``. Groups of one process group share it.

    It looks for overlap in time, not for a thread's name: CUDA's backward runs in threads of its own. But a thread that
    finds it held by itself is in no call any more: an interrupt (Ctrl-C) left that call before it could let go. Then
    the group of that call is abandoned.

    Args:
        group: the process group; None for a lone process, which nobody waits for.
        abandon: called with what ended the call, where that is no ordinary error (KeyboardInterrupt).
    """

    __slots__ = ("_abandon", "_holders", "_process")

    def __init__(self, group: Any, abandon: Callable[[BaseException], None]) -> None:
        self._holders = None if group is None else _holders.setdefault(group, {})
        self._abandon, self._process = abandon, _process[0]

    def __enter__(self) -> None:
        if _is_finalizing():
            refuse_at_exit()
        holders = self._holders
        if holders is None:
            return
        if _process[0] is not self._process:
            raise RuntimeError(
                "this ShardGroup belongs to the process that constructed it, and this one is a forked child of it; "
                "start processes by spawn, and construct their groups in them"
            )
        mine = self, _get_ident()
        found = holders.setdefault(None, mine)
        if found is not mine:
            holder, thread = found
            if thread != mine[1]:
                raise RuntimeError(
                    "the group is in use by another thread; calls of a group, and of all groups of its process group, "
                    "come from one thread at a time"
                )
            holder._abandon(KeyboardInterrupt("an interrupt"))
            holders[None] = mine

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None and not isinstance(error, Exception) and self._holders is not None:
                self._abandon(error)
        finally:
            self.release()

    def release(self) -> None:
        """Let go, as at the end of ``with`` without an error."""
        if self._holders:
            self._holders.clear()


class Calling:
    """The scope of one call. An error that is no ValueError ends the group: others may be in the middle of it."""

    def __init__(self, planner: Planner, name: str, begun: bool) -> None:
        self._planner, self._name, self._begun = planner, name, begun

    def __enter__(self) -> None:
        if self._begun:
            self._planner.agreement.busy.__enter__()
        else:
            self._planner.enter(self._name)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is not None and not isinstance(error, ValueError):
                self._planner.fail(self._name, error)
        finally:
            self._planner.leave()
