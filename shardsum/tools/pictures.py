"""What all pictures share: the figure, and as many different colours as there are things to tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Matplotlib's usual ten, written out: its names for them ("C0") cannot make a cycle.
_TEN = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, without pyplot: it needs no display and leaves no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def distinct_colours(count: int) -> list[Any]:
    """``count`` colours, all different: matplotlib's usual ten, or, for more, as many steps around the colour wheel,
    alternately light and dark."""
    from colorsys import hls_to_rgb

    if count <= 10:
        return _TEN[:count]
    return [hls_to_rgb(i / count, 0.35 + 0.25 * (i % 2), 0.75) for i in range(count)]
