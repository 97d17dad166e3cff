"""Builds of stand-ins for csrc/ (the fixture ``tiny``), by the real recipe."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from pathlib import Path

from shardsum.native import recipe
from shardsum.native.builder import build
from shardsum.native.cache import cached_library


def build_tiny() -> Path:
    recipe.source_folder = lambda: Path(os.environ["SOURCES"])
    return cached_library()


def build_tiny_and_listen() -> tuple[Path | None, str, str]:
    """The library, or the error's text; and what was logged."""
    stream = io.StringIO()
    logging.getLogger("shardsum").addHandler(logging.StreamHandler(stream))
    path, error = None, ""
    try:
        path = build_tiny()
    except RuntimeError as e:
        error = str(e)
    return path, error, stream.getvalue()


def build_tiny_ahead_of_time(output: str) -> None:
    recipe.source_folder = lambda: Path(os.environ["SOURCES"])
    build(Path(output))


def logged(tmp_path: Path) -> list[str]:
    """A line for every call of the compiler: its process, then its arguments."""
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def compiled(tmp_path: Path) -> list[str]:
    return [line.partition(" ")[2] for line in logged(tmp_path) if " -c " in line]


def wait_for_a_compiler(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    while not logged(tmp_path):
        assert time.monotonic() < deadline, "the build does not start"
        time.sleep(0.02)


def living(pids: set[int]) -> set[int]:
    """Those processes that run."""
    alive = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            alive |= {pid} if state != "Z" else set()
    return alive
