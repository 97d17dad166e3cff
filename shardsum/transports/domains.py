"""Domains: which processes share fast memory or links. By default those of one host.

A domain is a number, 0, 1, ... in the order of each domain's first process. What differs between processes of one
domain and of two is the link between them (:mod:`shardsum.transports.costs`), never a result.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Domains:
    """The domain of every process.

    Attributes:
        of: the domain of every process.
        names: of every domain.
        machines: the machine of every process; several domains may share its CPUs. Empty: every domain is one.

    Example:
        >>> d = agree(["left", "left", "right"])
        >>> d.of, d.names, d.members
        ((0, 0, 1), ('left', 'right'), ((0, 1), (2,)))
    """

    of: tuple[int, ...]
    names: tuple[str, ...]
    machines: tuple[int, ...] = ()

    @property
    def machine_of(self) -> tuple[int, ...]:
        return self.machines or self.of

    @property
    def count(self) -> int:
        return len(self.names)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The processes of every domain."""
        return tuple(tuple(p for p, d in enumerate(self.of) if d == i) for i in range(self.count))

    @property
    def single(self) -> Domains:
        """Every process a domain of its own."""
        return Domains(tuple(range(len(self.of))), tuple(f"process {p}" for p in range(len(self.of))), self.machine_of)

    def describe(self) -> str:
        """One line for ``explain`` and repr: ``2 domains: node-a [0-3], node-b [4-7]``."""
        parts = [f"{name} [{_ranges(m)}]" for name, m in zip(self.names, self.members)]
        return f"{self.count} domain{'s' * (self.count != 1)}: {', '.join(parts)}"


def host() -> str:
    """A name for this process's host: its host name and boot, since host names repeat among containers."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()}|{boot}"


def agree(named: Sequence[Hashable], hosts: Sequence[Hashable] = ()) -> Domains:
    """Domains from one name a process: what :func:`host` says on each of them, or what the user passed. ``hosts``: what
    :func:`host` says, where that may be something else.

    Hosts of one name that booted separately are told apart by their first process.
    """
    numbers: dict[Hashable, int] = {}
    of = tuple(numbers.setdefault(name, len(numbers)) for name in named)
    machines: dict[Hashable, int] = {}
    machine_of = tuple(machines.setdefault(name, len(machines)) for name in hosts)
    texts = [str(name).split("|")[0] for name in numbers]
    first = [of.index(i) for i in range(len(numbers))]
    names = tuple(t if texts.count(t) == 1 else f"{t} (process {p})" for t, p in zip(texts, first))
    return Domains(of, names, machine_of)


def check(domains: Sequence[Hashable], world_size: int) -> None:
    """ValueError unless ``domains`` names one int or str for every process."""
    if isinstance(domains, str) or not isinstance(domains, Sequence):
        raise ValueError(f"domains: expected a list of {world_size} names, one a process, got {domains!r}")
    if len(domains) != world_size:
        raise ValueError(f"domains: {len(domains)} names for {world_size} processes")
    for process, name in enumerate(domains):
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise ValueError(f"domains: process {process} has {name!r}, expected an int or a str")


def _ranges(processes: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for p in processes:
        if parts and parts[-1][1] == p - 1:
            parts[-1][1] = p
        else:
            parts.append([p, p])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
