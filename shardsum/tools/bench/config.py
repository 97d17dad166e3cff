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
    """Where to compute; under torchrun "cuda" takes one GPU a process."""
    only: str = ""
    """Measure the cases whose line contains this text; an empty text is in every line."""
    baselines: list[str] = field(default_factory=lambda: list(BASELINES))
    """Of a local sum: compile, eager, loop, sum fp32. --quick leaves out compile unless this option names it."""
    transports: list[str] = field(default_factory=lambda: ["auto", "gather", "all_to_all", "peer"])
    """Of collectives; those that do not run here are left out."""
    samples: int = 15
    """Measurements of each variant."""
    limit: float = 600.0
    """Seconds after which no further case starts."""
    threads: int = 0
    """Of a process on the CPU; 0: torch's default, 1 under torchrun."""
    json: Path | None = None
    """File that gets all rows; pictures are put beside it."""
    plot: Path | None = None
    """Draw the pictures of such a file again and measure nothing."""
    calibrate: Path | None = None
    """Measure the constants of transport="auto" into this file (see SHARDSUM_COSTS) and nothing else."""

    def __post_init__(self) -> None:
        known = {"baselines": BASELINES, "transports": ("auto", *TRANSPORTS, "peer")}
        for name, names in known.items():
            for value in getattr(self, name):
                if value not in names:
                    raise ValueError(f"{name}: expected some of {', '.join(names)}, got {value!r}")
        for name, least in (("samples", 1), ("limit", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
