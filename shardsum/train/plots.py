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
    total, count = loss_per_position.T
    seen = np.flatnonzero(count)
    middle.plot(seen, total[seen] / count[seen], lw=1)
    middle.set(title="loss per position, summed over virtual ranks", xlabel="offset in the document")
    _draw_intervals(right, batch, owners)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_intervals(axes: Axes, batch: Batch, owners: tuple[int, ...]) -> None:
    """A row per virtual rank: the colour is its process, solid what it holds, pale what else it needs."""
    packed = batch.cu_seqlens is not None
    held = intervals_of(batch.lengths) if packed else [(0, n) for n in batch.lengths]
    wanted = [plan.keys for plan in plan_chunks(batch.lengths, batch.cu_seqlens)] if packed else held
    for v, ((begin, end), (first, last)) in enumerate(zip(held, wanted)):
        colour = f"C{owners[v] % 10}"
        axes.barh(v, last - first, left=first, height=0.8, color=colour, alpha=0.3)
        axes.barh(v, end - begin, left=begin, height=0.8, color=colour)
        axes.text(begin, v, f" process {owners[v]}", va="center", fontsize=8)
    for border in batch.cu_seqlens or ():
        axes.axvline(border, color="grey", lw=0.6, ls=":")
    axes.set_yticks(range(len(owners)))
    axes.invert_yaxis()
    title = "solid: holds; pale: keys it needs; dotted: documents" if packed else "valid positions of each shard"
    axes.set(title=title, xlabel="position", ylabel="virtual rank")
