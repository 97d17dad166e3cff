"""The picture of a run: loss, loss per position, and who holds and needs which positions."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.layout import intervals_of
from ...training.context_chunks import plan_chunks
from ..pictures import distinct_colours, new_figure
from .data import Batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 24  # of the loss per position: one offset alone is seen too rarely to show anything
_PALE = 0.3
_MOST_NAMED = 8  # processes in the legend


def draw_run(
    *,
    losses: np.ndarray,
    loss_per_position: np.ndarray,
    batch: Batch,
    owners: tuple[int, ...],
) -> bytes:
    """One PNG. losses ``(steps,)``; loss_per_position ``(document_length, 2)``: sum and count of each offset."""
    figure = new_figure(15, 4.8)
    left, middle, right = figure.subplots(1, 3)
    _draw_losses(left, losses)
    _draw_positions(middle, loss_per_position)
    _draw_intervals(right, batch, owners)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    return picture.getvalue()


def _draw_losses(axes: Axes, losses: np.ndarray) -> None:
    """Every step pale, and above it the mean of as many steps as a tenth of the run (at first, of those there are)."""
    from matplotlib.ticker import MaxNLocator

    steps, window = np.arange(1, len(losses) + 1), len(losses) // 10
    if window < 2:
        axes.plot(steps, losses, color="C0", lw=1.5, marker="o", ms=3)
    else:
        axes.plot(steps, losses, color="C0", alpha=_PALE, lw=1, label="each step")
        sums, first = np.cumsum([0.0, *losses]), np.maximum(steps - window, 0)
        axes.plot(steps, (sums[steps] - sums[first]) / (steps - first), color="C0", lw=2, label=f"mean of {window}")
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)
    axes.set(title="Loss", xlabel="step", ylabel="nats per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=_PALE)


def _draw_positions(axes: Axes, loss_per_position: np.ndarray) -> None:
    """Means of neighbouring offsets, at the middle of each window."""
    window = -(-len(loss_per_position) // _POINTS)
    begins = np.arange(0, len(loss_per_position), window)
    total, count = np.add.reduceat(loss_per_position.astype(np.float64), begins).T
    seen = count > 0
    axes.plot(begins[seen] + (window - 1) / 2, total[seen] / count[seen], color="C0", lw=1.5, marker="o", ms=3)
    axes.set(title="Loss by offset in the document", xlabel=f"offset in bytes, {window} together")
    axes.set(ylabel="nats per byte, recent steps")
    axes.grid(alpha=_PALE)


def _draw_intervals(axes: Axes, batch: Batch, owners: tuple[int, ...]) -> None:
    """A row per virtual rank: the colour is its process, solid what it holds, pale what else it needs."""
    packed = batch.cu_seqlens is not None
    held = wanted = [(0, n) for n in batch.lengths]
    if batch.cu_seqlens is not None:
        held = intervals_of(batch.lengths)
        wanted = [chunk.needed for chunk in plan_chunks(batch.lengths, batch.cu_seqlens)]
    colours = distinct_colours(max(owners) + 1)
    for v, ((begin, end), (first, last)) in enumerate(zip(held, wanted)):
        colour = colours[owners[v]]
        axes.barh(v, last - first, left=first, height=0.8, color=colour, alpha=_PALE, lw=0)
        axes.barh(v, end - begin, left=begin, height=0.8, color=colour, lw=0)
    for border in batch.cu_seqlens or ():
        axes.axvline(border, color="black", lw=0.8, ls=":")
    if len(owners) <= 16:
        axes.set_yticks(range(len(owners)))
    axes.set_ylim(len(owners) - 0.5, -0.5)
    axes.set(title="Who holds and needs what in the last sequence" if packed else "Valid positions in the last step")
    axes.set(
        xlabel="position in the sequence" if packed else "position in the document",
        ylabel="virtual rank, coloured by process",
    )
    _explain_intervals(axes, packed, dict(sorted({p: colours[p] for p in owners}.items())))


def _explain_intervals(axes: Axes, packed: bool, processes: dict[int, Any]) -> None:
    """A legend below the axes, where it covers nothing."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = []
    if packed:
        handles = [Patch(color="grey", lw=0, label="holds"), Patch(color="grey", alpha=_PALE, lw=0, label="needs too")]
        handles.append(Line2D([], [], color="black", lw=0.8, ls=":", label="document border"))
    if len(processes) <= _MOST_NAMED:
        handles += [Patch(color=colour, lw=0, label=f"process {p}") for p, colour in processes.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8, frameon=False)
