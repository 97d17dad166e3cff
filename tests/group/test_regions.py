"""What calls that a backward pass makes again belong to."""

from __future__ import annotations

import itertools
import threading

import torch
from torch.utils.checkpoint import checkpoint

from shardsum.group.regions import Regions


def test_a_new_thread_has_regions_of_its_own() -> None:
    """Threads that have ended leave their numbers, and those of their nodes, to later ones."""
    regions, numbers = Regions(), itertools.count(1)
    found: list[tuple[int, int]] = []

    def step() -> None:
        calls: list[tuple[int, int]] = []

        def region(x: torch.Tensor) -> torch.Tensor:
            call = next(numbers)
            calls.append((call, regions.origin(call)))
            return x * x

        checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
        (forward, origin), (_, again) = calls
        assert origin == 0
        found.append((forward, again))

    for _ in range(12):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert len(found) == 12 and all(forward == again for forward, again in found), found
