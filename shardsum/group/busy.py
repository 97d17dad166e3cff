"""One call at a time: a second thread gets an error, an interrupted call ends its group, a forked child is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


class Busy:
    """Hold it for as long as a call touches a group: ``with busy: ...``. Groups of one process group share it.

    It looks for overlap in time, not for a thread's name: CUDA's backward runs in threads of its own.

    Args:
        group: the process group; None for a lone process, which nobody waits for.
        abandon: called with what ended the call, where that is no ordinary error (KeyboardInterrupt).
    """

    __slots__ = ("_abandon", "_lock", "_pid")

    def __init__(self, group: Any, abandon: Callable[[BaseException], None]) -> None:
        self._lock = None if group is None else _locks.setdefault(group, threading.Lock())
        self._abandon, self._pid = abandon, os.getpid()

    def __enter__(self) -> None:
        if self._lock is None:
            return
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this ShardGroup belongs to the process that constructed it, and this one is a forked child of it; "
                "start processes by spawn, and construct their groups in them"
            )
        if not self._lock.acquire(False):
            raise RuntimeError(
                "the group is in use by another thread, or a call of it was interrupted; calls of a group, and of all "
                "groups of its process group, come from one thread at a time"
            )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._lock is None:
            return
        try:
            if error is not None and not isinstance(error, Exception):
                self._abandon(error)
        finally:
            self._lock.release()
