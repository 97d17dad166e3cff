"""What a measurement is written down as: a row, and the facts without which its figures mean nothing."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...native import loader as native


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case.

    Attributes:
        case, operation, profile, dtype: what was computed; ``fill`` is the valid share of the padded shards.
        num_virtual_ranks, size, width, processes: R, positions, elements a position, G.
        variant: how it was computed.
        bytes: useful ones. Local sums: valid elements read once and the output written once. Collectives: the result
            on one process, as nccl-tests count.
        us, us_20, us_80, us_least: microseconds a call, median, spread and least; on a GPU inside a CUDA graph.
        gbps: ``bytes`` over ``us``, in 1e9 bytes a second.
        percent: of this run's ceiling. Local sums: of a copy that reads half of ``bytes`` and writes half. Collectives:
            ``wire_bytes`` over ``us``, of the rate of the wire.
        wire_bytes, total_bytes: that the busiest process sends or receives, and all of them send; None for local sums.
        baseline, speedup: the named baseline's time over this one's; in a local sum it is the fastest one.
        host_us: microseconds the host is busy with an eager call (GPU only).
        wrong: elements with other bits than the reference. The baselines round elsewhere: theirs may differ within
            rounding, ours may not.
        cold: whether the buffers in turn are too large for the last cache.
    """

    case: str
    operation: str
    profile: str
    dtype: str
    fill: float
    num_virtual_ranks: int
    size: int
    width: int
    processes: int
    variant: str
    bytes: int
    us: float
    us_20: float
    us_80: float
    us_least: float
    gbps: float
    percent: float | None
    wire_bytes: int | None
    baseline: str | None
    speedup: float | None
    host_us: float | None
    wrong: int
    cold: bool
    total_bytes: int | None = None

    @property
    def wire_gbps(self) -> float | None:
        """The rate of the busiest process's wire, in 1e9 bytes a second."""
        return None if self.wire_bytes is None else self.wire_bytes / self.us / 1e3


class Report:
    """Rows as they come: printed, and kept in a file that is whole after every case.

    Args:
        path: JSON file; None keeps none.
        facts: :func:`environment` and what else holds for all rows.
        speaks: False on the processes that neither print nor write.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], speaks: bool = True) -> None:
        self.path, self.facts, self.speaks = path, facts, speaks
        #: Of one dataclass, or dicts.
        self.rows: list[Any] = []

    def introduce(self) -> None:
        """Print the facts without which figures mean nothing."""
        for name in ("gpu", "cpu", "cores", "torch", "nccl", "date", "command"):
            if name in self.facts:
                self.say(f"{name:8} {self.facts[name]}")

    def say(self, *lines: str) -> None:
        if self.speaks:
            print(*lines, sep="\n", flush=True)

    def add(self, rows: Sequence[Any], *lines: str) -> None:
        """The rows of one case, and how they are printed."""
        self.rows += rows
        self.say(*lines)
        self.save()

    def save(self) -> None:
        if self.path is None or not self.speaks:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".part")
        rows = [row if isinstance(row, dict) else asdict(row) for row in self.rows]
        new.write_text(json.dumps({**self.facts, "rows": rows}, indent=1) + "\n")
        os.replace(new, self.path)


def markdown(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_header(*names: str) -> str:
    return f"\n{markdown(*names)}\n{'|---' * len(names)}|"


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Facts and rows of a file.

    Raises:
        ValueError: it is not one that :class:`Report` wrote.
    """
    try:
        facts = json.loads(path.read_text())
        rows = [Row(**row) for row in facts.pop("rows")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of measurements: {error}") from error
    return facts, rows


def table(rows: Sequence[Row]) -> list[str]:
    """The rows of one case, for people."""
    first = rows[0]
    warm = "" if first.cold else ", in cache"
    over = f"; x: over {first.baseline}" if first.baseline else ""
    ceiling = f"{'% copy':>7}" if first.wire_bytes is None else f"{'all MB':>8} {'wire':>8} {'% wire':>7}"
    return [
        f"\n{first.case}, fill {first.fill:.2f}, {first.bytes} bytes{warm}{over}",
        f"  {'':30} {'us':>10} {'20 %':>10} {'80 %':>10} {'GB/s':>8} {ceiling} {'x':>7} {'host us':>8} {'#wrong':>8}",
        *map(_line, rows),
    ]


def _line(row: Row) -> str:
    def shown(value: float | None, form: str, width: int) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    wire = ""
    if row.wire_gbps is not None:
        total = None if row.total_bytes is None else row.total_bytes / 1e6
        wire = f"{shown(total, '.2f', 8)} {row.wire_gbps:8.2f} "
    return (
        f"  {row.variant:30} {row.us:10.2f} {row.us_20:10.2f} {row.us_80:10.2f} {row.gbps:8.2f} {wire}"
        f"{shown(row.percent, '.1f', 7)} {shown(row.speedup, '.2f', 7)} {shown(row.host_us, '.1f', 8)} {row.wrong:8}"
    )


def environment(*program: str) -> dict[str, Any]:
    """Hardware, versions, date and the command that made the figures.

    Args:
        program: what the interpreter or the launcher was told to run; by default this process's own arguments.
    """
    status, count = native.status(), int(os.environ.get("WORLD_SIZE", 1))
    launcher = ["python"] if count == 1 else ["torchrun", f"--nproc-per-node={count}"]
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join([*launcher, *(program or sys.argv)]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardsum": __version__,
        "native": {"backend": status.backend, "cpu_isa": status.cpu_isa, "has_cuda": status.has_cuda},
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def cpu_name() -> str:
    """The processor's name with family, model and largest cache, as Linux knows them."""
    known = dict(re.findall(r"^(.+?)\s*: (.+)$", Path("/proc/cpuinfo").read_text().split("\n\n")[0], re.MULTILINE))
    family, model, cache = (known.get(name, "unknown") for name in ("cpu family", "model", "cache size"))
    return f"{known.get('model name', platform.machine())} family {family} model {model}, cache {cache}"
