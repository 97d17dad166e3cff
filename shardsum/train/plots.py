"""The picture of a run: loss, loss per position, and who holds and needs which positions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..documents import plan_chunks
from ..layout import intervals_of
from .data import Batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOW = 16


def save_plots(
    path: Path,
    *,
    losses: np.ndarray,
    loss_per_position: np.ndarray,
    batch: Batch,
    owners: tuple[int, ...],
) -> None:
    """Write one PNG. losses ``(steps,)``; loss_per_position ``(document_length, 2)``: sum and count of each offset."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    left.plot(np.arange(1, len(losses) + 1), losses, lw=1)
    left.set(title="loss", xlabel="step", ylabel="nats per byte")
    offsets, mean = _windows(loss_per_position)
    middle.plot(offsets, mean, lw=1)
    middle.set(title=f"loss per position ({_WINDOW} together)", xlabel="offset in the document")
    _draw_intervals(right, batch, owners)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _windows(loss_per_position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The exact mean of ``_WINDOW`` positions together: one alone is seen too rarely to show anything."""
    begins = np.arange(0, len(loss_per_position), _WINDOW)
    total, count = np.add.reduceat(loss_per_position.astype(np.float64), begins).T
    seen = count > 0
    return begins[seen], total[seen] / count[seen]


def _draw_intervals(axes: Axes, batch: Batch, owners: tuple[int, ...]) -> None:
    """A row per virtual rank: the colour is its process, solid what it holds, pale what else it needs."""
    packed = batch.cu_seqlens is not None
    held = intervals_of(batch.lengths) if packed else [(0, n) for n in batch.lengths]
    wanted = [plan.keys for plan in plan_chunks(batch.lengths, batch.cu_seqlens)] if packed else held
    for v, ((begin, end), (first, last)) in enumerate(zip(held, wanted)):
        colour = f"C{owners[v] % 10}"
        axes.barh(v, last - first, left=first, height=0.8, color=colour, alpha=0.3)
        axes.barh(v, end - begin, left=begin, height=0.8, color=colour)
    for border in batch.cu_seqlens or ():
        axes.axvline(border, color="grey", lw=0.6, ls=":")
    for process in sorted(set(owners)):
        axes.barh(0, 0, color=f"C{process % 10}", label=f"process {process}")
    axes.legend(fontsize=8, loc="upper right")
    axes.set_yticks(range(len(owners)))
    axes.invert_yaxis()
    title = "solid: holds, pale: needs too, dotted: documents" if packed else "valid positions of each shard"
    axes.set(title=title, xlabel="position", ylabel="virtual rank")
