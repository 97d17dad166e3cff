"""What a person sees of a run: a progress bar or plain lines, and ``metrics.jsonl``. Process 0 alone reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .folder import RunFolder

METRICS = "metrics.jsonl"


class Reporter:
    """Prints and writes metrics.jsonl on process 0, does nothing elsewhere.

    ``error`` is None, or why a line could not be written: the run asks for it after every step, so that all processes
    end alike.
    """

    def __init__(self, folder: RunFolder, active: bool) -> None:
        self.folder, self.active = folder, active
        self.console = Console(highlight=False, soft_wrap=True, quiet=not active)
        self.error: OSError | None = None
        self._progress: Progress | None = None

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[None]:
        """Shows the steps ``first`` to ``last`` while the block runs."""
        self._last, self._every = last, max(1, (last - first) // 10)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not (self.active and self.console.is_terminal)) as bar:
            self._progress, self._task = bar, bar.add_task("", total=last, completed=first, note="")
            yield

    def step(self, metrics: dict[str, Any]) -> None:
        """One finished step: ``step``, ``loss``, ``tokens_per_second`` and what else is worth a line of JSON."""
        if not self.active:
            return
        self.write(METRICS, metrics)
        note = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        assert self._progress is not None
        self._progress.update(self._task, completed=metrics["step"], note=note)
        if not self.console.is_terminal and (metrics["step"] % self._every == 0 or metrics["step"] == self._last):
            self.line(f"step {metrics['step']:>6}/{self._last}  {note}")

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Append a line of JSON to a file of the run folder; a failure is kept in ``error``."""
        if not self.active:
            return
        try:
            self.folder.append(name, json.dumps(values) + "\n")
        except OSError as error:
            self.error = error
