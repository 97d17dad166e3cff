"""From the command line to rows: parse, join the launched processes, run the cases within the time, keep them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser

from ...training.shard_group import ShardGroup
from ...transports import costs
from .. import parsers
from ..launcher import launched
from . import cases, collective_cases, collectives, local, plots, rows
from .baselines import Baselines
from .calibrate import calibrate
from .config import BenchConfig
from .jobs import Bench
from .timing import Processes

_TIMEOUT = 120.0
C = TypeVar("C")


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
    for name in ("json", "plot", "calibrate"):
        values[name] = Path(values[name]) if values[name] is not None else None
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
        self.several = dist.is_initialized() and dist.get_world_size() > 1
        side = dist.new_group(backend="gloo") if self.several else None
        processes = Processes(side)
        facts = rows.environment(_command(argv)) | {"device": config.device}
        speaks = not self.several or dist.get_rank() == 0
        report = rows.Report(config.json, facts, speaks)
        self.bench = Bench(report, config.device, config.samples, processes)

    def all(self) -> int:
        report = self.bench.report
        for name in ("gpu", "cpu", "torch", "nccl", "date", "command"):
            if name in report.facts:
                report.say(f"{name:8} {report.facts[name]}")
        if self.several:
            self._collectives()
        else:
            self._local()
        if self.config.json is not None and report.speaks:
            report.save()
            for path in plots.save(self.config.json, report.facts, report.rows):
                report.say(f"{path}")
        for name in self.bench.failed:
            report.say(f"WRONG: {name}")
        report.say(f"\n{len(report.rows)} rows in {time.monotonic() - self.begin:.0f} s")
        return 1 if self.bench.failed else 0

    def _local(self) -> None:
        baselines = Baselines(self.config.baselines)
        for case in self._chosen(cases.quick() if self.quick else cases.full(self.config.device)):
            if self._late(str(case)):
                break
            self.bench.measure(local.prepare(case, self.config.device, baselines))

    def _collectives(self) -> None:
        chosen = self._chosen(collective_cases.quick() if self.quick else collective_cases.full(self.config.device))
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
            self.bench.report.say(f"\n{self.config.limit:g} s are over: stopped before {case}")
        return late


def _command(argv: Sequence[str]) -> list[str]:
    count = int(os.environ.get("WORLD_SIZE", 1))
    launcher = ["python", "-m"] if count == 1 else ["torchrun", f"--nproc-per-node={count}", "-m"]
    return [*launcher, "shardsum", "bench", *argv]
