"""``shardsum.show``: a picture, in text, of who holds and who needs which positions."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from ..core.checks import is_count
from ..core.layout import Interval, intersect, length
from ..group.group import CollectiveGroup
from ..group.plan import Plan
from .context import ContextBatch

_HELD, _KEPT, _NEEDED, _NEITHER = "▒█░·"
_LEGEND = f"{_KEPT} holds and needs  {_HELD} holds  {_NEEDED} needs  {_NEITHER} neither"


class Picture(str):
    """Text that a terminal and a notebook show as it is."""

    def __repr__(self) -> str:
        return str(self)


def show(
    what: CollectiveGroup | Plan[Any] | ContextBatch,
    lengths: Sequence[int] | None = None,
    *,
    collective: str = "all_reduce",
    width: int = 80,
    **options: Any,
) -> Picture:
    """Draw who holds and who needs which positions, a line a virtual rank. Nothing is sent.

    Args:
        what: a group; or a plan (``group.plan(...)``) or batch (``group.context_parallel(...)``), which know the rest.
        lengths: R ints, for a group. Not for "exchange".
        collective: "all_reduce", "reduce_scatter", "all_gather" or "exchange", for a group.
        width: columns of the picture. One of them stands for several positions where there are more.
        options: ``row_shape``, ``dtype``, and what the collective takes (``size``, ``splits``, ``in_intervals``, ...).

    Raises:
        ValueError: lengths or an option do not fit the group.

    Example:
        >>> shardsum.show(ShardGroup(3), [3, 4, 0], collective="reduce_scatter")
        reduce_scatter: 3 virtual ranks on 1 process, 4 positions
        rank  process  0  3  holds   needs
           0        0  ██▒·  [0, 3)  [0, 2)
           1        0  ▒▒█▒  [0, 4)  [2, 3)
           2        0  ···░  none    [3, 4)
        █ holds and needs  ▒ holds  ░ needs  · neither
        by local: one process: the shards are summed where they lie
    """
    if not is_count(width) or width == 0:
        raise ValueError(f"width: expected an int, at least 1, got {width!r}")
    if isinstance(what, ContextBatch):
        title = f"context parallelism, {len(what.cu_seqlens) - 1} documents"
        return _draw(title, what.plan.owners, what.plan.owned, what.plan.needed, what.size, width)
    if isinstance(what, CollectiveGroup):
        what = what.preview(collective, lengths, **options)
    elif not isinstance(what, Plan):
        raise ValueError(f"what: expected a ShardGroup, a Plan or a ContextBatch, got {what!r}")
    elif lengths is not None or options:
        raise ValueError("lengths: a plan and a batch have their own; pass a group, or leave them out")
    terms, owners = what.terms, what.owners
    held, needed = (
        list(of) if kind == "v" else [of[owner] for owner in owners]
        for of, kind in zip((terms.sources, terms.sinks), terms.kinds)
    )
    route = what.explain().route
    moved = f"; {sum(route.egress)} bytes in all, at most {max(route.egress)} from one process" * (max(owners) > 0)
    footer = f"by {route.transport}: {route.reason}{moved}"
    return _draw(terms.name, owners, held, needed, terms.size, width, footer)


def _draw(
    title: str,
    owners: Sequence[int],
    held: Sequence[Interval],
    needed: Sequence[Interval],
    size: int,
    width: int,
    footer: str = "",
) -> Picture:
    processes = max(owners) + 1
    table = [["rank", "process", "", "holds", "needs"]]
    for r, (owner, holds, needs) in enumerate(zip(owners, held, needed)):
        table.append([str(r), str(owner), "", _said(holds), _said(needs)])
    widths = [max(map(len, column)) for column in zip(*table)]
    columns = max(1, min(size, max(width - sum(widths) - 8, 10)))
    table[0][2] = f"{0:<{max(columns - len(str(size - 1)), 0)}}{size - 1}" if size > 1 else "0"
    for line, holds, needs in zip(table[1:], held, needed):
        cells = ((i * size // columns, (i + 1) * size // columns) for i in range(columns))
        line[2] = "".join(_cell(cell, holds, needs) for cell in cells)
    widths[2] = max(len(line[2]) for line in table)
    lines = [
        f"{rank:>{widths[0]}}  {owner:>{widths[1]}}  {bar:<{widths[2]}}  {holds:<{widths[3]}}  {needs}"
        for rank, owner, bar, holds, needs in table
    ]
    of = f"{processes} process" + "es" * (processes > 1)
    head = f"{title}: {len(owners)} virtual ranks on {of}, {size} positions"
    return Picture("\n".join([*wrap(head, width), *lines, *wrap(_LEGEND, width), *wrap(footer, width)]))


def _cell(cell: Interval, holds: Interval, needs: Interval) -> str:
    """What a column of positions shows: whether any of them is held, and needed."""
    held, needed = length(intersect(cell, holds)) > 0, length(intersect(cell, needs)) > 0
    return _KEPT if held and needed else _HELD if held else _NEEDED if needed else _NEITHER


def _said(interval: Interval) -> str:
    return f"[{interval[0]}, {interval[1]})" if length(interval) else "none"
