"""torch.distributed's key-value store, with an end to every operation.

A store's client waits for the answer of the process that hosts the store, however long that takes: a host that is
stopped (SIGSTOP) would hold up everybody. So operations run in a thread of their own, and whoever asked waits for it
with a limit.

At exit Python ends a daemon thread when it next asks for the GIL. Inside the store's C++ code that aborts the process
("terminate called without an active exception"), although its work is done. So exit waits for the current operation,
and no other one begins.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist


class StoreGone(RuntimeError):
    """The rendezvous store does not answer: nothing can be known of the other processes."""


class _Worker:
    """A thread that runs one operation after the other. One that hangs is left to itself, and another takes over."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], queue.SimpleQueue[Any]] | None]
        self.tasks = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name="shardsum store")
        self.thread.start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            fn, args, answer = task
            try:
                answer.put((fn(*args), None))
            except BaseException as error:
                answer.put((None, error))
            del task, fn, args, answer


LONGEST_EXIT_S = 2.0  # that exit waits for operations, which may never end
_worker: _Worker | None = None
_lone: WeakSet[_Worker] = WeakSet()  # each with one operation
_lock = threading.Lock()
_ending = False


@atexit.register
def _end() -> None:
    global _ending
    with _lock:
        _ending, workers = True, [*_lone, *([] if _worker is None else [_worker])]
    deadline = time.monotonic() + LONGEST_EXIT_S
    for worker in workers:
        worker.tasks.put(None)
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))


def _forget_workers() -> None:
    global _worker, _lock
    _worker, _lock = None, threading.Lock()
    _lone.clear()


os.register_at_fork(after_in_child=_forget_workers)  # threads stay behind


def within(limit: float, fn: Callable[..., Any], *args: Any, alone: bool = False) -> Any:
    """``fn(*args)``, run by the thread. TimeoutError after ``limit`` seconds; errors of ``fn`` pass through.

    Args:
        alone: in a thread of its own. For what waits for the other processes: they may be in another one first.
    """
    global _worker
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _lock:
        if _ending:
            raise RuntimeError("the interpreter is ending")
        if alone:
            worker = _Worker()
            _lone.add(worker)
        else:
            worker = _worker = _worker or _Worker()
        worker.tasks.put((fn, args, answer))
        if alone:
            worker.tasks.put(None)
    try:
        value, error = answer.get(timeout=limit)
    except queue.Empty:
        with _lock:
            if _worker is worker:
                _worker = None
        raise TimeoutError(f"no answer within {limit:g} s") from None
    if error is not None:
        raise error
    return value


class BoundedStore:
    """A part of a store, under a prefix.

    Args:
        store: the store.
        limit: seconds after which an operation is given up. After one that was, all others are at once.
    """

    def __init__(self, store: dist.Store, limit: float) -> None:
        self._store, self.limit = store, limit
        self._gone: list[str] = []  # shared by all parts

    @classmethod
    def clone(cls, store: dist.Store, limit: float) -> BoundedStore:
        """On a connection of its own: what waits here does not hold up other users of the store."""

        def clone() -> dist.Store:
            copy = store.clone()  # type: ignore[attr-defined]
            copy.set_timeout(timedelta(seconds=limit))
            return copy

        return cls(_asked(limit, clone), limit)

    def under(self, prefix: str) -> BoundedStore:
        part = BoundedStore(dist.PrefixStore(prefix, self._store), self.limit)
        part._gone = self._gone
        return part

    def raw(self) -> dist.Store:
        return self._store

    def set(self, key: str, value: str) -> None:
        self._do(self._store.set, key, value)

    def get(self, key: str) -> str | None:
        """The value, or None where there is none now."""
        return self._do(self._get, key)

    def check(self, key: str) -> bool:
        return self._do(self._store.check, [key])

    def delete(self, key: str) -> None:
        self._do(self._store.delete_key, key)

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _do(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self._gone:
            raise StoreGone(self._gone[0])
        try:
            return _asked(self.limit, fn, *args)
        except StoreGone as error:
            self._gone.append(str(error))
            raise


def _asked(limit: float, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return within(limit, fn, *args)
    except TimeoutError:
        raise StoreGone(
            f"the rendezvous store has not answered for {limit:g} s: the process that hosts it is stopped or gone"
        ) from None
    except RuntimeError as error:  # a connection that was closed
        reason = str(error).splitlines()[0][:200]
        raise StoreGone(f"the rendezvous store is gone, or the process that hosts it: {reason}") from error
