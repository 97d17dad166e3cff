"""Which waits are certain never to end, from what processes have published."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardsum.transports import watch
from shardsum.transports.store import BoundedStore


def state(begun: int, waits_for: int | None = None, threads: bool = False) -> dict[str, Any]:
    """Of a wire on which ``begun`` exchanges have begun, the last of which waits for a process."""
    waits = None if waits_for is None else [waits_for, begun, f"exchange {begun}", begun]
    steps = [[n, 100 + n, n, f"exchange {n}"] for n in range(1, begun + 1)]
    return {"steps": steps, "waits": waits, "threads": threads}


@pytest.mark.parametrize(
    ("mine", "theirs", "is_circle"),
    [
        # each waits for the other one, which has not begun that exchange
        ({"a": state(3, 1), "b": state(1)}, {"a": state(2), "b": state(2, 0)}, True),
        # process 1 has not published since its wait in b: process 0 has begun that exchange
        ({"a": state(3, 1), "b": state(2)}, {"a": state(2), "b": state(2, 0)}, False),
        # the same, and process 0 has dropped the group of b since
        ({"a": state(3, 1)}, {"a": state(2), "b": state(2, 0)}, False),
        # another thread of process 1 may begin what process 0 waits in
        ({"a": state(3, 1), "b": state(1)}, {"a": state(2, None, True), "b": state(2, 0, True)}, False),
        # process 1 has not published since it constructed the group of a
        ({"a": state(3, 1), "b": state(1)}, {"b": state(2, 0)}, False),
    ],
)
def test_a_circle_is_named_only_where_it_is_certain(mine: Any, theirs: Any, is_circle: bool) -> None:
    store = BoundedStore(dist.HashStore(), 5)
    board = watch.Board(store, (0, 1), 0)
    wire: Any = SimpleNamespace(name="a", state=lambda: mine["a"], step=SimpleNamespace(number=3))
    for _ in range(3):
        store.set("0", json.dumps(mine))
        store.set("1", json.dumps(theirs))
        found = board.find(wire)
    assert (found is not None) == is_circle
    if found is not None:
        assert found.startswith("processes wait for each other in calls of several groups, made in different orders")
        assert store.get("circle/1") is not None
