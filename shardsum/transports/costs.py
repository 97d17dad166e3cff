"""Which transport ``auto`` takes: a cost model with a few constants a device type, from values every process shares.

    time = collectives x latency + bytes on the busiest link / its bandwidth + bytes read by the sum / memory

On GPUs the sum is not all: rows are packed, and every kernel takes time (:func:`of_rows`). Times are those of the
device, as of calls in a CUDA graph; what the host takes to enqueue a call (``enqueue_us``) is no part of them.

There are two kinds of links: those inside a domain (a host) and those between domains. Of the latter a process has its
share, and all processes of a domain together may have less than the sum (one network card for all). Without constants
of links between domains those inside hold for all. Where two transports take the same time, the one that moves fewer
bytes in all wins.

The table below is the only place with such numbers. ``shardsum bench --calibrate FILE`` measures them and writes a JSON
file; pass it as ``ShardGroup(costs=...)`` or name it in ``SHARDSUM_COSTS``, on every process the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..core.layout import ExchangePlan, length
from .domains import Domains


@dataclass(frozen=True)
class Load:
    """Bytes of a call.

    Attributes:
        inside_out, inside_in, between_out, between_in: by process, sent and received inside its domain and between
            domains.
        domain_out, domain_in: by domain, sent to and received from others.
        host_out: by machine, what its processes send over any link.
    """

    inside_out: tuple[int, ...]
    inside_in: tuple[int, ...]
    between_out: tuple[int, ...]
    between_in: tuple[int, ...]
    domain_out: tuple[int, ...]
    domain_in: tuple[int, ...]
    host_out: tuple[int, ...]

    @staticmethod
    def of(transfers: Iterable[tuple[int, int, int]], domains: Domains) -> Load:
        """The sum of transfers (sender, receiver, bytes). What a process gives itself does not count."""
        of, machines = domains.of, domains.machine_of
        inside, between, domain = ([[0] * n, [0] * n] for n in (len(of), len(of), domains.count))
        host_out = [0] * (max(machines) + 1)
        for a, b, n in transfers:
            if a == b:
                continue
            host_out[machines[a]] += n
            if of[a] == of[b]:
                inside[0][a] += n
                inside[1][b] += n
            else:
                between[0][a] += n
                between[1][b] += n
                domain[0][of[a]] += n
                domain[1][of[b]] += n
        return Load(*map(tuple, (*inside, *between, *domain, host_out)))

    @property
    def egress(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.inside_out, self.between_out))

    @property
    def ingress(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.inside_in, self.between_in))

    @property
    def inside(self) -> int:
        """All bytes that travel inside domains."""
        return sum(self.inside_out)

    @property
    def between(self) -> int:
        """All bytes that travel between domains."""
        return sum(self.between_out)


@dataclass(frozen=True)
class Work:
    """By process: kernels on GPUs, and bytes that they read and write, from one collective to the next. Processes wait
    for each other in a collective, so the busiest one counts."""

    launches: tuple[int, ...]
    bytes: tuple[int, ...]

    def microseconds(self, launch_us: float, memory_gbps: float) -> float:
        """Of the busiest process."""
        return max(n * launch_us + moved / memory_gbps / 1e3 for n, moved in zip(self.launches, self.bytes))


@dataclass(frozen=True)
class Costs:
    """Latency of one collective or step in microseconds; bandwidths in GB/s (1e9 bytes), each way.

    ``between_gbps`` is what one process alone gets to other domains, ``domain_gbps`` what all of a domain get together.
    ``host_gbps`` is what all processes of a machine together send over any link, where its CPUs move the bytes. None:
    as inside, and no common limits.

    Of GPUs: ``launch_us`` is what one of several small kernels in a row takes (None: there are no kernels),
    ``gather_latency_us`` and ``gather_gbps`` are of an all_gather, ``exchange_gbps`` what a process sends and receives
    together in point-to-point transfers, ``batch_latency_us`` of a batch of them on a stream of their own,
    ``enqueue_us`` the host's time of a call where it only enqueues. None: as of other collectives, and no limit.
    """

    latency_us: float
    wire_gbps: float
    memory_gbps: float
    between_latency_us: float | None = None
    between_gbps: float | None = None
    domain_gbps: float | None = None
    host_gbps: float | None = None
    launch_us: float | None = None
    gather_latency_us: float | None = None
    gather_gbps: float | None = None
    exchange_gbps: float | None = None
    batch_latency_us: float | None = None
    enqueue_us: float | None = None

    def latency(self, load: Load) -> float:
        """Of one step of such a call."""
        return self.latency_us if self.between_latency_us is None or not load.between else self.between_latency_us

    def wire_us(self, load: Load) -> float:
        """How long the busiest link takes, or the CPUs of the busiest machine."""
        return max(
            _us(self.wire_gbps, *load.inside_out, *load.inside_in),
            _us(self.between_gbps or self.wire_gbps, *load.between_out, *load.between_in),
            _us(self.domain_gbps, *load.domain_out, *load.domain_in),
            _us(self.host_gbps, *load.host_out),
        )

    def flat_us(self, collectives: int, load: Load, memory_bytes: int) -> float:
        """The model's time for collectives that move ``load`` and a sum that reads ``memory_bytes``."""
        return self.latency(load) * collectives + self.wire_us(load) + memory_bytes / self.memory_gbps / 1e3

    def gpu_us(self, chunks: int, exchanged: Load | None, gathered: Load | None, work: Sequence[Work]) -> float:
        """The model's time on GPUs: in each chunk an all_to_all that moves a part of ``exchanged``, then an all_gather
        that moves one of ``gathered``, and what kernels do beside."""
        time = sum(each.microseconds(self.launch_us or 0.0, self.memory_gbps) for each in work)
        if exchanged is not None:
            both = _us(self.exchange_gbps, *map(sum, zip(exchanged.egress, exchanged.ingress)))
            time += chunks * self.latency(exchanged) + max(self.wire_us(exchanged), both)
        if gathered is not None:
            latency = self.latency(gathered) if self.gather_latency_us is None else self.gather_latency_us
            time += chunks * latency + max(self.wire_us(gathered), _us(self.gather_gbps, *gathered.egress))
        return time


def _us(gbps: float | None, *loads: int) -> float:
    """How long the largest load takes; None: nothing."""
    return max(loads, default=0) / gbps / 1e3 if gbps else 0.0


def of_rows(
    plan: ExchangePlan, gathered: bool, chunks: int, row_bytes: int, result_bytes: int, copies: bool, shared: bool
) -> list[Work]:
    """What kernels do on GPUs in an exchange of rows in so many chunks, beside NCCL's, from each of its collectives to
    the next (the last: that of the next call). One makes the headers, one packs what is sent, one sums the rows of each
    hosted sink, one checks what has come (after every chunk). All of a process run one behind the other.

    Args:
        gathered: by all_gather, else by all_to_all.
        row_bytes, result_bytes: of one position.
        copies: rows are copied into the result, one by one, not summed.
        shared: an all_gather of the results follows each chunk.
    """
    world, packing, summing = plan.world_size, [], []
    held = [[length(i) for i, owner in zip(plan.sources, plan.source_owners) if owner == p] for p in range(world)]
    most = max(map(sum, held))
    read, rows = _read(plan)
    for p in range(world):
        sent = sum(held[p]) if gathered else sum(n for b, n in enumerate(plan.positions[p]) if b != p)
        packs = (len(held[p]) > 1 or sent < most) if gathered else sent > 0
        sinks = plan.hosted_sinks(p)
        sums = sum(rows[q] if copies else 1 for q in sinks)
        packing.append((1 + chunks * packs + shared, 2 * packs * sent * row_bytes))
        written = sum(length(plan.sinks[q]) for q in sinks) * result_bytes
        summing.append((chunks * (sums + 1), sum(read[q] for q in sinks) * row_bytes + written))
    if shared:
        return [Work(*zip(*packing)), Work(*zip(*summing))]
    both = [(a + c, b + d) for (a, b), (c, d) in zip(packing, summing)]
    return [Work(*zip(*both))]


def _read(plan: ExchangePlan) -> tuple[Sequence[int], Sequence[int]]:
    """Positions of all sources that each sink needs, and how many sources that are."""
    begins, ends = np.array(plan.sources, dtype=np.int64).reshape(-1, 2).T
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for lo, hi in set(plan.sinks):
        common = np.maximum(np.minimum(ends, hi) - np.maximum(begins, lo), 0)
        found[lo, hi] = int(common.sum()), int(np.count_nonzero(common))
    each = [found[sink] for sink in plan.sinks]
    return [n for n, _ in each], [k for _, k in each]


#: Inside: gloo over loopback, four processes on two cores, which move 2.4 GB/s in all; NCCL 2.28, two H200 (NV18).
#: Between domains nothing was measured for these: gloo over one 10 Gbit/s card a host, and a 400 Gbit/s card a GPU, at
#: nine tenths of their rates.
DEFAULT: Mapping[str, Costs] = {
    "cpu": Costs(1200.0, 0.6, 10.0, 1200.0, 1.1, 1.1, 2.4),
    "cuda": Costs(9.0, 230.0, 4000.0, 30.0, 45.0, launch_us=1.3),
}


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
