"""The only place that moves data between processes: bytes in, bytes out, counted.

Bytes are moved, of every dtype alike on every backend, and nothing is ever reduced by it.
:class:`Wire` moves them by the collectives of the user's process group (NCCL), which pairs them by the order in which
each process starts them; what comes is checked by :mod:`.headers`. On the CPU
:class:`shardsum.transports.tagged.TaggedWire` takes its place: point-to-point transfers on a process group of its own,
paired by tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from . import departures, opened
from .headers import BYTES, Headers, Received
from .stamps import Begun, Stamp, Step


def as_bytes(x: Tensor) -> Tensor:
    """A flat ``uint8`` view of a contiguous tensor; itself, if it is one."""
    if x.dtype == torch.uint8 and x.dim() == 1:
        return x
    # Not reshape: a contiguous tensor of one element may have stride 0, which view(dtype) refuses.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


#: What NCCL sends as it is.
_KNOWN = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


@dataclass
class Transfer:
    """What :meth:`Wire.wait` takes: what is under way, and the headers that come with it."""

    works: Sequence[Any] = ()
    received: Received | None = None


def _movable(x: Tensor) -> Tensor:
    """Itself, where NCCL knows the dtype (a view takes the host half as long as a send), else its bytes."""
    return x if x.dtype in _KNOWN else as_bytes(x)


def _works(work: Any) -> Sequence[Any]:
    """What is to be waited for: nothing where the current stream does it."""
    return () if work is None else (work,)


#: Why a process group is not used again: a transfer may still stand on it (:meth:`Wire.fail`).
abandoned_groups: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
#: All wires: one that fails during its transfers fails those of the same process group (:meth:`Wire.fail`).
_wires: WeakSet[Wire] = WeakSet()


class Wire:
    """Transfers between the processes of one group.

    An exchange of all of them begins with :meth:`begin`; its transfers follow in the same order on every process.
    Results made of what came are shown to :meth:`verify` before they are handed out, or sent on.

    Methods of the process group are called as torch.distributed's functions call them: those check their arguments
    anew in every call, for longer than NCCL takes to launch.

    Args:
        group: the torch.distributed group whose processes exchange; ``rank`` is this one's number.
        timeout: the limit of a host wait (gloo; NCCL has its watchdog).
        headers: what tells messages apart. None: they are paired by something better than their order.

    Attributes:
        sent, received: bytes of shards and results to and from other processes (not of headers).
        header_bytes: what every part of an :meth:`all_to_all` that is not empty begins with: its :meth:`header`.
    """

    def __init__(
        self, group: Any, rank: int, world_size: int, timeout: timedelta, headers: Headers | None = None
    ) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.world_size = rank, world_size
        self.headers, self.header_bytes = headers, 0 if headers is None else BYTES
        self.sent = self.received = 0
        self._forget_batch()
        self._step: Begun = (0, Stamp(0, "nothing"), 0)
        self._failed: str | None = None
        self._met = False
        self._coalesces: bool | None = None
        self._gathering, self._exchanging = AllgatherOptions(), AllToAllOptions()
        _wires.add(self)

    @property
    def step(self) -> Step:
        """The exchange that has begun last."""
        return Step(*self._step)

    def begin(self, stamp: Stamp, call: int, origin: int = 0, beside: bool = True) -> None:
        """Begin an exchange; what an earlier one left open is completed first (:meth:`close`).

        Args:
            call: the number of the call that it belongs to.
            origin: of the call whose backward it is, or that it repeats in a backward pass; 0 for neither. Messages
                carry it, too: the backward passes of equal calls must not meet in another order.
            beside: whether collectives run beside what the current stream does (NCCL). Else they run on it, which saves
                the events of two streams that wait for each other.
        """
        self.close()
        self._forget_batch()
        self._step = step = Step(self._step[0] + 1, stamp.of(origin), call)
        self._gathering.asyncOp = self._exchanging.asyncOp = beside
        if self.headers is not None:
            self.headers.begin(step)

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        """Start gathering ``mine`` of every process into ``out``, both contiguous, ``out`` G times as large. Returns
        what :meth:`wait` takes, as all methods do that start a transfer."""
        out, mine = as_bytes(out), as_bytes(mine)
        moved = mine.numel() * (self.world_size - 1)
        self.count(moved, moved)
        return self._gather([out], [mine])

    def _gather(self, outs: list[Tensor], mine: list[Tensor]) -> Transfer:
        """All_gathers of headers and of bytes, in one launch."""
        assert self.headers is not None
        own, came = self.headers.own(), self.headers.room(self.world_size)
        departures.note(own, came, *outs, *mine)
        # What torch's coalescing manager calls; torch 2.13 renamed it.
        gather = getattr(self.group, "all_gather_single_coalesced", None) or self.group.allgather_into_tensor_coalesced
        self._met = True
        work = gather([came, *outs], [own, *mine], self._gathering)
        return Transfer(_works(work), self.headers.of_all(came, self.rank))

    def meet(self, device: torch.device) -> None:
        """To be called before a batch (:meth:`flush`) in which some processes may take no part: where NCCL has not
        connected them yet, it would wait for all of them. Collective."""
        if not self._met:
            self.wait(self._gather([], []), device)

    def header(self, dtype: torch.dtype) -> Tensor:
        """The header of this exchange, :attr:`header_bytes` long, as elements of ``dtype``."""
        assert self.headers is not None
        return self.headers.own(dtype)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        """Start the exchange of uneven parts of flat tensors; splits in bytes, by process, nothing for oneself.
        Parts include their :meth:`header`."""
        received, sent = as_bytes(out), as_bytes(mine)
        begins, senders, end = [], [], 0
        for process, n in enumerate(out_splits):
            if n:
                begins.append(end)
                senders.append(process)
                end += n
        self.count(sum(in_splits) - BYTES * sum(map(bool, in_splits)), end - BYTES * len(senders))
        departures.note(received, sent)
        exchange = getattr(self.group, "all_to_all_single", None) or self.group.alltoall_base
        work = exchange(received, sent, out_splits, in_splits, self._exchanging)
        return Transfer(_works(work), Received(received, begins, senders))

    def _forget_batch(self) -> None:
        self._batch = Transfer()
        self._sends: list[tuple[Tensor, int]] = []
        self._receives: list[tuple[Tensor, int]] = []

    def send(self, x: Tensor, peer: int, chunk: int) -> Any:
        """Send the contiguous ``x`` to one process, which receives the same ``chunk`` of this exchange. It starts at
        the next :meth:`flush`, at the latest."""
        self._sends.append((x, peer))
        return self._batch

    def recv(self, out: Tensor, peer: int, chunk: int) -> Any:
        """Receive into the contiguous ``out`` what one process sends as the same ``chunk``, likewise."""
        self._receives.append((out, peer))
        return self._batch

    def flush(self) -> Any:
        """Start all that :meth:`send` and :meth:`recv` were given since the last time, as one batch, which waits for no
        other. One header goes from each process to each that it sends something.

        NCCL runs the transfers of a communicator one behind the other on one stream. Two processes that each waited for
        the other's send first would never end.
        """
        batch, sends, receives = self._batch, self._sends, self._receives
        self._forget_batch()
        if not sends and not receives:
            return batch
        assert self.headers is not None
        self.headers.verify([])  # what is sent may be made of what has come
        receivers, senders = (list(dict.fromkeys(peer for _, peer in side)) for side in (sends, receives))
        own, came = self.headers.own(), self.headers.room(len(senders))
        heads = came.split(BYTES) if len(senders) > 1 else (came,)
        sent = [(own, peer) for peer in receivers] + [(_movable(x), peer) for x, peer in sends]
        received = list(zip(heads, senders)) + [(_movable(x), peer) for x, peer in receives]
        departures.note(*(data for data, _ in (*sent, *received)))
        group, device = self.group, own.device
        if self._coalesces is None:
            self._coalesces = bool(group._get_backend(device).supports_coalescing)
        together = self._coalesces  # NCCL: one launch, and one handle
        if together:
            group._start_coalescing(device)
        works: Sequence[Any] = [group.send([data], peer, 0) for data, peer in sent]
        works = [*works, *(group.recv([data], peer, 0) for data, peer in received)]
        if together:
            works = _works(group._end_coalescing(device))
        self.count(sum(x.nbytes for x, _ in sends), sum(x.nbytes for x, _ in receives))
        batch.works, batch.received = works, Received(came, [BYTES * i for i in range(len(senders))], senders)
        return batch

    def count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    def leave_open(self, finish: Callable[[], Any]) -> None:
        """Let a call rest before it has started all its transfers; ``finish`` completes it (:mod:`.opened`)."""
        opened.leave(self.group, finish)

    def close(self) -> None:
        """Complete what must be complete before the next exchange begins (:mod:`.opened`). RuntimeError after
        :meth:`fail`."""
        if self._failed is not None:
            raise RuntimeError(f"an earlier call of these processes ended during its transfers: {self._failed}")
        if opened.calls:
            opened.close(self.group)

    def fail(self, error: BaseException) -> None:
        """Refuse all further exchanges: this process has left one before it started all its transfers. Others would
        take those of the next, on any wire of the process group, for the missing ones."""
        abandoned_groups.setdefault(self.group, str(error))
        for wire in _wires:
            if wire.group == self.group:
                wire._failed = repr(error)

    def wait(self, transfer: Any, device: torch.device) -> None:
        """CPU: block until done, at most the timeout. CUDA: make the current stream wait. Once is enough."""
        for work in transfer.works:
            work.wait(self.timeout) if device.type == "cpu" else work.wait()
        transfer.works = ()
        if transfer.received is not None and self.headers is not None:
            self.headers.arrived(transfer.received)
            transfer.received = None

    def spoils(self) -> list[Tensor]:
        """For a launch over peer memory whose sums are sent on: it sets these to -1 where it fails, so that whoever
        gets what is made of them finds out."""
        return [] if self.headers is None else self.headers.words

    def verify(self, outs: Sequence[Tensor]) -> None:
        """Spoil ``outs``, results of what has come, where that did not belong to this exchange (:mod:`.headers`)."""
        if self.headers is not None:
            self.headers.verify(outs)
