"""Exit waits for tensors that threads of a process group still hold, as long as they may, and no longer."""

from __future__ import annotations

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
