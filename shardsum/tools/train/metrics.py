"""What a person sees of a run: a progress bar or plain lines, and ``metrics.jsonl``. Process 0 alone reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """Prints and writes on process 0, does nothing elsewhere. ``folder`` receives metrics.jsonl."""

    def __init__(self, folder: Path, active: bool) -> None:
        self.folder, self.active = folder, active
        self.console = Console(highlight=False, soft_wrap=True, quiet=not active)
        self._progress: Progress | None = None

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[None]:
        """Shows the steps ``first`` to ``last`` while the block runs, and keeps metrics of the first ``first`` only."""
        if self.active:
            _keep_lines(self.folder / "metrics.jsonl", first)
        self._last, self._every = last, max(1, (last - first) // 10)
        self._file = open(self.folder / "metrics.jsonl", "a") if self.active else None  # noqa: SIM115
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not (self.active and self.console.is_terminal)) as bar:
            self._progress, self._task = bar, bar.add_task("", total=last, completed=first, note="")
            try:
                yield
            finally:
                if self._file is not None:
                    self._file.close()

    def step(self, metrics: dict[str, Any]) -> None:
        """One finished step: ``step``, ``loss``, ``tokens_per_second`` and what else is worth a line of JSON."""
        if self._file is None:
            return
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        note = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        assert self._progress is not None
        self._progress.update(self._task, completed=metrics["step"], note=note)
        if not self.console.is_terminal and (metrics["step"] % self._every == 0 or metrics["step"] == self._last):
            self.line(f"step {metrics['step']:>6}/{self._last}  {note}")


def _keep_lines(path: Path, count: int) -> None:
    """Drop lines of steps that a run lost: those after its last checkpoint are about to be written again."""
    if path.exists():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


class Stopwatch:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed
