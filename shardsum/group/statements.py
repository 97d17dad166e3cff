"""What processes say of one call, compared: the same finding on every process.

A statement holds a name, a signature, an error (or None), "other", a second signature that the process may mean as well
(or None), "settled", whether that was taken, and "info", which is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare(statements: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The sentence that names the first error or difference, the same on every process; None when all agree."""
    for process, statement in sorted(statements.items()):
        if statement["error"] is not None:
            return f"{statement['name']}: process {process}: {statement['error']}"
    base, first = min(statements.items())
    for process, statement in sorted(statements.items()):
        if statement["name"] != first["name"]:
            return f"process {base} calls {first['name']}, process {process} calls {statement['name']}"
        mine, other = first["signature"], statement["signature"]
        for field in sorted({**mine, **other}, key=lambda field: field not in mine or field not in other):
            ours, theirs = mine.get(field), other.get(field)
            if ours != theirs:
                return f"{first['name']}: {field} differs: process {base} has {ours}, process {process} has {theirs}"
    return None


def settle(statements: Mapping[int, dict[str, Any]]) -> None:
    """Where processes that may mean two signatures agree on the second with those that mean only one, take it."""
    firm = [statement["signature"] for statement in statements.values() if statement["other"] is None]
    for statement in statements.values():
        if firm and statement["other"] == firm[0] and all(other == firm[0] for other in firm):
            statement["signature"], statement["settled"] = firm[0], True


def common_error(text: str) -> ValueError:
    """The error of processes that called with different values, or of which one called with bad ones: the same sentence
    on every process, so nobody states it again."""
    error = ValueError(text)
    error.is_common = True  # type: ignore[attr-defined]
    return error


def is_common(error: BaseException) -> bool:
    return getattr(error, "is_common", False)
