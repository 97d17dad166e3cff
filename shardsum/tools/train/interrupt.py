"""A signal as a request: the step under way is finished and saved, on all processes alike.

SIGINT is Ctrl-C, SIGTERM a launcher's or Slurm's, SIGHUP a closed terminal's, SIGUSR1 what Slurm is often told to send
before the time limit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ...training.shard_group import ShardGroup

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupt:
    """Whether one of ``SIGNALS`` came to this process."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise KeyboardInterrupt  # a second Ctrl-C means now; a launcher sends every signal twice
        self.requested = True


def anywhere(group: ShardGroup, *flags: bool) -> list[bool]:
    """For each flag, whether any process raised it. Collective."""
    return list(map(any, zip(*group.gather_ints("anywhere", flags, len(flags)))))


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch ``SIGNALS`` while the block runs, in the main thread: Python allows no handlers elsewhere."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.signal(number, interrupt.handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
