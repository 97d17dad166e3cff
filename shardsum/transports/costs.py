"""Which transport ``auto`` takes: a cost model with four constants a device type, from values every process shares.

    time = collectives x latency + bytes on the busiest process's wire / bandwidth + bytes read by the sum / memory

Where two transports take the same time, the one that moves fewer bytes in all wins.

The table below is the only place with such numbers. ``shardsum bench --calibrate FILE`` measures them and writes a JSON
file; pass it as ``ShardGroup(costs=...)`` or name it in ``SHARDSUM_COSTS``, on every process the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """Latency of one collective in microseconds; bandwidths in GB/s (1e9 bytes)."""

    latency_us: float
    wire_gbps: float
    memory_gbps: float

    def microseconds(self, collectives: int, wire_bytes: int, memory_bytes: int) -> float:
        """The model's time for so many collectives and so many bytes on the busiest process."""
        return self.latency_us * collectives + wire_bytes / self.wire_gbps / 1e3 + memory_bytes / self.memory_gbps / 1e3


#: cpu: gloo over loopback, four processes on two cores. cuda: NCCL 2.28, two H200 (NV18).
DEFAULT: Mapping[str, Costs] = {"cpu": Costs(1200.0, 0.6, 10.0), "cuda": Costs(9.0, 230.0, 4000.0)}


def load(source: str | os.PathLike[str] | Mapping[str, Costs] | None) -> Mapping[str, Costs]:
    """The table from an argument, from the file that ``SHARDSUM_COSTS`` names, or the default.

    Raises:
        ValueError: the file is not a JSON object of such constants by device type.
    """
    source = source if source is not None else os.environ.get("SHARDSUM_COSTS")
    if source is None:
        return DEFAULT
    if isinstance(source, Mapping):
        for device, constants in source.items():
            if not isinstance(constants, Costs):
                raise ValueError(f"costs: {device!r} has {constants!r}, expected Costs")
        return {**DEFAULT, **source}
    try:
        table = {device: Costs(**constants) for device, constants in json.loads(Path(source).read_text()).items()}
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"costs: {source} is not a table of {list(Costs.__annotations__)}: {error}") from error
    return {**DEFAULT, **table}


def save(table: Mapping[str, Costs], path: str | os.PathLike[str]) -> None:
    """Write a table that :func:`load` reads."""
    Path(path).write_text(json.dumps({device: asdict(c) for device, c in table.items()}, indent=2) + "\n")
