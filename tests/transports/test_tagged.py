"""Tags of exchanges that could be confused are far apart."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from shardsum.transports import Stamp, TaggedWire, tagged


@pytest.mark.parametrize("base", [0, 123_456_789])
def test_near_exchanges_of_one_stamp_share_no_tag(base: int) -> None:
    """Neither those of collectives nor those of chunks, with up to 5,000 transfers an exchange."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    board: Any = SimpleNamespace()
    wire = TaggedWire(group, timedelta(1), "", board, lambda step: None, lambda step, verdict: None)
    stamp, modulus = Stamp(base, "sum"), 1 << 31

    def tags(number: int, call: int) -> int:
        wire._step = (number - 1, stamp, 0)
        wire.begin(stamp, call)
        return wire._tags

    first = tags(base + 1, base + 1)
    offsets = (0, tagged._CHUNKS, -tagged._CHUNKS)
    for number in range(257):
        for call in range(-256, 257):
            if number or call:
                apart = tags(base + 1 + number, base + 1 + call) - first
                assert all(5_000 < (apart - offset) % modulus < modulus - 5_000 for offset in offsets)
