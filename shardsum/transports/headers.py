"""Headers of messages that are paired by the order in which they arrive (NCCL): 16 bytes that say which exchange they
belong to, checked on the device by who receives them.

A header is a 62-bit number, twice: a hash of the group, the number of the exchange and of the call, and the stamp of
what it is (:class:`.stamps.Stamp`). Every message of an exchange brings one, from each sender to each receiver. Once
the rows have been summed, one launch compares what came with this process's own header (:meth:`Headers.verify`). Where
they differ, every byte of the results becomes 255 (NaN, -1 of integers), and this process's header and all later ones
become invalid: whoever gets what was made of those rows finds out, too, although it may never have heard of the process
that is out of step. A record in pinned memory tells the host, which looks at the next call (:meth:`Headers.found`).

Why it suffices: until the first exchange that differs, all messages were paired rightly. In that one no header of the
other process can be the awaited one, in whatever order its messages come, since its number is never given again. A
message that came in full brings its header, whose place is at the front.

Nothing is read by the host. A CUDA graph repeats the numbers that it was captured with, the same on all processes.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .stamps import Step

BYTES = 16
_HISTORY = 256  # exchanges whose headers this process can name
TURN, TURN_OF_CALLS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd numbers of mixed bits
_WORD = (1 << 64) - 1


class Received(NamedTuple):
    """Headers that came: bytes in which they lie, where in them, and from which processes."""

    data: Tensor
    offsets: list[int]
    processes: list[int]


class Found(NamedTuple):
    """What the device has found: the first header that was not the awaited one."""

    process: int  # its sender
    theirs: int
    mine: int


class Headers:
    """The headers of one wire on one process.

    Args:
        group: a number of the ShardGroup, the same on its processes and on no other ShardGroup.
        device: where messages lie.
    """

    def __init__(self, group: int, device: torch.device) -> None:
        self._group, self._device = group, device
        with torch.inference_mode(False):  # they are written later
            self._state = torch.zeros(2, dtype=torch.int64, device=device)  # -1 once a difference was found
            self._record = torch.zeros(4, dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            self._record = self._record.pin_memory()
            torch.cuda.synchronize(device)  # calls may come on any stream
        self._found = ctypes.c_int64.from_address(self._record.data_ptr())
        self._value = 0
        self._header: Tensor | None = None
        self._arrived: list[Received] = []
        self._checked = False  # headers of this exchange
        self._others: tuple[list[int], list[int]] | None = None
        self._steps: OrderedDict[int, Step] = OrderedDict()

    def begin(self, step: Step) -> None:
        """Begin an exchange."""
        mixed = (self._group + step.stamp.hash + step.number * TURN + step.call * TURN_OF_CALLS) & _WORD
        mixed = (mixed ^ mixed >> 32) * TURN & _WORD
        self._value = (mixed ^ mixed >> 29) >> 2
        self._header, self._arrived, self._checked = None, [], False
        self._steps[self._value] = step
        if len(self._steps) > _HISTORY:
            self._steps.popitem(last=False)

    @property
    def history(self) -> dict[int, str]:
        """What the last exchanges were, by header."""
        return {value: str(step) for value, step in self._steps.items()}

    def own(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        """This exchange's header, ``(16,)`` bytes, as elements of ``dtype``."""
        return self._words().view(dtype)

    def _words(self) -> Tensor:
        if self._header is None:
            self._header = torch.bitwise_or(self._state, self._value)
        return self._header

    @property
    def words(self) -> list[Tensor]:
        """What a kernel sets to -1 to make this exchange's header, and all later ones, invalid. Two words each."""
        return [self._state, self._words()]

    def room(self, count: int) -> Tensor:
        """Where headers of so many senders are received."""
        return torch.empty(count * BYTES, dtype=torch.uint8, device=self._device)

    def of_all(self, came: Tensor, rank: int) -> Received:
        """What an all_gather of headers has brought process ``rank``."""
        if self._others is None:
            others = [p for p in range(came.numel() // BYTES) if p != rank]
            self._others = [BYTES * p for p in others], others
        return Received(came, *self._others)

    def arrived(self, received: Received) -> None:
        """Note headers whose messages have come (on CUDA: for which the current stream waits)."""
        if received.offsets:
            self._arrived.append(received)

    def verify(self, outs: Sequence[Tensor]) -> None:
        """Check what has arrived since the last time, and spoil ``outs`` (contiguous) where anything did not fit in
        this exchange. To be called when they are complete, and before anything made of what arrived is sent."""
        if not (self._arrived or self._checked):
            return
        header = self._words()
        outs, *arrived = [x for x in outs if x.numel()], *self._arrived
        last = arrived.pop() if arrived else Received(self._state.view(torch.uint8), [], [])
        for received in arrived:
            check_headers([], header, self._state, self._record, *received)
        check_headers(outs, header, self._state, self._record, *last)
        self._arrived, self._checked = [], True

    def found(self) -> Found | None:
        """What has been found by now; the host does not wait for the device."""
        return Found(*self._record.tolist()[1:]) if self._found.value else None


# The operator


def _check_headers(
    outs: list[Tensor],
    header: Tensor,
    state: Tensor,
    record: Tensor,
    received: Tensor,
    offsets: list[int],
    processes: list[int],
) -> None:
    """In plain torch, on any device, without a synchronisation."""
    bad = header[:1] < 0
    if offsets:
        came = torch.stack([received[i : i + BYTES] for i in offsets])
        differs = (came != header.view(torch.uint8)).any(1)
        first = differs.to(torch.uint8).argmax()
        theirs = came.view(torch.int64)[first, :1]
        sender = torch.zeros_like(theirs)
        # A tensor of the processes would be a copy from the host, which cannot be captured.
        for i, process in enumerate(processes):
            sender.masked_fill_(first == i, process)
        bad = bad | differs.any()
        said = torch.cat([torch.ones_like(theirs), sender, theirs, header[:1]])
        device = record.to(header.device, non_blocking=True)
        record.copy_(torch.where(differs.any() & (device[:1] == 0), said, device), non_blocking=True)
    state.masked_fill_(bad, -1)
    header.masked_fill_(bad, -1)
    for out in outs:
        out.as_strided((out.numel(),), (1,)).view(torch.uint8).masked_fill_(bad, 255)


# The native library, once loaded, has a kernel for CUDA that takes precedence: csrc/cuda/check_headers.cu.
_library = torch.library.Library("shardsum", "FRAGMENT")
_library.define(
    "check_headers(Tensor(a!)[] outs, Tensor(b!) header, Tensor(c!) state, Tensor(d!) record, Tensor received, "
    "int[] offsets, int[] processes) -> ()"
)
_library.impl("check_headers", _check_headers, "CompositeExplicitAutograd")
check_headers = torch.ops.shardsum.check_headers.default._op
