"""Transfers on the CPU: point to point, on a gloo group that one ShardGroup has for itself, paired by tags.

Gloo pairs messages by the order in which each process starts them, unless they carry different tags. A tag here comes
from the number of the exchange, the hash of what it is (:class:`Stamp`) and the number of the transfer in it. So
processes that are out of step wait for each other. They never take one exchange's data for another's, and never meet
with unequal sizes (which ends a process).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .wire import Stamp, Wire, as_bytes

_TAGS = (1 << 31) - 1  # the largest tag of gloo's
_TURN = 0x9E3779B97F4A7C15  # an odd number of mixed bits
#: Tags of :meth:`TaggedWire.send` lie this many transfers behind those of the collectives of the same exchange.
_CHUNKS = 1 << 20
_MOST_UNDER_WAY = 256  # transfers of handles that nobody has waited for


class TaggedWire(Wire):
    """A :class:`Wire` of CPU tensors.

    Args:
        group: the private ProcessGroupGloo.
        timeout: the limit of a wait.
    """

    def __init__(self, group: dist.ProcessGroupGloo, timeout: timedelta) -> None:
        super().__init__(group, group.rank(), group.size(), timeout)
        turns = range(1, self.world_size)
        self._to = [(self.rank + i) % self.world_size for i in turns]  # not all to the same one at first
        self._from = [(self.rank - i) % self.world_size for i in turns]
        self._tags = self._transfers = self._started = 0
        self._works: dict[int, list[dist.Work]] = {}

    def begin(self, stamp: Stamp, call: int) -> None:
        super().begin(stamp, call)
        mixed = (stamp.hash + self.step.number * _TURN + call * 0xD1B54A32D192ED03) & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 32) * _TURN & (1 << 64) - 1
        self._tags, self._transfers = mixed >> 20, 0

    def _next_tag(self) -> int:
        self._transfers += 1
        return self._tags + self._transfers & _TAGS

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        everyone, own = as_bytes(out), as_bytes(mine)
        self.count(own.numel() * (self.world_size - 1), 1, 1)
        if not own.numel():
            return self._under_way([])
        tag, parts = self._next_tag(), everyone.split(own.numel())
        works = [self.group.recv([parts[p]], p, tag) for p in self._from]
        works += [self.group.send([own], p, tag) for p in self._to]
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        return self._under_way(works)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        itemsize, tag = mine.element_size(), self._next_tag()
        self.count(itemsize, mine.numel(), out.numel())
        received = as_bytes(out).split([n * itemsize for n in out_splits])
        sent = as_bytes(mine).split([n * itemsize for n in in_splits])
        works = [self.group.recv([received[p]], p, tag) for p in self._from if out_splits[p]]
        return self._under_way(works + [self.group.send([sent[p]], p, tag) for p in self._to if in_splits[p]])

    def send(self, x: Tensor, peer: int, chunk: int) -> Any:
        data = as_bytes(x)
        self.count(data.numel(), 1, 0)
        tag = self._tags + _CHUNKS + chunk & _TAGS
        return self._under_way([self.group.send([data], peer, tag)] if data.numel() else [])

    def recv(self, out: Tensor, peer: int, chunk: int) -> Any:
        data = as_bytes(out)
        self.count(data.numel(), 0, 1)
        tag = self._tags + _CHUNKS + chunk & _TAGS
        return self._under_way([self.group.recv([data], peer, tag)] if data.numel() else [])

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], receives: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Any]:
        return [*(self.send(*transfer) for transfer in sends), *(self.recv(*transfer) for transfer in receives)]

    def fail(self, error: BaseException) -> None:
        """Refuse all further exchanges of this wire, and close its connections: the others, who may wait for what will
        not come, get an error at once."""
        if self._failed is None:
            self._failed = repr(error)
            self._close_connections()

    def _close_connections(self) -> None:
        try:  # gloo's answer to a time-out, and its own way to end what waits in other threads
            self.group.recv([torch.empty(1, dtype=torch.uint8)], self._to[0], 0).wait(timedelta(milliseconds=1))
        except RuntimeError:
            self._works.clear()

    def _under_way(self, works: list[dist.Work]) -> int:
        """Keep what has been started, also where nobody waits for it: gloo gives up a connection where the memory of a
        message is gone when it comes."""
        self._started += 1
        if works:
            self._works[self._started] = works
            if len(self._works) > _MOST_UNDER_WAY:
                self.wait(min(self._works), torch.device("cpu"))
        return self._started

    def wait(self, transfer: int, device: torch.device) -> None:
        for work in self._works.get(transfer, ()):
            work.wait(self.timeout)
        self._works.pop(transfer, None)
