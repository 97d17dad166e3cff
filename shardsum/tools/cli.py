"""The command line: ``shardsum doctor | train | compare | bench | build``.

Options come from YAML files (``--config``) and from the command line, in that order of weight: what stands later wins.
Nothing is abbreviated and nothing unknown is ignored. A wrong option, file or value is one line on stderr and exit
code 2; 1 is a comparison that found a difference, a broken installation (doctor) or an error of the program; 130 an
interrupted run that saved its checkpoint.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from .compare import CompareConfig
from .train.config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv`` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:
            return _bench(arguments[1:])
        parser = build_parser()
        options = parser.instantiate(parser.parse_args(arguments))
        return _COMMANDS[options.subcommand](options[options.subcommand])
    except (ArgumentError, ValueError, OSError) as error:
        rank = os.environ.get("RANK")
        where = f"process {rank}: " if rank is not None else ""
        print(f"shardsum: {where}{' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> ArgumentParser:
    """The parser of all commands; ``bench`` parses its own arguments."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="shardsum",
        description="Ragged sums over sequence-parallel ranks: the same bits on any number of processes.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(required=True, metavar="command")
    commands.add_subcommand("doctor", _parser(), help="say what this machine has and which path sums run on")

    train = _parser()
    train.add_argument("--config", action="config", help="YAML file; options after it win")
    train.add_class_arguments(RunConfig, skip={"resume"})
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in the run folder")
    commands.add_subcommand("train", train, help="train a byte-level transformer on R virtual ranks")

    compare = _parser()
    compare.add_argument("--config", action="config", help="YAML file; options after it win")
    compare.add_class_arguments(CompareConfig, skip={"runs"})
    compare.add_argument("--runs", nargs=2, metavar=("A", "B"), help="compare the bits of two run folders instead")
    commands.add_subcommand("compare", compare, help="the same bits on every transport and backend, or of two runs")

    commands.add_subcommand("bench", _parser(), help="measure against named baselines (see: shardsum bench --help)")
    commands.add_subcommand("build", _parser(), help="build the native library ahead of its first use")
    return parser


def _parser() -> ArgumentParser:
    return ArgumentParser(exit_on_error=False, allow_abbrev=False)


# Each command imports what it needs when it runs: --help and a wrong option should not wait for the rest.


def _doctor(options: Namespace) -> int:
    from .doctor import report

    return report()


def _train(options: Namespace) -> int:
    from .train import run

    values = {name: value for name, value in options.items() if name != "config"}
    return 130 if run(RunConfig(**values)).interrupted else 0


def _compare(options: Namespace) -> int:
    from .compare import compare_paths, compare_runs

    if options.runs:
        return compare_runs(*options.runs)
    return compare_paths(CompareConfig(**{k: v for k, v in options.items() if k not in ("config", "runs")}))


def _build(options: Namespace) -> int:
    from ..native import loader as native

    try:
        print(native.build())
    except RuntimeError as error:  # no compiler, or what it says
        print(f"shardsum: {error}", file=sys.stderr)
        return 1
    return 0


def _bench(arguments: list[str]) -> int:
    from . import bench

    return bench.main(arguments)


_COMMANDS = {"doctor": _doctor, "train": _train, "compare": _compare, "build": _build}
