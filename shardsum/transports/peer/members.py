"""Who maps each other's memory: a torch.distributed group, or some processes of one.

Those have no process group of their own: torch names a group of some processes by how many groups a process is in,
which may differ between them.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..store import BoundedStore

_LONGEST_PAUSE_S = 0.01


class Members:
    """Some processes of a group.

    Args:
        store: a part of the store for these processes alone.
        name: equal on all of them, and nobody else's.
        rank, size: this process's number among them, and how many they are.
    """

    def __init__(self, store: BoundedStore, name: str, rank: int, size: int) -> None:
        self.name, self._rank, self._size = name, rank, size
        self._store = store.raw()
        self._registered: Any = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def register(self) -> None:
        """Let torch's symmetric memory find these processes by their name. It asks a group for its store alone."""
        c10d: Any = torch._C._distributed_c10d
        if self._registered is None:
            self._registered = c10d.ProcessGroup(self._store, self._rank, self._size)
            c10d._register_process_group(self.name, self._registered)
            c10d._SymmetricMemory.set_group_info(self.name, self._rank, self._size, self._store)


def gather_in(store: BoundedStore, rank: int, size: int, limit: float) -> Callable[[Any], list[Any]]:
    """``gather(value)``: every member's ``value`` (small, picklable), in their order.

    Args:
        store: a part of the store for this alone.
        limit: seconds that one waits for another; then ``gather`` raises RuntimeError.
    """
    numbers = itertools.count()

    def wait_for(key: str, member: int) -> str:
        deadline, pause = time.monotonic() + limit, 0.0002
        while (found := store.get(key)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"peer memory: member {member} of this domain did not come within {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return found

    def gather(value: Any) -> list[Any]:
        number = next(numbers)
        store.set(f"{number}/{rank}", pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(wait_for(f"{number}/{p}", p))) for p in range(size)]

    return gather


#: What a peer transport is made for.
Group = dist.ProcessGroup | Members
