"""The command line: ``shardsum doctor | train | compare | plan | bench | build``.

Options come from YAML files (``--config``) and from the command line, in that order of weight: what stands later wins.
Nothing is abbreviated and nothing unknown is ignored. A wrong option, file or value is one line on stderr and exit
code 2; 1 is a comparison that found a difference, a broken installation (doctor) or an error of the program; 130 an
interrupted run that saved its checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from .. import __version__
from .compare import CompareConfig
from .parsers import CONFIG_HELP, make_parser
from .plan import PlanConfig
from .train.config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv`` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:
            from .bench.run import run

            return run(arguments[1:])
        parser = build_parser()
        if not arguments:
            raise ValueError(f"name a command: {', '.join(_COMMANDS)} or bench; shardsum --help says what each does")
        parsed = parser.parse_args(arguments)
        _check_sections(parsed[parsed.subcommand])
        options = parser.instantiate(parsed)
        values = vars(options[options.subcommand])
        values.pop("config", None)
        return _COMMANDS[options.subcommand](values)
    except (ArgumentError, ValueError, OSError) as error:
        rank = os.environ.get("RANK")
        where = f"process {rank}: " if rank is not None else ""
        print(f"shardsum: {where}{' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> ArgumentParser:
    """The parser of all commands; ``bench`` parses its own arguments."""
    parser = make_parser(
        "Ragged sums over sequence-parallel ranks: the same bits on any number of processes.",
        "shardsum doctor\nshardsum train --config configs/emulation.yaml --train.steps 50\n"
        "torchrun --nproc-per-node=4 -m shardsum train --train.steps 50",
        prog="shardsum",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, metavar="command")

    doctor = make_parser(
        "Says what this machine has, which path sums run on, and tries every transport that can run here. Under "
        "torchrun it tries the transports between the processes, and names the pairs of processes that fail. The exit "
        "code is 0 if sums can run as asked and every transport that ran gave the right bits, else 1.",
        "shardsum doctor\nshardsum doctor --json\ntorchrun --nproc-per-node=2 -m shardsum doctor --device cuda",
    )
    doctor.add_argument("--json", action="store_true", help="Print one JSON object, for programs and for bug reports.")
    doctor.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="Where the transports are tried.")
    doctor.add_argument(
        "--timeout", type=float, default=60.0, help="The number of seconds after which a silent process is an error."
    )
    commands.add_subcommand("doctor", doctor, help="Say what this machine has, and try what can run here.")

    train = make_parser(
        "Trains a byte-level transformer on R virtual ranks, hosted by the processes that were launched, and prints a "
        "hash over its parameters and losses: the same for any number of processes. Options of --config and of the "
        "command line are the same; what stands later wins.",
        "shardsum train --train.steps 50\n"
        "shardsum train --config configs/emulation.yaml --train.parallel documents\n"
        "torchrun --nproc-per-node=4 --max-restarts=3 -m shardsum train --folder runs/a\n"
        "shardsum train --folder runs/a --train.steps 400 --resume",
    )
    train.add_argument("--config", action="config", help=CONFIG_HELP)
    train.add_class_arguments(RunConfig, skip={"resume", "trace"})
    train.add_argument(
        "--resume",
        nargs="?",
        const="required",
        metavar="{never,required,auto}",
        type=Literal["never", "required", "auto"] | None,
        help="Go on from the checkpoint in the run folder. With never a folder that holds one is refused. With "
        "required (which --resume alone means) a folder that holds none is refused. With auto the run goes on if there "
        "is one. The default is auto under a launcher, whose restarts therefore go on, and else never.",
    )
    train.add_argument(
        "--trace",
        action="store_true",
        help="Write hashes of every step's loss, gradients and parameters, for shardsum compare --runs.",
    )
    commands.add_subcommand("train", train, help="Train a byte-level transformer on R virtual ranks.")

    compare = make_parser(
        "Computes one ragged sum and its mean, in several dtypes, by every path that runs here, and compares the bits. "
        "With --runs it compares two runs of shardsum train instead: their losses and checkpoints and, if both were "
        "made with --trace, the first step, tensor and element in which they differ.",
        "shardsum compare\ntorchrun --nproc-per-node=4 -m shardsum compare --placement zigzag\n"
        "shardsum compare --runs runs/a runs/b",
    )
    compare.add_argument("--config", action="config", help=CONFIG_HELP)
    compare.add_class_arguments(CompareConfig)
    compare.add_argument("--runs", nargs=2, metavar=("A", "B"), help="Compare the bits of two run folders instead.")
    commands.add_subcommand("compare", compare, help="Compare the bits of every transport and backend, or of two runs.")

    plan = make_parser(
        "Predicts, without running anything, which transport collectives would take on a cluster, the bytes on each "
        "kind of link and the times.",
        "shardsum plan --hosts 4 --lengths causal\nshardsum plan --hosts 64 --grow --plot hosts.png",
    )
    plan.add_argument("--config", action="config", help=CONFIG_HELP)
    plan.add_class_arguments(PlanConfig, skip={"grow"})
    growing = "Show 1, 2, 4, ... hosts up to --hosts, with as many virtual ranks on each process."
    plan.add_argument("--grow", action="store_true", help=growing)
    commands.add_subcommand("plan", plan, help="Predict what collectives would cost on a larger cluster.")

    commands.add_subcommand("bench", make_parser(), help="Measure sums and collectives against named baselines.")
    build = make_parser(
        "Builds the native library now instead of at its first use, and prints where it is. Where torch has CUDA and "
        "nvcc is found, it builds CUDA kernels for the GPUs of this machine, too, which takes minutes. "
        "SHARDSUM_CUDA_ARCHS names others.",
        "shardsum build",
    )
    commands.add_subcommand("build", build, help="Build the native library ahead of its first use.")
    return parser


def _check_sections(options: Namespace) -> None:
    """A section of a file that holds no settings (``train: null``) is refused; the parser takes it as it is."""
    for name in ("group", "model", "train"):
        if name in options and not isinstance(options[name], Namespace):
            raise ValueError(f"{name}: expected settings or nothing at all, got {options[name]!r}")


# Each command imports what it needs when it runs: --help and a wrong option should not wait for the rest.


def _doctor(values: dict[str, Any]) -> int:
    from .doctor import run

    return run(values["device"], values["json"], values["timeout"])


def _train(values: dict[str, Any]) -> int:
    from .train import run

    return 130 if run(RunConfig(**values)).interrupted else 0


def _plan(values: dict[str, Any]) -> int:
    from .plan import run

    return run(PlanConfig(**values))


def _compare(values: dict[str, Any]) -> int:
    from .compare import compare_paths
    from .compare_runs import compare_runs

    runs = values.pop("runs")
    return compare_runs(*runs) if runs else compare_paths(CompareConfig(**values))


def _build(values: dict[str, Any]) -> int:
    from ..native import builder

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that compilers and their folder go, too
    try:
        print(builder.build())
    except RuntimeError as error:  # no compiler, or what it says
        print(f"shardsum: {error}", file=sys.stderr)
        return 1
    return 0


_COMMANDS = {"doctor": _doctor, "train": _train, "compare": _compare, "plan": _plan, "build": _build}
