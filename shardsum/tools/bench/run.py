"""From the command line to rows: parse, join the launched processes, run the cases within the time, keep them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser

from ...native import loader as native
from ...training.shard_group import ShardGroup
from ...transports import TRANSPORTS, costs
from .. import parsers
from ..launcher import launched
from . import cases, collectives, local, plots, rows
from .calibrate import calibrate
from .jobs import Bench
from .local import BASELINES, Baselines
from .timing import Processes

_TIMEOUT = 120.0
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure, and where to keep it."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute. Under torchrun "cuda" takes one GPU for each process."""
    only: str = ""
    """Measure only the cases whose line contains this text. The empty text measures all."""
    baselines: list[str] = field(default_factory=lambda: list(BASELINES))
    """What a local sum is compared with: compile, eager, loop, sum fp32. --quick leaves out compile unless it is named
    here."""
    transports: list[str] = field(default_factory=lambda: ["auto", "gather", "all_to_all", "peer"])
    """The transports by which collectives are measured. Those that do not run here are left out."""
    samples: int = 15
    """How often each variant is measured."""
    limit: float = 600.0
    """The number of seconds after which no further case starts."""
    threads: int = 0
    """Compute threads of a process on the CPU. 0 is torch's default, and 1 under torchrun."""
    isa: Literal["baseline", "avx2", "avx512"] | None = None
    """Use at most this instruction set on the CPU. By default the best that it has."""
    json: Path | None = None
    """Write all rows into this file, and pictures beside it."""
    plot: Path | None = None
    """Draw the pictures of a file that --json wrote, and measure nothing."""
    calibrate: Path | None = None
    """Measure only the constants of transport="auto", and write them into this file. SHARDSUM_COSTS names the file to
    use."""

    def __post_init__(self) -> None:
        known = {"baselines": BASELINES, "transports": ("auto", *TRANSPORTS, "peer")}
        for name, names in known.items():
            for value in getattr(self, name):
                if value not in names:
                    raise ValueError(f"{name}: expected some of {', '.join(names)}, got {value!r}")
        for name, least in (("samples", 1), ("limit", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


def run(argv: Sequence[str]) -> int:
    config, quick = parse(argv)
    if config.plot is not None:
        facts, measured = rows.load(config.plot)
        for path in plots.save(config.plot, facts, measured):
            print(path)
        return 0
    with launched(config.device, _TIMEOUT) as device:
        if device.type == "cpu" and (config.threads or dist.is_initialized()):
            torch.set_num_threads(config.threads or 1)
        if config.isa is not None:
            native.limit_cpu_isa(config.isa)
        if config.calibrate is not None:
            return _calibrate(config.calibrate)
        return _Run(config, quick, argv).all()


def make_parser() -> ArgumentParser:
    """The parser of the arguments after ``bench``."""
    parser = parsers.make_parser(
        "Measures local sums on this machine or, under torchrun, collectives between the processes, against named "
        "baselines. Every result is verified before it is timed. The exit code is 1 if a result is wrong.",
        "shardsum bench --quick\n"
        "shardsum bench --device cuda --json gpu.json\n"
        "torchrun --nproc-per-node=4 -m shardsum bench --json gloo.json\n"
        "torchrun --nproc-per-node=4 -m shardsum bench --calibrate costs.json\n"
        "shardsum bench --plot gpu.json",
        prog="shardsum bench",
    )
    parser.add_argument("--config", action="config", help=parsers.CONFIG_HELP)
    parser.add_class_arguments(BenchConfig)
    parser.add_argument("--quick", action="store_true", help="Measure small sizes, few samples, no torch.compile.")
    return parser


def parse(argv: Sequence[str]) -> tuple[BenchConfig, bool]:
    """The options, and whether ``--quick`` is among them."""
    options = make_parser().parse_args(list(argv))
    values = {f.name: options[f.name] for f in fields(BenchConfig)}
    if options.quick:
        defaults = BenchConfig()
        if values["baselines"] == defaults.baselines:
            values["baselines"] = [name for name in defaults.baselines if name != "compile"]
        if values["samples"] == defaults.samples:
            values["samples"] = 5
    return BenchConfig(**values), options.quick


def _calibrate(path: Path) -> int:
    group = ShardGroup(dist.get_world_size() if dist.is_initialized() else 1)
    found = calibrate(group)
    if group.rank == 0:
        costs.save({group.device.type: found}, path)
        print(f"{group.device.type}: {found}")
    return 0


class _Run:
    """One run of all processes; the first of them speaks."""

    def __init__(self, config: BenchConfig, quick: bool, argv: Sequence[str]) -> None:
        self.config, self.quick, self.begin = config, quick, time.monotonic()
        self.several, processes = dist.is_initialized() and dist.get_world_size() > 1, Processes.launched()
        facts = rows.environment("-m", "shardsum", "bench", *argv) | {"device": config.device}
        self.report = rows.Report(config.json, facts, processes.first)
        self.bench = Bench(self.report, config.device, config.samples, processes)

    def all(self) -> int:
        report = self.report
        report.introduce()
        if self.several:
            self._collectives()
        else:
            self._local()
        if self.config.json is not None and report.speaks:
            report.save()
            report.say(*map(str, plots.save(self.config.json, report.facts, report.rows)))
        report.say(*(f"WRONG: {name}" for name in self.bench.failed))
        report.say(f"\n{len(report.rows)} rows in {time.monotonic() - self.begin:.0f} s")
        return 1 if self.bench.failed else 0

    def _local(self) -> None:
        baselines = Baselines(self.config.baselines)
        for case in self._chosen(cases.quick() if self.quick else cases.full(self.config.device)):
            if self._late(str(case)):
                break
            self.bench.measure(local.Sums(case, self.config.device, baselines).job())

    def _collectives(self) -> None:
        chosen = self._chosen(collectives.quick() if self.quick else collectives.full(self.config.device))
        suite = collectives.Suite(self.bench, self.config.transports, max(case.bytes for case in chosen))
        for case in chosen:
            if self._late(str(case)):
                break
            self.bench.measure(suite.prepare(case))
        suite.close()

    def _chosen(self, all_cases: list[C]) -> list[C]:
        found = [case for case in all_cases if self.config.only in str(case)]
        if not found:
            raise ValueError(f"only: no case contains {self.config.only!r}; there are {', '.join(map(str, all_cases))}")
        return found

    def _late(self, case: str) -> bool:
        late = self.bench.processes.slowest(time.monotonic() - self.begin) > self.config.limit
        if late:
            self.report.say(f"\n{self.config.limit:g} s are over: stopped before {case}")
        return late
