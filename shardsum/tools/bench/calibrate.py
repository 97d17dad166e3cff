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

_WIRE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of one process
_ROW_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}  # of each of four rows


def calibrate(group: ShardGroup, repeat: int = 20) -> Costs:
    """Latency of a small all_gather, bandwidth of a large all_to_all, rate of a local sum. Collective.

    Returns:
        The same constants on every process: those of the slowest. With one process the wire's are 0 and 1e9.
    """
    device = group.device
    rows = torch.ones((4, _ROW_BYTES[device.type] // 4), device=device)
    out = torch.empty_like(rows[0])
    seconds = _slowest(group, lambda: ragged_sum(rows, out=out), repeat)
    memory = rows.numel() * 4 / seconds / 1e9
    wire = group.wire
    if wire is None:
        return Costs(0.0, 1e9, _three_digits(memory))
    latency = _slowest(group, lambda: _small(wire, device), repeat)
    each = _WIRE_BYTES[device.type] // wire.world_size
    data = torch.zeros(each * wire.world_size, dtype=torch.uint8, device=device)
    seconds = _slowest(group, lambda: _large(wire, data, each), repeat)
    bandwidth = each * (wire.world_size - 1) / max(seconds - latency, 1e-9) / 1e9
    return Costs(*map(_three_digits, (latency * 1e6, bandwidth, memory)))


def _three_digits(value: float) -> float:
    """Rounded, but never to 0: costs divide by it."""
    return float(f"{value:.3g}")


def _small(wire: Wire, device: torch.device) -> None:
    mine = torch.zeros(64, dtype=torch.uint8, device=device)
    everyone = torch.empty(64 * wire.world_size, dtype=torch.uint8, device=device)
    wire.wait(wire.all_gather(everyone, mine), device)


def _large(wire: Wire, data: torch.Tensor, each: int) -> None:
    splits = [each] * wire.world_size
    wire.wait(wire.all_to_all(torch.empty_like(data), data, splits, splits), data.device)


def _slowest(group: ShardGroup, fn: Callable[[], object], repeat: int) -> float:
    """Median seconds of the slowest process."""
    times = []
    for _ in range(repeat + 3):
        if group.group is not None:
            dist.barrier(group.group)
        _finish(group.device)
        begin = time.perf_counter()
        fn()
        _finish(group.device)
        times.append(time.perf_counter() - begin)
    mine = torch.tensor([statistics.median(times[3:])], dtype=torch.float64, device=group.device)
    ranks = [mine] * len(group.virtual_ranks)
    return float(group.all_gather(ranks, [1] * group.num_virtual_ranks).max())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
