"""The only place that moves data between processes: bytes in, bytes out, counted.

All transfers move ``uint8`` views, so every dtype travels alike on every backend and nothing is ever reduced by it.
:class:`Wire` moves them by the collectives of the user's process group (NCCL), which pairs them by the order in which
each process starts them; what comes is checked by :mod:`.headers`. On the CPU
:class:`shardsum.transports.tagged.TaggedWire` takes its place: point-to-point transfers on a process group of its own,
paired by tags.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from . import departures
from .headers import BYTES, Headers, Received


class Stamp(NamedTuple):
    """What an exchange is, on every process that takes part: a hash of 63 bits, and a text for errors."""

    hash: int
    text: str

    def of(self, call: int) -> Stamp:
        """The stamp of an exchange that belongs to an earlier call, as its backward; 0 for none."""
        if not call:
            return self
        return Stamp(self.hash + call * 0x9FB21C651E98DF25 & (1 << 63) - 1, f"{self.text} of call {call}")


class Step(NamedTuple):
    """One exchange of a wire: its number there, what it is, and the number of the call that it belongs to."""

    number: int
    stamp: Stamp
    call: int

    def __str__(self) -> str:
        return f"{self.stamp.text} (call {self.call})"


#: A :class:`Step` as a plain tuple, which is made in less time.
Begun = tuple[int, Stamp, int]


def stamp(name: str, signature: Mapping[str, Any]) -> Stamp:
    """The stamp of an exchange.

    Args:
        name: the collective, as in ``"backward of all_gather"``.
        signature: all that determines the sizes of its transfers and what is done with them: JSON values, or such as
            print alike on all processes. Errors show its fields.
    """
    said = json.dumps([name, signature], sort_keys=True, default=str)
    number = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little") >> 1
    fields = ", ".join(f"{key}={value}" for key, value in signature.items())
    return Stamp(number, f"{name}({fields if len(fields) <= 200 else fields[:197] + '...'})")


@dataclass
class Traffic:
    """Bytes of shards and results that this process sent to and received from other processes (not of headers)."""

    sent: int = 0
    received: int = 0


def as_bytes(x: Tensor) -> Tensor:
    """A flat ``uint8`` view of a contiguous tensor."""
    # Not reshape: a contiguous tensor of one element may have stride 0, which view(dtype) refuses.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@dataclass
class Transfer:
    """What :meth:`Wire.wait` takes: what is under way, and the headers that come with it."""

    works: Sequence[Any]
    received: Received | None = None


#: Calls that were left open, by what their wire moves on: see :meth:`Wire.leave_open`. One at most, but for threads.
open_calls: dict[Any, Callable[[], Any]] = {}
_open_calls_lock = threading.Lock()
#: Why a process group is not used again: a transfer may still stand on it (:meth:`Wire.fail`).
abandoned_groups: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
#: All wires: one that fails during its transfers fails those of the same process group (:meth:`Wire.fail`).
_wires: WeakSet[Wire] = WeakSet()


class Wire:
    """Transfers between the processes of one group.

    An exchange of all of them begins with :meth:`begin`; its transfers follow in the same order on every process.
    Results made of what came are shown to :meth:`verify` before they are handed out, or sent on.

    Args:
        group: the torch.distributed group whose processes exchange.
        rank: this process's number in it.
        world_size: how many they are.
        timeout: the limit of a host wait (gloo; NCCL has its watchdog).
        headers: what tells messages apart. None: they are paired by something better than their order.
    """

    def __init__(
        self, group: Any, rank: int, world_size: int, timeout: timedelta, headers: Headers | None = None
    ) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.world_size = rank, world_size
        self.headers = headers
        self.traffic = Traffic()
        self._step: Begun = (0, Stamp(0, "nothing"), 0)
        self._failed: str | None = None
        self._met = False
        _wires.add(self)

    @property
    def step(self) -> Step:
        """The exchange that has begun last."""
        return Step(*self._step)

    def begin(self, stamp: Stamp, call: int, origin: int = 0) -> None:
        """Begin an exchange; what an earlier one left open is completed first (:meth:`close`).

        Args:
            call: the number of the call that it belongs to.
            origin: of the call whose backward it is, or that it repeats in a backward pass; 0 for neither. Messages
                carry it, too: the backward passes of equal calls must not meet in another order.
        """
        self.close()
        self._step = step = Step(self._step[0] + 1, stamp.of(origin), call)
        if self.headers is not None:
            self.headers.begin(step)

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        """Start gathering ``mine`` of every process into ``out``, both contiguous, ``out`` G times as large.

        Returns:
            What :meth:`wait` takes, as all transfers.
        """
        self.count(mine.numel() * mine.element_size() * (self.world_size - 1), 1, 1)
        return self._gather([as_bytes(out)], [as_bytes(mine)])

    def _gather(self, outs: list[Tensor], mine: list[Tensor]) -> Transfer:
        """All_gathers of headers and of bytes, in one launch."""
        assert self.headers is not None
        own, came = self.headers.own(), self.headers.room(self.world_size)
        departures.note(own, came, *outs, *mine)
        options = AllgatherOptions()
        options.asyncOp = True
        # What torch's coalescing manager calls; torch 2.13 renamed it.
        gather = getattr(self.group, "all_gather_single_coalesced", None) or self.group.allgather_into_tensor_coalesced
        self._met = True
        others = [p for p in range(self.world_size) if p != self.rank]
        work = gather([came, *outs], [own, *mine], options)
        return Transfer([work], Received(came, [BYTES * p for p in others], others))

    def meet(self, device: torch.device) -> None:
        """To be called before a :meth:`batch` in which some processes may take no part: where NCCL has not connected
        them yet, it would wait for all of them. Collective."""
        if not self._met:
            self.wait(self._gather([], []), device)

    def header(self, like: Tensor) -> Tensor | None:
        """What every part of an :meth:`all_to_all` that is not empty begins with, as elements of the dtype of
        ``like``; None where nothing is needed."""
        return None if self.headers is None else self.headers.own().view(like.dtype)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        """Start the exchange of uneven parts of flat tensors; splits in elements, by process, nothing for oneself.
        Parts include their :meth:`header`."""
        itemsize = mine.element_size()
        senders, receivers = ([p for p, n in enumerate(s) if n] for s in (out_splits, in_splits))
        self.count(1, mine.numel() * itemsize - BYTES * len(receivers), out.numel() * itemsize - BYTES * len(senders))
        received, sent = as_bytes(out), as_bytes(mine)
        departures.note(received, sent)
        work = dist.all_to_all_single(
            received,
            sent,
            [n * itemsize for n in out_splits],
            [n * itemsize for n in in_splits],
            group=self.group,
            async_op=True,
        )
        begins = [sum(out_splits[:p]) * itemsize for p in senders]
        return Transfer([work], Received(received, begins, senders))

    def send(self, x: Tensor, peer: int, chunk: int) -> Any:
        """Start sending the contiguous ``x`` to one process, which receives the same ``chunk`` of this exchange."""
        return self.batch([(x, peer, chunk)], [])[0]

    def recv(self, out: Tensor, peer: int, chunk: int) -> Any:
        """Start receiving into the contiguous ``out`` what one process sends as the same ``chunk``."""
        return self.batch([], [(out, peer, chunk)])[0]

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], receives: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Any]:
        """Start :meth:`send` and :meth:`recv` of ``(tensor, peer, chunk)`` as one batch, which waits for no other. One
        header goes from each process to each that it sends something.

        Returns:
            What :meth:`wait` takes, one for each of ``sends``, then of ``receives``.
        """
        assert self.headers is not None
        self.headers.verify([])  # what is sent may be made of what has come
        receivers, senders = (list(dict.fromkeys(peer for _, peer, _ in side)) for side in (sends, receives))
        own, came = self.headers.own(), self.headers.room(len(senders))
        moved: list[tuple[Any, Tensor, int]] = [(dist.isend, own, peer) for peer in receivers]
        moved += [(dist.irecv, part, peer) for part, peer in zip(came.split([BYTES] * len(senders)), senders)]
        moved += [(dist.isend, as_bytes(x), peer) for x, peer, _ in sends]
        moved += [(dist.irecv, as_bytes(x), peer) for x, peer, _ in receives]
        departures.note(*(data for _, data, _ in moved))
        works = dist.batch_isend_irecv(
            [dist.P2POp(op, data, group=self.group, group_peer=peer) for op, data, peer in moved]
        )
        for op, data, _ in moved[len(receivers) + len(senders) :]:
            self.count(data.numel(), op is dist.isend, op is dist.irecv)
        each = [works[min(i, len(works) - 1)] for i in range(len(moved))]  # NCCL has one for all
        transfers = [Transfer([work]) for work in each[len(receivers) + len(senders) :]]
        peers = [peer for _, peer, _ in (*sends, *receives)]
        for i, peer in enumerate((*receivers, *senders)):  # a header belongs to the first message of its pair
            first = transfers[peers.index(peer) if i < len(receivers) else peers.index(peer, len(sends))]
            first.works = [each[i], *first.works]
            if i >= len(receivers):
                first.received = Received(came, [BYTES * (i - len(receivers))], [peer])
        return transfers

    def count(self, size: int, sent: int, received: int) -> None:
        self.traffic.sent += size * sent
        self.traffic.received += size * received

    def leave_open(self, finish: Callable[[], Any]) -> None:
        """Let a call rest before it has started all its transfers; ``finish`` completes it.

        Whoever starts the next exchange on any wire of this process completes it first (:meth:`close`). So one call
        at most is open, and calls that processes wait for in another order cannot wait for each other. ``finish`` may
        be called several times, by several threads at once: all return when it is complete.
        """
        open_calls[self.group] = finish

    def close(self) -> None:
        """Complete what was left open on any wire, if anything. RuntimeError after :meth:`fail`."""
        if self._failed is not None:
            raise RuntimeError(f"an earlier call of these processes ended during its transfers: {self._failed}")
        for group, finish in list(open_calls.items()) if open_calls else ():
            try:
                finish()
            except Exception:  # another group's is its own, and its handle's
                if group is self.group:
                    raise
            finally:
                with _open_calls_lock:
                    if open_calls.get(group) is finish:
                        del open_calls[group]

    def fail(self, error: BaseException) -> None:
        """Refuse all further exchanges: this process has left one before it started all its transfers. Others would
        take those of the next, on any wire of the process group, for the missing ones."""
        abandoned_groups.setdefault(self.group, str(error))
        for wire in _wires:
            if wire.group == self.group:
                wire._failed = repr(error)

    def wait(self, transfer: Any, device: torch.device) -> None:
        """CPU: block until done, at most the timeout. CUDA: make the current stream wait."""
        for work in transfer.works:
            work.wait(self.timeout) if device.type == "cpu" else work.wait()
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
