"""The only place that moves data between processes: bytes in, bytes out, counted.

All transfers move ``uint8`` views, so every dtype travels alike on every backend and nothing is ever reduced by it.
:class:`Wire` moves them by the collectives of the user's process group (NCCL), which pairs them by the order in which
each process starts them. On the CPU :class:`shardsum.transports.tagged.TaggedWire` takes its place: point-to-point
transfers on a process group of its own, paired by tags.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from . import departures

#: ``(out, input, group=, async_op=)``; torch 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Stamp(NamedTuple):
    """What an exchange is, on every process that takes part: a hash of 63 bits, and a text for errors."""

    hash: int
    text: str


class Step(NamedTuple):
    """One exchange of a wire: its number there, what it is, and the number of the call that it belongs to."""

    number: int
    stamp: Stamp
    call: int

    def __str__(self) -> str:
        return f"{self.stamp.text} (call {self.call})"


def stamp(name: str, signature: Mapping[str, Any], text: str | None = None) -> Stamp:
    """The stamp of an exchange.

    Args:
        name: the collective, as in ``"backward of all_gather"``.
        signature: all that determines the sizes of its transfers and what is done with them: JSON values, or such as
            print alike on all processes.
        text: what errors say of the signature. Default: its fields.
    """
    said = json.dumps([name, signature], sort_keys=True, default=str)
    number = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little") >> 1
    fields = ", ".join(f"{key}={value}" for key, value in signature.items()) if text is None else text
    return Stamp(number, f"{name}({fields if len(fields) <= 200 else fields[:197] + '...'})")


@dataclass
class Traffic:
    """Bytes this process sent to and received from other processes."""

    sent: int = 0
    received: int = 0


def as_bytes(x: Tensor) -> Tensor:
    """A flat ``uint8`` view of a contiguous tensor."""
    # Not reshape: a contiguous tensor of one element may have stride 0, which view(dtype) refuses.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


#: The call that was left open, if any, by what its wire moves on: see :meth:`Wire.leave_open`. One at most.
open_calls: dict[Any, Callable[[], Any]] = {}
#: Why a process group is not used again: a transfer may still stand on it (:meth:`Wire.fail`).
abandoned_groups: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
#: All wires: one that fails during its transfers fails those of the same process group (:meth:`Wire.fail`).
_wires: WeakSet[Wire] = WeakSet()


class Wire:
    """Transfers between the processes of one group.

    An exchange of all of them begins with :meth:`begin`; its transfers follow in the same order on every process.

    Args:
        group: the torch.distributed group whose processes exchange.
        rank: this process's number in it.
        world_size: how many they are.
        timeout: the limit of a host wait (gloo; NCCL has its watchdog).
    """

    def __init__(self, group: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.world_size = rank, world_size
        self.traffic = Traffic()
        self.step = Step(0, Stamp(0, "nothing"), 0)
        self._failed: str | None = None
        _wires.add(self)

    def begin(self, stamp: Stamp, call: int) -> None:
        """Begin an exchange; what an earlier one left open is completed first (:meth:`close`)."""
        self.close()
        self.step = Step(self.step.number + 1, stamp, call)

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        """Start gathering ``mine`` of every process into ``out``, both contiguous, ``out`` G times as large.

        Returns:
            What :meth:`wait` takes, as all transfers.
        """
        self.count(mine.numel() * mine.element_size() * (self.world_size - 1), 1, 1)
        everyone, own = as_bytes(out), as_bytes(mine)
        departures.note(everyone, own)
        return all_gather_single(everyone, own, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        """Start the exchange of uneven parts of flat tensors; splits in elements, by process, nothing for oneself."""
        itemsize = mine.element_size()
        self.count(itemsize, mine.numel(), out.numel())
        received, sent = as_bytes(out), as_bytes(mine)
        departures.note(received, sent)
        return dist.all_to_all_single(
            received,
            sent,
            [n * itemsize for n in out_splits],
            [n * itemsize for n in in_splits],
            group=self.group,
            async_op=True,
        )

    def send(self, x: Tensor, peer: int, chunk: int) -> Any:
        """Start sending the contiguous ``x`` to one process, which receives the same ``chunk`` of this exchange."""
        self.count(x.numel() * x.element_size(), 1, 0)
        data = as_bytes(x)
        departures.note(data)
        return dist.isend(data, group=self.group, group_dst=peer)

    def recv(self, out: Tensor, peer: int, chunk: int) -> Any:
        """Start receiving into the contiguous ``out`` what one process sends as the same ``chunk``."""
        self.count(out.numel() * out.element_size(), 0, 1)
        data = as_bytes(out)
        departures.note(data)
        return dist.irecv(data, group=self.group, group_src=peer)

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], receives: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Any]:
        """Start :meth:`send` and :meth:`recv` of ``(tensor, peer, chunk)`` as one batch, which waits for no other.

        Returns:
            What :meth:`wait` takes, one for each of ``sends``, then of ``receives``.
        """
        operations = []
        for op, transfers in ((dist.isend, sends), (dist.irecv, receives)):
            for x, peer, _ in transfers:
                self.count(x.numel() * x.element_size(), op is dist.isend, op is dist.irecv)
                operations.append(dist.P2POp(op, as_bytes(x), group=self.group, group_peer=peer))
        works = dist.batch_isend_irecv(operations)
        return [works[min(i, len(works) - 1)] for i in range(len(operations))]  # NCCL has one for all

    def count(self, size: int, sent: int, received: int) -> None:
        self.traffic.sent += size * sent
        self.traffic.received += size * received

    def leave_open(self, finish: Callable[[], Any]) -> None:
        """Let a call rest before it has started all its transfers; ``finish`` completes it.

        Whoever starts the next exchange on any wire of this process completes it first (:meth:`close`). So one call
        at most is open, and calls that processes wait for in another order cannot wait for each other.
        """
        open_calls[self.group] = finish

    def close(self) -> None:
        """Complete what was left open on any wire, if anything. RuntimeError after :meth:`fail`."""
        if self._failed is not None:
            raise RuntimeError(f"an earlier call of these processes ended during its transfers: {self._failed}")
        if open_calls:
            group, finish = open_calls.popitem()
            try:
                finish()
            except Exception:  # another group's is its own, and its handle's
                if group is self.group:
                    raise

    def fail(self, error: BaseException) -> None:
        """Refuse all further exchanges: this process has left one before it started all its transfers. Others would
        take those of the next, on any wire of the process group, for the missing ones."""
        abandoned_groups.setdefault(self.group, str(error))
        for wire in _wires:
            if wire.group == self.group:
                wire._failed = repr(error)

    def wait(self, transfer: Any, device: torch.device) -> None:
        """CPU: block until done, at most the timeout. CUDA: make the current stream wait."""
        if device.type == "cpu":
            transfer.wait(self.timeout)
        else:
            transfer.wait()
