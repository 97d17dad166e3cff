"""Point-to-point transfers of one call: one at a time on gloo, a batch a step on NCCL.

NCCL runs the transfers of a communicator one behind the other on one stream, so two processes that each wait for the
other's send first would never end: all that a process sends and receives in one step goes as one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from . import departures
from .wire import Wire, as_bytes


@dataclass
class Transfer:
    """One send or receive; ``work`` is there once it has started."""

    tensor: Tensor
    work: dist.Work | None = None


class Links:
    """Starts transfers, counts their bytes, waits for them.

    Args:
        wire: the process group, its timeout and what counts bytes.
        batched: transfers start at :meth:`flush`, together (NCCL).
    """

    def __init__(self, wire: Wire, batched: bool) -> None:
        self.wire, self.batched = wire, batched
        self._queue: list[tuple[Transfer, dist.P2POp]] = []
        self._open: list[Transfer] = []

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Start sending a contiguous tensor; it stays as it is until :meth:`finish`."""
        self.wire.traffic.sent += tensor.numel() * tensor.element_size()
        self._start(dist.isend, tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Start receiving into a contiguous tensor."""
        self.wire.traffic.received += tensor.numel() * tensor.element_size()
        return self._start(dist.irecv, tensor, peer, tag)

    def _start(self, op, tensor: Tensor, peer: int, tag: int) -> Transfer:  # type: ignore[no-untyped-def]
        data, group = as_bytes(tensor), self.wire.group
        transfer = Transfer(data)
        if self.batched:
            self._queue.append((transfer, dist.P2POp(op, data, group=group, tag=tag, group_peer=peer)))
        else:
            departures.note(data)
            name = "group_dst" if op is dist.isend else "group_src"
            transfer.work = op(data, group=group, tag=tag, **{name: peer})
        self._open.append(transfer)
        return transfer

    def flush(self) -> None:
        """Start what is queued, as one batch."""
        if self._queue:
            works = dist.batch_isend_irecv([op for _, op in self._queue])
            for i, (transfer, _) in enumerate(self._queue):
                transfer.work = works[min(i, len(works) - 1)]  # NCCL gives one work for all
            self._queue = []

    def wait(self, transfer: Transfer) -> None:
        """Until it is done: the host on gloo, at most the timeout; the current stream on CUDA."""
        if transfer.work is not None:
            self.wire.wait(transfer.work, transfer.tensor.device)
            transfer.work = None

    def finish(self) -> None:
        """Wait for all that are left."""
        for transfer in self._open:
            self.wait(transfer)
        self._open = []
