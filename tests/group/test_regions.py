"""What calls that a backward pass makes again belong to."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.checkpoint import checkpoint

from shardsum.group.regions import Regions


class Calls:
    """Calls in reentrant checkpoints: their numbers, and those of the calls that they repeat."""

    def __init__(self) -> None:
        self.regions, self.numbers, self.made = Regions(), itertools.count(1), list[tuple[int, int]]()

    def forward(self) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            call = next(self.numbers)
            self.made.append((call, self.regions.origin(call)))
            return x * x

        return checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True).sum()


def test_a_new_thread_has_regions_of_its_own() -> None:
    """Threads that have ended leave their numbers, and those of their nodes, to later ones."""
    calls, step = Calls(), lambda: calls.forward().backward()
    for _ in range(12):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert calls.made == [(i, (i - 1) * (i % 2 == 0)) for i in range(1, 25)]


def test_threads_whose_nodes_have_the_same_numbers() -> None:
    calls = Calls()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        losses = [pool.submit(calls.forward).result() for pool in (one, another)]
        for pool, loss in zip((one, another), losses):
            pool.submit(loss.backward).result()
        loss = one.submit(calls.forward).result()
        another.submit(loss.backward).result()  # a thread that has made no such node
    assert calls.made == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 0), (6, 5)]
