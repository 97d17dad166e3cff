"""Transfers on the CPU: point to point, on a gloo group that one ShardGroup has for itself, paired by tags.

Gloo pairs messages by the order in which each process starts them, unless they carry different tags. A tag here comes
from the number of the exchange, the hash of what it is (:class:`Stamp`) and the number of the transfer in it. So
processes that are out of step wait for each other. They never take one exchange's data for another's, and never meet
with unequal sizes (which ends a process).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import opened, watch
from .stamps import Begun, Stamp, Step
from .store import StoreGone
from .wire import Wire, as_bytes

_TAGS = (1 << 31) - 1  # the largest tag of gloo's
#: What the numbers of an exchange and of its call are multiplied by. While both differ by at most 256 between two
#: exchanges of one stamp, the tags of the one are more than 10,000 away from those of the other.
_TURN, _TURN_OF_CALLS = 0x2D2AA505, 0x3E473745
#: Tags of :meth:`TaggedWire.send` lie this many transfers behind those of the collectives of the same exchange.
_CHUNKS = 1 << 20
_MOST_UNDER_WAY = 256  # transfers of handles that nobody has waited for
_HISTORY = 8  # exchanges that a process tells of


class OutOfStep(RuntimeError):
    """A transfer will never end, since its processes are not in the same exchange."""


class TaggedWire(Wire):
    """A :class:`Wire` of CPU tensors.

    Args:
        group: the private ProcessGroupGloo.
        timeout: the limit of a wait.
        name: of the wire among all of the program, the same on its processes.
        board: where they publish what they wait for.
        elsewhere: what else may be known of why the current exchange does not end. Called in another thread.
        condemn: tells the other processes why this one gives the wire up. Likewise.
    """

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        timeout: timedelta,
        name: str,
        board: watch.Board,
        elsewhere: Callable[[Step], str | None],
        condemn: Callable[[Step, str], None],
    ) -> None:
        super().__init__(group, group.rank(), group.size(), timeout)
        self.name, self.board, self._elsewhere, self._condemn = name, board, elsewhere, condemn
        self._steps: list[Begun | None] = [None] * _HISTORY  # where they lie: number modulo _HISTORY
        self._waits: tuple[int, Begun] | None = None  # for which process, in what: a new object for every wait
        self._seen: tuple[int, Begun] | None = None  # the one at the last look
        self._published = False
        self._next_look, self._pause = 0.0, 0.0
        self._verdict: str | None = None
        watch.add(self)
        turns = range(1, self.world_size)
        self._to = [(self.rank + i) % self.world_size for i in turns]  # not all to the same one at first
        self._from = [(self.rank - i) % self.world_size for i in turns]
        self._tags = self._transfers = self._started = 0
        self._met = True
        self._works: dict[int, tuple[Begun, list[tuple[int, dist.Work]]]] = {}

    def begin(self, stamp: Stamp, call: int, origin: int = 0, beside: bool = True) -> None:
        # It runs once in some hundred microseconds, with cold caches: what counts is how much code and memory it
        # touches. So steps are plain tuples, and the tags' numbers small ints.
        if opened.caller != get_ident():
            opened.note_caller()
        if self._failed is not None or opened.calls:
            self.close()
        if origin:
            stamp = stamp.of(origin)
        number = self._step[0] + 1
        self._step = self._steps[number % _HISTORY] = number, stamp, call
        self._tags, self._transfers = stamp[0] + number * _TURN + call * _TURN_OF_CALLS & _TAGS, 0

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        everyone, own = as_bytes(out), as_bytes(mine)
        moved = own.numel() * (self.world_size - 1)
        self.count(moved, moved)
        if not own.numel():
            return self._under_way([])
        self._transfers += 1
        tag, parts = self._tags + self._transfers & _TAGS, everyone.split(own.numel())
        works = [self._post(self.group.recv, parts[p], p, tag) for p in self._from]
        works += [self._post(self.group.send, own, p, tag) for p in self._to]
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        return self._under_way(works)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        self._transfers += 1
        tag, out, mine = self._tags + self._transfers & _TAGS, as_bytes(out), as_bytes(mine)
        self.count(mine.numel(), out.numel())
        received, sent = out.split(list(out_splits)), mine.split(list(in_splits))
        works = [self._post(self.group.recv, received[p], p, tag) for p in self._from if out_splits[p]]
        works += [self._post(self.group.send, sent[p], p, tag) for p in self._to if in_splits[p]]
        return self._under_way(works)

    def send(self, x: Tensor, peer: int, chunk: int) -> Any:
        self.count(x.nbytes, 0)
        return self._start_chunk(self.group.send, x, peer, chunk)

    def recv(self, out: Tensor, peer: int, chunk: int) -> Any:
        self.count(0, out.nbytes)
        return self._start_chunk(self.group.recv, out, peer, chunk)

    def _start_chunk(self, start: Callable[..., dist.Work], x: Tensor, peer: int, chunk: int) -> int:
        tag = self._tags + _CHUNKS + chunk & _TAGS
        return self._under_way([self._post(start, as_bytes(x), peer, tag)] if x.numel() else [])

    def flush(self) -> int:
        """Nothing: transfers have started at once."""
        return 0

    def fail(self, error: BaseException) -> None:
        """Refuse all further exchanges of this wire, and close its connections: the others, who may wait for what will
        not come, get an error at once."""
        if self._failed is None:
            self._failed = repr(error)
            self._close_connections()

    def _close_connections(self) -> None:
        for peer in self._to:  # gloo's answer to a time-out, and its own way to end what waits in other threads
            try:
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, 0).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):  # else that connection was closed before, but others may stand
                    break

    def _post(self, start: Callable[..., dist.Work], data: Tensor, peer: int, tag: int) -> tuple[int, dist.Work]:
        """Start one transfer: ``group.send`` or ``group.recv``."""
        try:
            return peer, start([data], peer, tag)
        except RuntimeError as error:  # a connection that is closed already
            raise self._explained(peer, error) from error

    def _under_way(self, works: list[tuple[int, dist.Work]]) -> int:
        """Keep what has been started, also where nobody waits for it: gloo gives up a connection where the memory of a
        message is gone when it comes."""
        self._started += 1
        if works:
            self._works[self._started] = self._step, works
            if len(self._works) > _MOST_UNDER_WAY:
                self.wait(min(self._works), torch.device("cpu"))
        return self._started

    def wait(self, transfer: int, device: torch.device) -> None:
        if transfer not in self._works:
            return
        step, works = self._works[transfer]
        try:
            for peer, work in works:
                self._waits = (peer, step)
                work.wait(self.timeout)
        except RuntimeError as error:
            raise self._explained(peer, error) from error
        finally:
            self._waits = None
        self._works.pop(transfer, None)

    def _explained(self, peer: int, error: RuntimeError) -> RuntimeError:
        if self._verdict is not None:
            return OutOfStep(self._verdict)
        if "Timed out" in str(error):
            return RuntimeError(f"no answer from process {peer} within {self.timeout.total_seconds():g} s")
        if "closed" in str(error) or "reset" in str(error):
            with contextlib.suppress(StoreGone):
                if (told := self.board.told(self)) is not None:
                    return OutOfStep(told)
            return RuntimeError(f"the connection with process {peer} was closed")
        return error

    # Why a transfer does not end: see :mod:`.watch`, whose thread calls this

    def state(self) -> dict[str, Any]:
        """The last exchanges of this process, as JSON, the one it waits in, with the process it waits for,
        and whether several threads of it make calls."""
        waits, steps = self._waits, sorted(step for step in list(self._steps) if step is not None)
        return {
            "steps": [[number, stamp.hash, call, stamp.text] for number, stamp, call in steps],
            "waits": waits and [waits[0], waits[1][0], waits[1][1].text, waits[1][2]],
            "threads": opened.several,
        }

    def look(self) -> None:
        """Check the current wait, if it was the current one at the last check, too."""
        waits, now = self._waits, time.monotonic()
        if waits is not self._seen or waits is None:
            self._seen, self._pause, self._next_look = waits, watch.TICK_S, now
            if self._published:
                self._published = False
                self.board.publish()
            return
        if now < self._next_look or self._verdict is not None:
            return
        self._pause = min(2 * self._pause, watch.LONGEST_PAUSE_S)
        self._next_look = now + self._pause
        self._published = True
        self.board.publish()
        step = Step(*waits[1])
        verdict = self.board.find(self) or self._elsewhere(step)
        if verdict is not None and self._waits is waits:
            self._verdict = verdict
            self._condemn(step, verdict)
            self._close_connections()
