"""How a group fails: an error on this process, and a note in the store for the others.

Every method is called by one process alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist

from ..transports import Wire
from ..transports.stamps import Step
from ..transports.store import StoreGone
from ..transports.tagged import OutOfStep
from .busy import Busy
from .side_channel import SideChannel

_GRACE_S = 1.0  # how long a process that failed waits for others to say how they fared: its error comes within two
_STORE_LIMIT_S = 0.5  # for an operation of the store then


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method for as long as its object lives; then it returns None."""
    reference = WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call


class Failures:
    """The part of an :class:`~.agreement.Agreement` that ends a group.

    Args:
        group: None for a lone process.
        timeout: how long a process waits for the others.

    Attributes:
        call: the number of the current call.
        origin: the number of the call whose backward it is, or that it repeats (:mod:`.regions`); 0 for neither.
        failed: why the group cannot be used any more, or None.
        busy: to be held by whoever uses the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.timeout = timeout
        self.call = self.origin = 0
        self.failed: str | None = None
        self.busy = Busy(group if self.world_size > 1 else None, weakly(self.abandon))
        self._group = group
        self._side: SideChannel | None = None
        self._wire: Wire | None = None
        self._name = "ShardGroup"  # of the current call
        self._counting = False  # it is in a small all_gather of row counts
        self._stated: list[str] = []
        self._met = 0  # the last call in which all have stated the same: that they did says nothing of them now

    @property
    def side(self) -> SideChannel:
        if self._side is None:
            assert self._group is not None
            self._side = SideChannel(self._group, self.timeout)
        return self._side

    def _others(self) -> list[int]:
        return [p for p in range(self.world_size) if p != self.rank]

    def explain(self, name: str, error: BaseException) -> RuntimeError:
        """The error to raise when a transfer failed: who failed, who is elsewhere, who is silent. Not collective."""
        if self.world_size == 1:
            return RuntimeError(f"{name}: {error}")
        reason = str(error).splitlines()[0][:1000]
        failed = f"{name} (call {self.call}) on process {self.rank} failed: {reason}"
        if isinstance(error, StoreGone):
            return RuntimeError(self._fail(f"{failed}; nothing is known of the other processes"))
        others: dict[int, Any] = {}
        store, gone = self.side.store, None
        store.limit = min(store.limit, _STORE_LIMIT_S)
        try:
            self._tell_failure(name, reason)
            deadline = time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
            while not isinstance(error, OutOfStep) and time.monotonic() < deadline:
                others.update(self._seen(set(self._others()) - set(others)))
                if len(others) == self.world_size - 1:
                    break
                time.sleep(0.05)
        except StoreGone as silence:
            gone = silence
        lines = [f"process {p}: {text}" for p, text in sorted(others.items())]
        silent = sorted(set(self._others()) - set(others))
        if gone is not None:
            lines.append(f"{gone}; nothing is known of the other processes")
        elif silent and not isinstance(error, OutOfStep):
            lines.append(f"no word from process {', '.join(map(str, silent))}: dead, silent or in another call")
            lines += [f"process {p} waits {place}" for p in silent if (place := self._place(p))]
        return RuntimeError(self._fail("; ".join([failed, *lines])))

    def look(self) -> None:
        """Raise RuntimeError where the device has found that messages of another exchange came. The group fails then.
        The host does not wait for the device, so this is some time after the results were spoiled."""
        headers = None if self._wire is None else self._wire.headers
        found = None if headers is None or self.failed is not None else headers.found()
        if headers is None or found is None:
            return
        mine = headers.history.get(found.mine, "an exchange of long ago")
        sent = "no call any more, since that process found another one out of step, or waited for rows in vain"
        if found.theirs >= 0:
            sent = headers.history.get(found.theirs) or self._exchange_of(found.process, found.theirs)
        text = (
            f"the processes are out of step: in {mine}, process {self.rank} received from process {found.process} "
            f"what belongs to {sent}; the results of that call and of later ones are invalid (NaN); create a new "
            "process group"
        )
        raise self.explain(self._name, OutOfStep(text))

    def _exchange_of(self, process: int, header: int) -> str:
        """The exchange that another process gives this header, if it says so within a moment."""
        with contextlib.suppress(StoreGone):
            store, deadline = self.side.store, time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
            assert self._wire is not None and self._wire.headers is not None
            store.set(f"headers/{self.rank}", json.dumps(self._wire.headers.history))
            while time.monotonic() < deadline:
                if (said := store.get(f"headers/{process}")) is not None:
                    return json.loads(said).get(str(header), "a call of another group, or of long ago")
                time.sleep(0.05)
        return "another call"

    def _fail(self, why: str) -> str:
        """Mark the group, and the transport under it, as failed."""
        if self.failed is None:
            self.failed = why
            if self._wire is not None:
                self._wire.fail(RuntimeError(why))
            if self._side is not None and hasattr(self._side, "wire"):
                self._side.wire.fail(RuntimeError(why))
        return why

    def leave(self, name: str, error: BaseException) -> None:
        """Tell the others that this process left a call in its middle (an interrupt). Returns at once."""
        if self.world_size > 1 and self.failed is None:
            try:
                self._tell_failure(name, f"left by {error!r}")
            finally:
                self._fail(f"{name} (call {self.call}) on process {self.rank} was left by {error!r}")

    def abandon(self, error: BaseException) -> None:
        """As :meth:`leave`, of the current call."""
        self.leave(self._name, error)

    def _elsewhere(self, step: Step) -> str | None:
        """Why the exchange that this process waits in cannot end, for the thread that watches it."""
        store, stated = self.side.store, f"{step.call}/{self.rank}" in self._stated
        for p in self._others():
            if (said := store.get(f"failed/{p}")) is not None:
                return f"process {p} failed in {self._told(said)}"
            if not stated and (said := store.get(f"{step.call}/{p}")) is not None:
                theirs = json.loads(said)
                doing = f"refused {theirs['name']}" if theirs["error"] else f"is in {theirs['name']}"
                what = theirs["error"] or theirs["signature"]
                return (
                    f"the processes are out of step: process {self.rank} is in {step}, "
                    f"process {p} {doing} (call {step.call}): {what}; create a new group"
                )
        return None

    def _condemn(self, step: Step, verdict: str) -> None:
        if self._counting:
            return  # the waiting thread states what it is in first, and compares
        self._tell_failure(step.stamp.text.partition("(")[0], verdict, step.call)

    def _seen(self, processes: set[int]) -> dict[int, str]:
        """What other processes said of their failure, or of this very call."""
        found, store = {}, self.side.store
        for p in processes:
            if (said := store.get(f"failed/{p}")) is not None:
                found[p] = f"failed in {self._told(said)}"
            elif self._met < self.call and (said := store.get(f"{self.call}/{p}")) is not None:
                theirs = json.loads(said)
                found[p] = f"is in {theirs['name']} {theirs['error'] or theirs['signature']}"
        return found

    @staticmethod
    def _told(said: str | None) -> str:
        failure = json.loads(said or '{"call": 0, "name": "", "error": ""}')
        return f"call {failure['call']} ({failure['name']}): {failure['error']}"

    def _place(self, process: int) -> str | None:
        """Where a process waits now, as it has published."""
        try:
            for state in self.side.board.read(self.side.ranks[process]).values():
                if state["waits"]:
                    rank, _, text, call = state["waits"]
                    return f"in {text} (call {call}) for rank {rank}"
        except StoreGone:
            pass
        return None

    def _tell_failure(self, name: str, error: str, call: int | None = None) -> None:
        """Publish that this process has ended the group. It makes no further statements."""
        if not self.side.name:  # they have not met
            return
        said = {"call": self.call if call is None else call, "name": name, "error": error[:1000]}
        self.side.store.set(f"failed/{self.rank}", json.dumps(said))
