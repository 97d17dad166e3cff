"""The only place that calls torch.distributed to move data: bytes in, bytes out, counted.

All collectives move ``uint8`` views, so every dtype travels alike on every backend and nothing is ever reduced by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from . import departures

#: ``(out, input, group=, async_op=)``; torch 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """Bytes this process sent to and received from other processes."""

    sent: int = 0
    received: int = 0


def as_bytes(x: Tensor) -> Tensor:
    """A flat ``uint8`` view of a contiguous tensor."""
    # Not reshape: a contiguous tensor of one element may have stride 0, which view(dtype) refuses.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


#: What was left open, by process group: see :meth:`Wire.leave_open`. Several wires may share a group.
open_calls: dict[dist.ProcessGroup, Callable[[], Any]] = {}
#: All wires: one that fails amid its transfers fails those of the same process group (:meth:`Wire.fail`).
_wires: WeakSet[Wire] = WeakSet()


class Wire:
    """Byte collectives on one process group.

    Args:
        group: the torch.distributed group whose processes exchange.
        timeout: the limit of a host wait (gloo; NCCL has its watchdog).
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()
        self._failed: str | None = None
        _wires.add(self)

    def all_gather(self, out: Tensor, mine: Tensor) -> dist.Work:
        """Start gathering ``mine`` of every process into ``out``, both contiguous, ``out`` G times as large."""
        moved = mine.numel() * mine.element_size() * (self.world_size - 1)
        self.traffic.sent += moved
        self.traffic.received += moved
        everyone, own = as_bytes(out), as_bytes(mine)
        departures.note(everyone, own)
        return all_gather_single(everyone, own, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> dist.Work:
        """Start the exchange of uneven parts of flat tensors; splits in elements, by process, nothing for oneself."""
        itemsize = mine.element_size()
        self.traffic.sent += mine.numel() * itemsize
        self.traffic.received += out.numel() * itemsize
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

    def leave_open(self, finish: Callable[[], Any]) -> None:
        """Let a call rest before it has started all its transfers; ``finish`` completes it.

        Processes may come back to it at different times, but a backend matches their transfers by the order in which
        each process starts them: so whoever uses the process group next completes it first (:meth:`close`).
        """
        open_calls[self.group] = finish

    def close(self) -> None:
        """Complete what was left open, if anything: one call at most, as all earlier ones were complete before it.
        RuntimeError after :meth:`fail`."""
        if self._failed is not None:
            raise RuntimeError(f"an earlier call of these processes ended amid its transfers: {self._failed}")
        if open_calls and self.group in open_calls:
            open_calls.pop(self.group)()

    def fail(self, error: BaseException) -> None:
        """Refuse all further calls: this process has left one before it started all its transfers, and others would
        take those of the next, of any group, for the missing ones."""
        for wire in _wires:
            if wire.group == self.group:
                wire._failed = repr(error)

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """CPU: block until done, at most the timeout. CUDA: make the current stream wait."""
        if device.type == "cpu":
            work.wait(self.timeout)
        else:
            work.wait()
