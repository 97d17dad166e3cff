"""Values as short text, for reprs."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


def brief(values: Sequence[object]) -> str:
    """A list as Python shows it, but of many items the first ones and their number.

    Example:
        >>> brief([3, 1]), brief(range(64))
        ('[3, 1]', '[0, 1, 2, 3, 4, 5, 6, 7, ... 64 in all]')
    """
    if len(values) <= _SHOWN + 1:
        return str(list(values))
    return f"[{', '.join(map(repr, values[:_SHOWN]))}, ... {len(values)} in all]"
