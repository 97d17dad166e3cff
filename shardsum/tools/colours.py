"""Colours of pictures: as many different ones as a picture has things to tell apart."""

from __future__ import annotations

from typing import Any


def distinct_colours(count: int) -> list[Any]:
    """``count`` colours, all different: matplotlib's usual ten, or, for more, as many steps around the colour wheel,
    alternately light and dark."""
    from colorsys import hls_to_rgb

    if count <= 10:
        return [f"C{i}" for i in range(count)]
    return [hls_to_rgb(i / count, 0.35 + 0.25 * (i % 2), 0.75) for i in range(count)]
