"""Every process gets every process's part, each of one size: between domains a part travels once to each domain.

In an all_gather that sends every part to every process, a part goes to another host as often as that has processes.
Here process i of a domain sends its part to the other members and, of every other domain with m members, to member i
modulo m, which passes it on inside. For transfers from point to point on the CPU: NCCL has algorithms of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .domains import Domains
from .wire import Wire


def pays(domains: Domains, ring: bool) -> bool:
    """Whether fewer bytes travel between domains than in an all_gather; ``ring``: that passes parts around a ring."""
    return not ring and 1 < domains.count < len(domains.of)


def first_receivers(domains: Domains, process: int) -> list[int]:
    """To whom a process sends its own part."""
    mine = domains.of[process]
    index = domains.members[mine].index(process)
    return [
        p for d, members in enumerate(domains.members)
        for p in (members if d == mine else (members[index % len(members)],)) if p != process
    ]  # fmt: skip


def passed_on(domains: Domains, process: int) -> list[int]:
    """Whose parts a process passes on to the other members of its domain."""
    away = [p for p, d in enumerate(domains.of) if d != domains.of[process]]
    return [p for p in away if process in first_receivers(domains, p)]


def transfers(domains: Domains, positions: int) -> Iterator[tuple[int, int, int]]:
    """What travels of parts of so many positions: (sender, receiver, positions)."""
    for a in range(len(domains.of)):
        yield from ((a, b, positions) for b in first_receivers(domains, a))
        others = [b for b in domains.members[domains.of[a]] if b != a]
        yield from ((a, b, positions) for _ in passed_on(domains, a) for b in others)


class Sharing:
    """Such transfers under way; :meth:`pass_on`, then :meth:`finish` complete them.

    Args:
        wire: what they travel on.
        domains: of its processes.
        out: a part of each process, one behind the other, contiguous; this process's own is there.
        number: of this sharing in the exchange.
    """

    def __init__(self, wire: Wire, domains: Domains, out: Tensor, number: int) -> None:
        rank, world_size = wire.rank, wire.world_size
        self._wire, self._device, self._first = wire, out.device, number * world_size
        self._parts = out.chunk(world_size)
        self._on = passed_on(domains, rank)
        self._others = [p for p in domains.members[domains.of[rank]] if p != rank]
        givers = {p: p for p in range(world_size) if p != rank and rank in first_receivers(domains, p)}
        givers |= {a: p for p in self._others for a in passed_on(domains, p)}
        received = {a: wire.recv(self._parts[a], p, self._first + a) for a, p in givers.items()}
        self._awaited = [received[a] for a in self._on]
        self._works: list[Any] = [work for a, work in received.items() if a not in self._on]
        self._works += [wire.send(self._parts[rank], p, self._first + rank) for p in first_receivers(domains, rank)]

    def pass_on(self) -> None:
        """Wait for what has come from other domains, and send it to the other members."""
        for a, work in zip(self._on, self._awaited):
            self._wire.wait(work, self._device)
            self._works += [self._wire.send(self._parts[a], p, self._first + a) for p in self._others]
        self._on, self._awaited = [], []

    def finish(self) -> None:
        self.pass_on()
        for work in self._works:
            self._wire.wait(work, self._device)
