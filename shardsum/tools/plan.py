"""``shardsum plan``: what collectives would cost on a cluster larger than the one at hand. Nothing runs.

The router that chooses transports in a :class:`shardsum.ShardGroup` predicts bytes by link and times from a cost file
(``shardsum bench --calibrate FILE`` on two hosts writes one). A position is a row of ``row`` elements of ``dtype``.

lengths           what virtual rank r holds
full              all positions
causal            the first (r + 1) / R of them
documents:MEAN    packed documents of that mean length: from the start of the oldest one in its even chunk to its end,
                  as keys and values in context parallelism
FILE              R numbers of positions, from the first on: a JSON list, or one a line

collectives
all_reduce        their sum on every process
reduce_scatter    their sum, each virtual rank receiving an even part
gather            what each needs of the parts: the gradient of reduce_scatter, or keys and values

Times are those of the device: a training step enqueues its calls ahead. What the host takes to enqueue a call is
printed where the cost file has it. Peer memory inside a host is not modelled: there, NCCL's constants hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from ..core.layout import ExchangePlan, Interval, intervals_of, owners_of, split_evenly
from ..group.routes import Route, Router, best_of
from ..group.terms import Reduce
from ..transports import costs as cost_tables
from ..transports.domains import Domains
from .bench.cases import held_by, packed_documents
from .pictures import new_figure

TRANSPORTS = ("gather", "all_to_all", "carry")
COLLECTIVES = ("all_reduce", "reduce_scatter", "gather")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A cluster, the virtual ranks on it, and what a step calls."""

    hosts: int = 2
    """How many hosts the cluster has."""
    gpus: int = 8
    """How many processes run on a host, one for each GPU."""
    ranks: int | None = None
    """How many virtual ranks there are. By default each process has one."""
    size: int = 131072
    """How many positions the whole sequence has."""
    row: int = 4096
    """How many elements a position has."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """The dtype of the elements."""
    lengths: str = "full"
    """How many positions each virtual rank holds: full, causal, documents:MEAN (packed documents of this mean
    length), or a file of R lengths."""
    placement: Literal["contiguous", "zigzag"] = "contiguous"
    """Which process hosts which virtual ranks."""
    step: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLLECTIVES, 1))
    """How often a step calls each collective."""
    costs: str | None = None
    """The file of shardsum bench --calibrate with the costs of links. By default SHARDSUM_COSTS names it, else the
    built-in table is used."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose constants of the cost file are used."""
    grow: bool = False
    """Show 1, 2, 4, ... hosts up to this number, with as many virtual ranks a process."""
    plot: str | None = None
    """Draw the predicted times of --grow into this file (PNG or SVG)."""
    json: str | None = None
    """Write the predictions into this file."""

    def __post_init__(self) -> None:
        for name in ("hosts", "gpus", "size", "row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.ranks is not None and self.ranks < self.processes:
            raise ValueError(
                f"ranks: {self.ranks} is less than the {self.processes} processes; each hosts at least one"
            )
        for name, calls in self.step.items():
            if name not in COLLECTIVES or calls < 0:
                raise ValueError(f"step: {name!r}: {calls} calls; expected any of {list(COLLECTIVES)}")
        if self.plot is not None and not self.grow:
            raise ValueError("plot: draws the growth with the hosts; add --grow")

    @property
    def processes(self) -> int:
        return self.hosts * self.gpus

    @property
    def num_virtual_ranks(self) -> int:
        return self.ranks if self.ranks is not None else self.processes


@dataclass(frozen=True)
class Prediction:
    """One collective on a cluster: the route that "auto" would take, and the times of all."""

    hosts: int
    collective: str
    route: Route
    microseconds: Mapping[str, float]
    calls: int

    def as_json(self) -> dict:
        load = self.route.load
        assert load is not None
        return {
            "hosts": self.hosts, "collective": self.collective, "transport": self.route.transport,
            "us": self.microseconds[self.route.transport], "us_by_transport": dict(self.microseconds),
            "bytes_inside": load.inside, "bytes_between": load.between, "busiest_host_out": max(load.domain_out),
            "busiest_host_in": max(load.domain_in), "busiest_process": self.route.busiest,
            "chunks": self.route.chunks, "calls": self.calls,
        }  # fmt: skip


def held(lengths: str, ranks: int, size: int) -> list[Interval]:
    """What every virtual rank holds. ValueError for an unknown form, or a file of other numbers."""
    if lengths in ("full", "causal"):
        return held_by(lengths, ranks, size)
    if lengths.startswith("documents:"):
        mean = lengths.removeprefix("documents:")
        if not mean.isdecimal() or int(mean) < 1:
            raise ValueError(f"lengths: documents:{mean}: expected a mean length of at least 1")
        return packed_documents(ranks, size, int(mean))
    try:
        text = Path(lengths).read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (OSError, ValueError) as error:
        raise ValueError(f"lengths: {lengths!r} is no form of lengths and no file of them: {error}") from None
    if len(values) != ranks:
        raise ValueError(f"lengths: {lengths} has {len(values)} values for {ranks} virtual ranks")
    for r, n in enumerate(values):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= size:
            raise ValueError(f"lengths: virtual rank {r} has {n!r}, expected an int between 0 and size {size}")
    return [(0, n) for n in values]


def predict(config: PlanConfig, hosts: int | None = None) -> list[Prediction]:
    """What the collectives of a step cost on so many hosts (default: all)."""
    hosts = config.hosts if hosts is None else hosts
    world = hosts * config.gpus
    ranks = config.num_virtual_ranks * hosts // config.hosts
    domains = Domains(tuple(p // config.gpus for p in range(world)), tuple(f"host {h}" for h in range(hosts)))
    router = Router(domains, "auto", cost_tables.load(config.costs))
    dtype = getattr(torch, config.dtype)
    owners = owners_of(ranks, world, config.placement)
    sources = tuple(held(config.lengths, ranks, config.size))
    parts = tuple(intervals_of(split_evenly(config.size, ranks)))
    processes = tuple(range(world))
    layouts = {
        "all_reduce": (ExchangePlan(sources, owners, ((0, config.size),) * world, processes, world), "sum"),
        "reduce_scatter": (ExchangePlan(sources, owners, parts, owners, world), "sum"),
        "gather": (ExchangePlan(parts, owners, sources, owners, world), "copy"),
    }
    found = []
    for name, calls in config.step.items():
        layout, op = layouts[name]
        reduce = Reduce(op, None, dtype)
        routes = router.candidates(layout, config.row, dtype, reduce, config.device, TRANSPORTS)
        times = {transport: route.microseconds or 0.0 for transport, route in routes.items()}
        found.append(Prediction(hosts, name, best_of(routes), times, calls))
    return found


def run(config: PlanConfig, console: Console | None = None) -> int:
    """Print the table of ``shardsum plan``, and write what was asked for. Returns the exit code."""
    counts = [1 << i for i in range(config.hosts.bit_length()) if 1 << i < config.hosts] if config.grow else []
    predictions = [p for hosts in (*counts, config.hosts) for p in predict(config, hosts)]
    table = Table(
        title=f"{config.num_virtual_ranks} virtual ranks on {config.hosts} hosts of {config.gpus} processes, "
        f"{config.size} positions of {config.row} {config.dtype}, {config.lengths}"
    )
    for heading in ("hosts", "collective", "transport"):
        table.add_column(heading)
    for heading in ("inside, GB", "between, GB", "busiest host, GB", "ms", "ms of others"):
        table.add_column(heading, justify="right")
    for p in predictions:
        row = p.as_json()
        others = ", ".join(f"{name} {us / 1e3:.4g}" for name, us in p.microseconds.items() if name != p.route.transport)
        busiest = max(row["busiest_host_out"], row["busiest_host_in"])
        amounts = [f"{n / 1e9:.4g}" for n in (row["bytes_inside"], row["bytes_between"], busiest)]
        table.add_row(
            str(p.hosts), p.collective, p.route.transport, *amounts, f"{row['us'] / 1e3:.4g}", others,
        )  # fmt: skip
    console = console or Console(width=140)
    console.print(table)
    steps = {h: sum(p.calls * p.as_json()["us"] for p in predictions if p.hosts == h) for h in (*counts, config.hosts)}
    calls = ", ".join(f"{n} x {name}" for name, n in config.step.items())
    for hosts, us in steps.items():
        console.print(f"a step on {hosts} host{'s' * (hosts > 1)} ({calls}): {us / 1e3:.4g} ms")
    enqueue = cost_tables.load(config.costs)[config.device].enqueue_us
    if enqueue is not None:
        calls_us = enqueue * sum(config.step.values())
        console.print(f"the host enqueues a call in about {enqueue:.3g} us, those of a step in {calls_us / 1e3:.4g} ms")
    if config.json is not None:
        setup = {
            name: getattr(config, name) for name in PlanConfig.__dataclass_fields__ if name not in ("json", "plot")
        }
        rows = [p.as_json() for p in predictions]
        Path(config.json).write_text(json.dumps({"setup": setup, "rows": rows, "step_us": steps}, indent=1) + "\n")
    if config.plot is not None:
        draw(predictions, Path(config.plot))
    return 0


def draw(predictions: list[Prediction], path: Path) -> None:
    """Predicted time over hosts, one panel a collective, one line a transport."""
    names = list(dict.fromkeys(p.collective for p in predictions))
    hosts = sorted({p.hosts for p in predictions})
    figure = new_figure(4.5 * len(names), 3.6)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        for transport in TRANSPORTS:
            points = [
                (p.hosts, p.microseconds[transport] / 1e3)
                for p in predictions
                if p.collective == name and transport in p.microseconds
            ]
            if points:
                axis.plot(*zip(*points), marker="o", label=transport)
        axis.set(xscale="log", yscale="log", xlabel="hosts", ylabel="predicted ms", title=name)
        axis.set_xticks(hosts, list(map(str, hosts)))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
