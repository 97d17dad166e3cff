"""Calls that were left open, before they had started all their transfers, and who completes them.

A call of several steps goes on only while a thread of its process is at it. Where one thread makes all calls of a
process, its next call, of any group, first completes the open one. So one call at most is open, and calls that
processes wait for in another order cannot wait for each other.

Where several threads make calls, their order differs between processes, and to complete another group's call first may
wait for a process that does the same with this one. So every open call then has a thread of its own that completes it,
and a group's next call waits for its own group's alone.

The interpreter waits for these threads before it ends, for a while: see :mod:`.store`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .store import LONGEST_EXIT_S

Finish = Callable[[], Any]

#: By what their wire moves on. Read without the lock where only emptiness matters.
calls: dict[Any, Finish] = {}
_lock = threading.Lock()
_helpers: set[threading.Thread] = set()
#: The thread that has made the first call; None: nobody yet. Whoever begins an exchange in another one says so
#: (:func:`note_caller`).
caller: int | None = None
several = False  # threads of this process make calls, or have done so


def _forget() -> None:
    """A forked child has none of its parent's calls."""
    global _lock, caller, several
    _lock, caller, several = threading.Lock(), None, False
    calls.clear()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + LONGEST_EXIT_S
    for thread in list(_helpers):
        thread.join(max(0.0, deadline - time.monotonic()))


def note_caller() -> None:
    """To be called by every thread that is not :data:`caller` and begins an exchange, before it does."""
    global caller, several
    if caller == threading.get_ident() or several:
        return
    with _lock:
        if caller is None:
            caller = threading.get_ident()
        elif caller != threading.get_ident():
            several = True
            for group, finish in calls.items():
                _complete_aside(group, finish)


def leave(group: Any, finish: Finish) -> None:
    """Let a call rest; ``finish`` completes it. It may be called several times, by several threads at once: all return
    when it is complete."""
    with _lock:
        calls[group] = finish
        if several:
            _complete_aside(group, finish)


def close(group: Any) -> None:
    """Complete what ``group`` has left open, and other groups where one thread makes all calls. Raises the errors of
    its own call; those of others are theirs, and their handles'."""
    for other, finish in list(calls.items()):
        if other is not group and several:
            continue
        try:
            finish()
        except Exception:
            if other is group:
                raise
        finally:
            _forget_call(other, finish)


def _forget_call(group: Any, finish: Finish) -> None:
    with _lock:
        if calls.get(group) is finish:
            del calls[group]


def _complete_aside(group: Any, finish: Finish) -> None:
    def complete() -> None:
        with contextlib.suppress(Exception):  # its handle raises that, and its group's next call
            finish()
        _forget_call(group, finish)
        _helpers.discard(threading.current_thread())

    thread = threading.Thread(target=complete, daemon=True, name="shardsum open call")
    _helpers.add(thread)
    thread.start()
