"""The options of ``shardsum bench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...transports import TRANSPORTS
from .baselines import BASELINES


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
