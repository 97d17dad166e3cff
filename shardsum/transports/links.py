"""Point-to-point transfers of one call: one at a time on gloo, a batch a step on NCCL.

NCCL runs the transfers of a communicator one behind the other on one stream, so two processes that each wait for the
other's send first would never end: all that a process sends and receives in one step goes as one batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .wire import Wire

_MOST_SENDS = 64  # that nobody has waited for


@dataclass
class Transfer:
    """One send or receive; ``handle`` is the wire's once it has started."""

    tensor: Tensor
    peer: int
    number: int
    handle: Any = None


class Links:
    """Starts transfers and waits for them.

    Args:
        wire: what moves the bytes, and counts them.
        batched: transfers start at :meth:`flush`, together (NCCL).
    """

    def __init__(self, wire: Wire, batched: bool) -> None:
        self.wire, self.batched = wire, batched
        self._queued: tuple[list[Transfer], list[Transfer]] = [], []  # sends, receives
        self._sent: deque[Transfer] = deque()
        self._batch: list[Transfer] = []  # the last one

    def send(self, tensor: Tensor, peer: int, number: int) -> None:
        """Send a contiguous tensor, which stays as it is until :meth:`finish`."""
        transfer = Transfer(tensor, peer, number)
        self._sent.append(transfer)
        if self.batched:
            self._queued[0].append(transfer)
            return
        transfer.handle = self.wire.send(tensor, peer, number)
        if len(self._sent) > _MOST_SENDS:
            self.wait(self._sent.popleft())

    def receive(self, tensor: Tensor, peer: int, number: int) -> Transfer:
        """Receive into a contiguous tensor what ``peer`` sends under the same number."""
        transfer = Transfer(tensor, peer, number)
        if self.batched:
            self._queued[1].append(transfer)
        else:
            transfer.handle = self.wire.recv(tensor, peer, number)
        return transfer

    def flush(self) -> None:
        """Start what is queued, as one batch."""
        sends, receives = self._queued
        if sends or receives:
            parts = [[(t.tensor, t.peer, t.number) for t in side] for side in (sends, receives)]
            for transfer, handle in zip((*sends, *receives), self.wire.batch(*parts)):
                transfer.handle = handle
            self._queued, self._batch = ([], []), [*sends, *receives]

    def settle(self) -> None:
        """Wait for the last batch, also where it only sends.

        To be called before kernels that wait for those of other processes. Such kernels fill the GPU and wait for what
        those processes receive; this may depend on what this one still has to send, by kernels that find no room.
        """
        for transfer in self._batch:
            self.wait(transfer)
        self._batch = []

    def wait(self, transfer: Transfer) -> None:
        """Until it is done: the host on gloo, at most the timeout; the current stream on CUDA."""
        self.wire.wait(transfer.handle, transfer.tensor.device)

    def finish(self) -> None:
        """Wait for what has been sent."""
        while self._sent:
            self.wait(self._sent.popleft())
