"""Ctrl-C as a request: the step under way is finished and saved, on all processes alike."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from ...training.shard_group import ShardGroup


class Interrupt:
    """Whether SIGINT or SIGTERM came to this process; :meth:`anywhere` asks all of them, so that they stop together."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise KeyboardInterrupt  # a second Ctrl-C means now; a launcher sends every signal twice
        self.requested = True

    def anywhere(self, group: ShardGroup) -> bool:
        """True on every process when any process was asked to stop. Collective."""
        flags = [torch.tensor([self.requested], dtype=torch.int64, device=group.device) for _ in group.virtual_ranks]
        total = group.all_reduce(flags, [1] * group.num_virtual_ranks, size=1)
        return bool(total.item())


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM while the block runs (in the main thread; elsewhere Python allows no handlers)."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
