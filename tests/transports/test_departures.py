"""Exit waits for tensors that threads of a process group still hold, as long as they may, and no longer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from shardsum.transports import departures


def test_exit_waits_until_noted_tensors_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.ones(3)]
    departures.note(held[0])
    threading.Timer(0.2, held.clear).start()
    begin = time.monotonic()
    departures.wait()
    assert not held and time.monotonic() - begin >= 0.1

    departures.note(torch.ones(3))  # gone at once
    kept = torch.ones(3)
    departures.note(kept)
    monkeypatch.setattr(departures, "LIMIT", 0.05)
    departures.wait()  # gives up


PROGRAM = """
import contextlib, threading, time
import torch.distributed as dist
from shardsum.transports import store, watch

key_value = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
client = key_value.clone()

def ask() -> None:
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        while True:
            store.within(5, client.check, ["key"])

class Wire:
    look = staticmethod(lambda: [client.check(["key"]) for _ in range(2000)])

wire = Wire()
watch.TICK_S = 0
{busy}
time.sleep(0.3)
print("done")
"""


@pytest.mark.parametrize("busy", ["threading.Thread(target=ask, daemon=True).start()", "watch.add(wire)"])
def test_the_end_of_the_interpreter_waits_for_operations_of_the_store(busy: str) -> None:
    """Without the wait nearly every end comes amid an operation, and aborts."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(busy=busy)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
