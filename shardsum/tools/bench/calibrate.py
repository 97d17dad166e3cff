"""Measure the constants of the ``auto`` choice (:mod:`shardsum.transports.costs`) between the processes of a group.

torchrun --nproc-per-node=4 -m shardsum bench --calibrate costs.json
SHARDSUM_COSTS=costs.json torchrun ...
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...local.functional import ragged_sum
from ...training.shard_group import ShardGroup
from ...transports import Wire, stamp
from ...transports.costs import Costs
from .timing import Processes, host_seconds, sampler, turns

_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 16 << 20}  # of one process
_ROW_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}  # of each of four rows
_SMALL = 64


def calibrate(group: ShardGroup, repeat: int = 20) -> Costs:
    """Latency of a small transfer, bandwidth of large ones, rate of a local sum. Collective.

    Where there are several domains: inside them every process sends to the next one; between them member i of each
    sends to member i of the next domain, first all at once, then the first ones alone. On GPUs all but ``enqueue_us``
    are times of the device, in CUDA graphs, and bandwidths are measured one way and both ways.

    Returns:
        The same constants on every process: those of the slowest. With one process the wire's are 0 and 1e9.
    """
    rows = torch.ones((4, _ROW_BYTES[group.device.type] // 4), device=group.device)
    out = torch.empty_like(rows[0])
    seconds = _slowest(group, lambda: ragged_sum(rows, out=out), repeat)
    memory = _three_digits(rows.numel() * 4 / seconds / 1e9)
    if group.wire is None:
        return Costs(0.0, 1e9, memory)
    measure = _of_gpus if group.device.type == "cuda" else _of_cpus
    return measure(_Transfers(group, group.wire, repeat), memory)


class _Transfers:
    """Seconds of transfers between the processes of a group, those of the slowest process."""

    def __init__(self, group: ShardGroup, wire: Wire, repeat: int) -> None:
        self.group, self.wire, self.repeat, self.device = group, wire, repeat, group.device
        self.domains, self.world = group.domains, wire.world_size
        members = self.domains.members
        #: Who sends to whom: every process to the next one in its domain; member i of each domain to that of the next.
        self.neighbours = {a: b for m in members for a, b in zip(m, m[1:] + m[:1])}
        self.across = {a: b for m, n in zip(members, [*members[1:], members[0]]) for a, b in zip(m, n)}
        self.lone_across = {a: self.across[a] for a, *_ in members}
        self.most = max(map(len, members))

    def seconds(self, start: Callable[[], Any]) -> float:
        name = stamp("calibrate", {})

        def call() -> None:
            self.wire.begin(name, 0, beside=False)
            self.wire.wait(start(), self.device)

        return _slowest(self.group, call, self.repeat)

    def exchange(self, receives: list[int], sends: list[int]) -> float:
        def buffers() -> tuple[Tensor, Tensor]:
            return torch.empty(sum(receives), dtype=torch.uint8, device=self.device), self._bytes(sum(sends))

        kept = buffers() if self.device.type == "cuda" else None  # new memory costs a CPU time, as in a collective
        return self.seconds(lambda: self.wire.all_to_all(*(kept or buffers()), receives, sends))

    def move(self, partners: dict[int, int], size: int) -> float:
        """Every key of ``partners`` sends to its value."""
        receives, sends = [0] * self.world, [0] * self.world
        for a, b in partners.items():
            if a != b:
                sends[b] += size if a == self.wire.rank else 0
                receives[a] += size if b == self.wire.rank else 0
        return self.exchange(receives, sends)

    def gather(self, size: int) -> float:
        mine, everyone = self._bytes(size), self._bytes(size * self.world)
        return self.seconds(lambda: self.wire.all_gather(everyone, mine))

    def batch(self, size: int) -> float:
        """As a ring."""
        mine, theirs, rank = self._bytes(size), self._bytes(size), self.wire.rank

        def start() -> Any:
            self.wire.send(mine, (rank + 1) % self.world, 0)
            self.wire.recv(theirs, (rank - 1) % self.world, 0)
            return self.wire.flush()

        return self.seconds(start)

    def _bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _of_cpus(transfers: _Transfers, memory: float) -> Costs:
    domains, size = transfers.domains, _WIRE_BYTES["cpu"]
    if domains.count == 1:
        latency, everyone = transfers.gather(_SMALL), [size // transfers.world] * transfers.world
        gbps = _rate(transfers.exchange(everyone, everyone), latency, everyone[0] * (transfers.world - 1))
        return Costs(_three_digits(latency * 1e6), _three_digits(gbps), memory)
    latency, size = transfers.move(transfers.across, _SMALL), size // transfers.most
    own, shared = (_rate(transfers.move(p, size), latency, size) for p in (transfers.lone_across, transfers.across))
    inside_latency, inside = latency, own
    if transfers.most > 1:
        inside_latency = transfers.move(transfers.neighbours, _SMALL)
        inside = _rate(transfers.move(transfers.neighbours, size), latency, size)
    constants = [inside_latency * 1e6, inside, memory, latency * 1e6, own, shared * transfers.most]
    # What a machine's processes get when all send at once, over whatever link lets more through.
    constants.append(max(inside, shared) * max(map(domains.machine_of.count, domains.machine_of)))
    return Costs(*map(_three_digits, constants))


def _of_gpus(transfers: _Transfers, memory: float) -> Costs:
    group, world, domains, large = transfers.group, transfers.world, transfers.domains, _WIRE_BYTES["cuda"]
    word, around = torch.zeros(2, dtype=torch.int64, device=group.device), {p: (p + 1) % world for p in range(world)}
    launch = _slowest(group, lambda: word.add_(1), transfers.repeat)
    gathering, whole = (transfers.gather(size) - launch for size in (_SMALL, large))
    found = {
        "launch_us": launch * 1e6,
        "gather_latency_us": gathering * 1e6,
        "gather_gbps": _rate(whole, gathering, large * (world - 1)),
        "batch_latency_us": (transfers.batch(_SMALL) - launch) * 1e6,
    }
    latency = transfers.move(around, _SMALL)
    found["exchange_gbps"] = 2 * _rate(transfers.move(around, large), latency, large)
    inside, gbps = latency, _rate(transfers.move({0: domains.members[0][-1] or 1}, large), latency, large)
    if domains.count > 1:
        (first, second), part = domains.members[:2], large // transfers.most
        pairs = dict(zip(first, second))
        latency = transfers.move(transfers.lone_across, _SMALL)
        found["between_latency_us"] = latency * 1e6
        found["between_gbps"] = _rate(transfers.move({first[0]: second[0]}, large), latency, large)
        found["domain_gbps"] = _rate(transfers.move(pairs, part), latency, part) * len(pairs)
        if transfers.most > 1:
            inside = transfers.move(transfers.neighbours, _SMALL)
        else:
            inside, gbps = latency, found["between_gbps"]
    shards, lengths = [torch.zeros((1, 8), device=group.device)] * len(group.virtual_ranks), [1] * len(group.owners)
    found["enqueue_us"] = host_seconds([lambda: group.all_reduce(shards, lengths)], _Together(group), 1e-4) * 1e6
    constants = {name: _three_digits(value) for name, value in found.items()}
    return Costs(_three_digits(inside * 1e6), _three_digits(gbps), memory, **constants)


class _Together(Processes):
    """The processes of a group."""

    def __init__(self, group: ShardGroup) -> None:
        super().__init__()
        self._shards = group

    def slowest(self, value: float) -> float:
        return max(ns for (ns,) in self._shards.gather_ints("calibrate", [round(value * 1e9)], 1)) / 1e9


def _rate(time: float, latency: float, size: int) -> float:
    return size / max(time - latency, 1e-9) / 1e9


def _three_digits(value: float) -> float:
    """Rounded, but never to 0: costs divide by it."""
    return float(f"{value:.3g}")


def _slowest(group: ShardGroup, fn: Callable[[], object], repeat: int) -> float:
    """Seconds of the slowest process: of each the lower quartile, for other work on a machine only adds. On GPUs the
    median of a call in a CUDA graph."""
    together = _Together(group)
    if group.device.type == "cuda":
        return turns({"": sampler(fn, device="cuda", processes=together)}, repeat)[""].median
    times = []
    for _ in range(repeat + 3):
        if group.group is not None:
            dist.barrier(group.group)
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return together.slowest(statistics.quantiles(times[3:], n=4)[0])
