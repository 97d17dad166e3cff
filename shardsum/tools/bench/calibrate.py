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
from ...transports.domains import Domains
from .timing import Processes, host_seconds, sampler, turns

_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 16 << 20}  # of one process
_ROW_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}  # of each of four rows


def calibrate(group: ShardGroup, repeat: int = 20) -> Costs:
    """Latency of a small transfer, bandwidth of large ones, rate of a local sum. Collective.

    Where there are several domains: inside them every process sends to the next one; between them member i of each
    sends to member i of the next domain, first all at once, then the first ones alone. On GPUs all but ``enqueue_us``
    are times of the device, in CUDA graphs, and bandwidths are measured one way and both ways.

    Returns:
        The same constants on every process: those of the slowest. With one process the wire's are 0 and 1e9.
    """
    device, domains = group.device, group.domains
    rows = torch.ones((4, _ROW_BYTES[device.type] // 4), device=device)
    out = torch.empty_like(rows[0])
    seconds = _slowest(group, lambda: ragged_sum(rows, out=out), repeat)
    memory = rows.numel() * 4 / seconds / 1e9
    wire = group.wire
    if wire is None:
        return Costs(0.0, 1e9, _three_digits(memory))
    if device.type == "cuda":
        return _of_gpus(group, wire, _three_digits(memory), repeat)
    if domains.count == 1:
        latency = _slowest(group, lambda: _small(wire, device), 5 * repeat)
        each = _WIRE_BYTES[device.type] // wire.world_size
        everyone = [each] * wire.world_size
        seconds = _slowest(group, lambda: _move(wire, device, everyone, everyone), repeat)
        bandwidth = each * (wire.world_size - 1) / max(seconds - latency, 1e-9) / 1e9
        return Costs(*map(_three_digits, (latency * 1e6, bandwidth, memory)))

    def gbps(partners: dict[int, int], size: int) -> float:
        seconds = _slowest(group, lambda: _move(wire, device, *_splits(wire, partners, size)), repeat)
        return size / max(seconds - latency, 1e-9) / 1e9

    across = _across(domains)
    latency = _slowest(group, lambda: _move(wire, device, *_splits(wire, across, 64)), 5 * repeat)
    neighbours = {a: b for m in domains.members for a, b in zip(m, m[1:] + m[:1])}
    size = _WIRE_BYTES[device.type] // max(map(len, domains.members))
    own, shared = gbps({a: across[a] for a, *_ in domains.members}, size), gbps(across, size)
    inside_latency, inside = latency, own
    if any(a != b for a, b in neighbours.items()):
        inside_latency = _slowest(group, lambda: _move(wire, device, *_splits(wire, neighbours, 64)), 5 * repeat)
        inside = gbps(neighbours, size)
    members = max(map(len, domains.members))
    constants = [inside_latency * 1e6, inside, memory, latency * 1e6, own, shared * members]
    # What a machine's processes get when all send at once, over whatever link lets more through.
    constants.append(max(inside, shared) * max(map(domains.machine_of.count, domains.machine_of)))
    return Costs(*map(_three_digits, constants))


def _of_gpus(group: ShardGroup, wire: Wire, memory: float, repeat: int) -> Costs:
    device, domains, world = group.device, group.domains, wire.world_size
    word, around = torch.zeros(2, dtype=torch.int64, device=device), {p: (p + 1) % world for p in range(world)}

    def seconds(start: Callable[[], Any]) -> float:
        def call() -> None:
            wire.begin(stamp("calibrate", {}), 0, beside=False)
            wire.wait(start(), device)

        return _slowest(group, call, repeat)

    def move(partners: dict[int, int], size: int) -> float:
        receives, sends = _splits(wire, partners, size)
        data, received = _bytes(sum(sends), device), _bytes(sum(receives), device)
        return seconds(lambda: wire.all_to_all(received, data, receives, sends))

    def gather(size: int) -> float:
        mine, everyone = _bytes(size, device), _bytes(size * world, device)
        return seconds(lambda: wire.all_gather(everyone, mine)) - launch

    def batch(size: int) -> float:
        mine, theirs = _bytes(size, device), _bytes(size, device)

        def start() -> Any:
            wire.send(mine, around[wire.rank], 0)
            wire.recv(theirs, (wire.rank - 1) % world, 0)
            return wire.flush()

        return seconds(start) - launch

    def rate(time: float, latency: float, size: int) -> float:
        return size / max(time - latency, 1e-9) / 1e9

    launch = _slowest(group, lambda: word.add_(1), repeat)
    small, large, most = 64, _WIRE_BYTES["cuda"], max(map(len, domains.members))
    gathering, whole = gather(small), gather(large)
    found = {
        "launch_us": launch * 1e6,
        "gather_latency_us": gathering * 1e6,
        "gather_gbps": rate(whole, gathering, large * (world - 1)),
        "batch_latency_us": batch(small) * 1e6,
    }
    latency = move(around, small)
    found["exchange_gbps"] = 2 * rate(move(around, large), latency, large)
    inside, gbps = latency, rate(move({0: domains.members[0][-1] or 1}, large), latency, large)
    if domains.count > 1:
        first, second = domains.members[:2]
        pairs = dict(zip(first, second))
        across = _across(domains)
        latency = move({a: across[a] for a, *_ in domains.members}, small)
        found["between_latency_us"] = latency * 1e6
        found["between_gbps"] = rate(move({first[0]: second[0]}, large), latency, large)
        found["domain_gbps"] = rate(move(pairs, large // most), latency, large // most) * len(pairs)
        if most > 1:
            inside = move({a: b for m in domains.members for a, b in zip(m, m[1:] + m[:1])}, small)
        else:
            inside, gbps = latency, found["between_gbps"]
    shards, lengths = [torch.zeros((1, 8), device=device)] * len(group.virtual_ranks), [1] * group.num_virtual_ranks
    found["enqueue_us"] = host_seconds([lambda: group.all_reduce(shards, lengths)], _Together(group), 1e-4) * 1e6
    constants = {name: _three_digits(value) for name, value in found.items()}
    return Costs(_three_digits(inside * 1e6), _three_digits(gbps), memory, **constants)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


class _Together(Processes):
    """The processes of a group."""

    def __init__(self, group: ShardGroup) -> None:
        super().__init__()
        self._shards = group

    def slowest(self, value: float) -> float:
        group = self._shards
        mine = torch.tensor([value], dtype=torch.float64, device=group.device)
        ranks = [mine] * len(group.virtual_ranks)
        return float(group.all_gather(ranks, [1] * group.num_virtual_ranks).max())


def _across(domains: Domains) -> dict[int, int]:
    """Member i of each domain sends to member i of the next one, where there is one."""
    following = [*domains.members[1:], domains.members[0]]
    return {a: b for m, n in zip(domains.members, following) for a, b in zip(m, n)}


def _splits(wire: Wire, partners: dict[int, int], size: int) -> tuple[list[int], list[int]]:
    """What this process receives and sends, by process, where every key of ``partners`` sends to its value."""
    receives, sends = [0] * wire.world_size, [0] * wire.world_size
    for a, b in partners.items():
        if a != b:
            sends[b] += size if a == wire.rank else 0
            receives[a] += size if b == wire.rank else 0
    return receives, sends


def _three_digits(value: float) -> float:
    """Rounded, but never to 0: costs divide by it."""
    return float(f"{value:.3g}")


def _small(wire: Wire, device: torch.device) -> None:
    mine = torch.zeros(64, dtype=torch.uint8, device=device)
    everyone = torch.empty(64 * wire.world_size, dtype=torch.uint8, device=device)
    wire.wait(wire.all_gather(everyone, mine), device)


def _move(wire: Wire, device: torch.device, receives: list[int], sends: list[int]) -> None:
    data = torch.zeros(sum(sends), dtype=torch.uint8, device=device)
    received = torch.empty(sum(receives), dtype=torch.uint8, device=device)
    wire.wait(wire.all_to_all(received, data, receives, sends), device)


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
