"""The scope of one call: what it begins with, and what an error in it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planner import Planner


class Calling:
    """The scope of one call. An error that is no ValueError ends the group: others may be in the middle of it."""

    def __init__(self, planner: Planner, name: str, begun: bool) -> None:
        self._planner, self._name, self._begun = planner, name, begun

    def __enter__(self) -> None:
        if self._begun:
            self._planner.agreement.busy.__enter__()
        else:
            self._planner.enter(self._name)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is not None and not isinstance(error, ValueError):
                self._planner.fail(self._name, error)
        finally:
            self._planner.leave()
