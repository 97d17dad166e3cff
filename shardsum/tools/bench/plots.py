"""Pictures of measurements: rate against fill, time against bytes, the roofline; a panel per operation and dtype."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pictures import distinct_colours, new_figure
from .rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OPERATIONS = ("ragged_sum", "all_reduce", "reduce_scatter")
_STYLES = {"shardsum": "-", "copy": ":"}  # of names that begin so; others "--"


def save(beside: Path, facts: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write the PNG files that ``rows`` have data for, named after the JSON file ``beside``; returns their paths."""
    pictures: dict[str, tuple[Callable[[Axes, list[Row]], bool], str, str]] = {
        "fill": (_draw_fill, "valid share of the padded shards", "GB/s"),
        "time": (_draw_time, "bytes", "microseconds a call"),
        "roofline": (lambda axes, some: _draw_roofline(axes, some, facts), "bytes", "GB/s"),
    }
    panels = _panels(rows)
    paths = []
    for name, (draw, x, y) in pictures.items():
        path = beside.with_name(f"{beside.stem}_{name}.png")
        if _picture(path, panels, draw, x, y, _title(facts)):
            paths.append(path)
    return paths


def _title(facts: dict[str, Any]) -> str:
    hardware = facts["gpu"] if facts.get("device") == "cuda" and "gpu" in facts else facts.get("cpu", "")
    count = f"{facts['processes']} processes, " if "processes" in facts else ""
    return f"{count}{hardware}, torch {facts.get('torch')}, {facts.get('date')}"


def _panels(rows: list[Row]) -> dict[str, list[Row]]:
    panels = defaultdict(list)
    for row in rows:
        if row.operation in _OPERATIONS:
            panels[f"{row.operation}, {row.dtype}"].append(row)
    return dict(panels)


def _picture(
    path: Path, panels: dict[str, list[Row]], draw: Callable[[Axes, list[Row]], bool], x: str, y: str, title: str
) -> bool:
    figure = new_figure(6.5 * max(1, len(panels)), 6)
    drawn = False
    for axes, (name, rows) in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels.items()):
        axes.set(title=name, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        axes.set_prop_cycle(color=distinct_colours(max(1, len({row.variant for row in rows}))))
        if draw(axes, rows):
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)  # below: it hides nothing
            drawn = True
        else:
            axes.set_visible(False)
    figure.suptitle(title, fontsize=9)
    if drawn:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    return drawn


def _lines(axes: Axes, rows: Iterable[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> bool:
    """A line per variant that has two points or more."""
    points = defaultdict(list)
    for row in rows:
        points[row.variant].append((x(row), y(row)))
    drawn = False
    for variant, pairs in points.items():
        if len({a for a, _ in pairs}) > 1:
            style = next((s for name, s in _STYLES.items() if variant.startswith(name)), "--")
            axes.plot(*zip(*sorted(pairs)), style, marker="o", ms=3, lw=1.2, label=variant)
            drawn = True
    return drawn


def _most_measured(rows: list[Row], of: Callable[[Row], Any], at: Callable[[Row], Any]) -> list[Row]:
    """Those of the kind that was measured at most points."""
    points = Counter(kind for kind, _ in {(of(row), at(row)) for row in rows})
    kind = max(points, key=lambda k: (points[k], k), default=None)
    return [row for row in rows if of(row) == kind]


def _draw_fill(axes: Axes, rows: list[Row]) -> bool:
    """Of the shape that was measured at most fills; one process's or rank's share decides elsewhere."""
    rows = [row for row in rows if row.profile not in ("skewed", "uneven")]
    return _lines(axes, _most_measured(rows, _shape, lambda r: r.fill), lambda r: r.fill, lambda r: r.gbps)


def _shape(row: Row) -> tuple[int, int, int]:
    return row.num_virtual_ranks, row.size, row.width


def _draw_time(axes: Axes, rows: list[Row]) -> bool:
    """Of the profile that was measured at most sizes."""
    axes.set(xscale="log", yscale="log")
    of = lambda row: row.case.split(f" {row.dtype}")[0]  # noqa: E731
    return _lines(axes, _most_measured(rows, of, _shape), lambda r: r.bytes, lambda r: r.us)


def _draw_roofline(axes: Axes, rows: list[Row], facts: dict[str, Any]) -> bool:
    """Every case of every variant, under the copy of as many bytes or the rate of the wire."""
    axes.set(xscale="log", yscale="log")
    roof = [(row.bytes, row.gbps) for row in rows if row.variant == "copy"]
    if roof:
        axes.plot(*zip(*sorted(roof)), "k:", lw=1, label="copy of as many bytes")
    elif "wire_gbps" in facts:
        axes.axhline(facts["wire_gbps"], color="k", ls=":", lw=1, label=f"wire: {facts['wire']}")
    drawn = False
    for variant in dict.fromkeys(row.variant for row in rows if row.variant != "copy"):
        some = [row for row in rows if row.variant == variant]
        rates = [r.gbps if r.wire_gbps is None else r.wire_gbps for r in some]
        marker = "o" if variant.startswith("shardsum") else "x"
        axes.plot([r.bytes for r in some], rates, marker, ms=4, ls="", label=variant)
        drawn = True
    return drawn
