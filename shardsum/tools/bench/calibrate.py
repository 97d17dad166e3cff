"""Measure the constants of the ``auto`` choice (:mod:`shardsum.transports.costs`) between the processes of a group.

torchrun --nproc-per-node=4 -m shardsum bench --calibrate costs.json
SHARDSUM_COSTS=costs.json torchrun ...
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...local.functional import ragged_sum
from ...training.shard_group import ShardGroup
from ...transports import Wire
from ...transports.costs import Costs
from ...transports.domains import Domains

_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of one process
_ROW_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}  # of each of four rows


def calibrate(group: ShardGroup, repeat: int = 20) -> Costs:
    """Latency of a small transfer, bandwidth of large ones, rate of a local sum. Collective.

    Where there are several domains: inside them every process sends to the next one; between them member i of each
    sends to member i of the next domain, first all at once, then the first ones alone.

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
    if device.type == "cpu":
        # What a machine's processes get when all send at once, over whatever link lets more through.
        constants.append(max(inside, shared) * max(map(domains.machine_of.count, domains.machine_of)))
    return Costs(*map(_three_digits, constants))


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
    """Seconds of the slowest process: of each the lower quartile, for other work on a machine only adds."""
    times = []
    for _ in range(repeat + 3):
        if group.group is not None:
            dist.barrier(group.group)
        _finish(group.device)
        begin = time.perf_counter()
        fn()
        _finish(group.device)
        times.append(time.perf_counter() - begin)
    mine = torch.tensor([statistics.quantiles(times[3:], n=4)[0]], dtype=torch.float64, device=group.device)
    ranks = [mine] * len(group.virtual_ranks)
    return float(group.all_gather(ranks, [1] * group.num_virtual_ranks).max())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
