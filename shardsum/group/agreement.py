"""Agreement between the processes of a group before data moves, and names for who is missing when it does not.

A *statement* is what one process says of one call: its name, its signature (values that all must pass alike), its error
(or None), "other", a second signature that it may mean as well (or None), "settled", whether that was taken, and
"info", which is not compared. Processes state and compare once a signature (or always). The medium is the process
group's key-value store (:mod:`.side_channel`), so a process with an error of its own states it and raises at once;
peers read it there, also after a transfer failed. Per-call lengths (form b) ride in one small all_gather, with the
signature's hash.

Every method is called by all processes of the group in the same order, except where it says otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..native import loader as native
from ..transports import Wire, stamp
from ..transports.headers import Headers
from ..transports.store import StoreGone
from .failures import Failures, weakly
from .regions import Regions
from .side_channel import LONGEST_PAUSE_S

Signature = Mapping[str, Any]

_MAX_AGREED = 1 << 16  # signatures remembered: every new set of host lengths is one


class Agreement(Failures):
    """The side channel of one group of ``world_size`` processes; with one process every method returns at once.

    Arguments and further attributes are those of :class:`~.failures.Failures`.

    Attributes:
        check: "first" compares once a signature, "always" on every call.
        wary: the last call ended in an error that others may not know of, since they had agreed on its signature
            before and read no statements. The next call compares statements in any case, so that data of two calls
            cannot be mixed.
        refused: how many calls have ended in such an error. Where that differs, a process has carried out a call that
            another one refused: the processes are out of step, and the group fails.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        super().__init__(group, timeout)
        self.check = "first"
        self.wary = False
        self.refused = 0
        self._agreed: set[int] = set()
        self.regions = Regions()

    def load_native(self) -> None:
        """Load the native library, building it if need be; the others wait for that beyond their timeout."""
        if self.world_size == 1 or native.is_decided():
            native.load()
            return
        with self.side.busy("loads or builds the native library"):
            native.load()

    def connect(self, slots: int, device: torch.device) -> Wire | None:
        """Open the side channel, once the processes have agreed that they construct the same group; returns what data
        moves on: for shards on the CPU the side channel's own wire, else one on the user's process group.

        Args:
            slots: how many values :meth:`gather_values` moves in its one all_gather, of any call.
        """
        self._slots = slots
        if self._group is None or self.world_size == 1:
            return None
        try:
            self.side.connect(self.timeout, weakly(self._elsewhere), weakly(self._condemn))
        except RuntimeError as error:
            raise self.explain("ShardGroup", error) from error
        wire: Wire = self.side.wire
        if device.type != "cpu":
            headers = Headers(int(self.side.name, 16), device)
            wire = Wire(self._group, self.rank, self.world_size, self.timeout, headers)
        self._wire = wire
        return wire

    def gather_objects(self, value: Any) -> list[Any]:
        """As :meth:`.side_channel.SideChannel.gather_objects`."""
        try:
            return self.side.gather_objects(value, self.call)
        except RuntimeError as error:
            raise self.explain("set-up", error) from error

    def close(self) -> None:
        """Drop the connections to the other processes."""
        self._side = self._group = self._wire = None

    def begin(self, name: str = "ShardGroup") -> None:
        """Count one call. Raises RuntimeError when the group has failed before."""
        if self.failed is not None:
            raise RuntimeError(f"this group failed earlier and cannot be used again; make a new one. {self.failed}")
        self._name = name
        self.look()
        self.call = call = self.call + 1
        self.origin = self.regions.origin(call)

    def agree(
        self, name: str, signature: Signature, other: Signature | None = None, info: Any = None
    ) -> list[dict[str, Any]]:
        """Compare ``signature`` with the other processes' when it is new (or always).

        Args:
            other: what this process may mean as well (:func:`settle`).
            info: any JSON value, not compared.

        Returns:
            Everybody's statements where they were exchanged, else [].

        Raises:
            ValueError: signatures differ, or a process stated an error.
            RuntimeError: a process stated nothing within the timeout; the message names it.
        """
        key = hash(f"{name}{signature}")  # of this process alone: what is compared are the statements
        if self.world_size == 1 or (key in self._agreed and self.check == "first" and not self.wary):
            return []
        self._state(name, signature, None, info, other)
        statements = self._collect(name)
        if statements[self.rank]["settled"]:
            key = hash(f"{name}{other}")
        if key not in self._agreed and len(self._agreed) >= _MAX_AGREED:  # on every process at once
            self._agreed.clear()
        self._agreed.add(key)
        return statements

    def refuse(self, name: str, error: Exception, counted: bool = False) -> ValueError:
        """State this process's own error, so that the others raise it too; returns what to raise. ``counted``: the
        others call :meth:`gather_values`, as with lengths of form (b); else this returns at once."""
        if self.world_size == 1:
            return common_error(str(error))
        self._state(name, {}, str(error))
        self.wary, self.refused = True, self.refused + 1
        if counted:
            self._gather(name, [-1] * (2 + self._slots))
        return common_error(f"{name}: process {self.rank}: {error}")

    def gather_values(self, name: str, signature: Signature, values: Sequence[int], most: int) -> list[list[int]]:
        """Every process's ``values``, ints of 63 bits, ``most`` of them at the most, in a small all_gather with the
        signature's hash. What does not fit into its slots follows in a second one. Errors as of :meth:`agree`."""
        if self.world_size == 1:
            return [list(values)]
        signature = {**signature, "number of values": most}
        key = stamp(name, {"refused": self.refused, **signature}).hash
        row = [len(values), *values, *[0] * (max(most, self._slots) - len(values))]
        rows = self._gather(name, [key, *row[: 1 + self._slots]])
        if any(theirs[0] != key for theirs in rows):
            self._state(name, signature, None)
            self._collect(name)
        if most > self._slots:
            rest = self._gather(name, row[1 + self._slots :])
            rows = [first + more for first, more in zip(rows, rest)]
        return [theirs[2 : 2 + theirs[1]] for theirs in rows]

    def _gather(self, name: str, row: list[int]) -> list[list[int]]:
        """All processes' rows. A process that states something in the store instead of coming ends the wait."""
        self._counting = True
        try:
            return self.side.gather_rows(name, row, self.call)
        except RuntimeError as error:
            stated = []
            if not isinstance(error, StoreGone):
                stated = [p for p in self._others() if self.side.store.check(f"{self.call}/{p}")]
            if not stated:
                raise self.explain(name, error) from error
            self._fail(f"{name}: process {stated[0]} did not pass its row counts as the others did")
            self._state(name, {"lengths": "counted"}, None)
            self._tell_failure(name, "not all passed row counts")
            self._collect(name)
            raise self.explain(name, error) from error
        finally:
            self._counting = False

    def _failed_before(self, processes: Sequence[int]) -> list[int]:
        """Processes that failed without a statement on this call: none will come. (In this order: they state first.)"""
        store = self.side.store
        said = [p for p in processes if store.check(f"failed/{p}")]
        return [p for p in said if not store.check(f"{self.call}/{p}")]

    def _state(
        self, name: str, signature: Signature, error: str | None, info: Any = None, other: Signature | None = None
    ) -> None:
        statement = {"name": name, "signature": dict(signature), "error": error, "info": info, "other": other}
        statement |= {"refused": self.refused, "settled": False}
        if not self.side.name:
            self.side.meet(self.timeout.total_seconds())
        key = f"{self.call}/{self.rank}"
        self.side.store.set(key, json.dumps(statement, default=str))
        if key not in self._stated:
            self._stated.append(key)

    def _collect(self, name: str) -> list[dict[str, Any]]:
        """Everybody's statements of this call; raises when they disagree or one is missing at the deadline."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        found: dict[int, dict[str, Any]] = {}
        missing, pause, store = list(range(self.world_size)), 0.0002, self.side.store
        while missing:
            for p in missing:
                if (said := store.get(f"{self.call}/{p}")) is not None:
                    found[p] = json.loads(said)
            missing = [p for p in missing if p not in found]
            if missing and not any(s["error"] for s in found.values()):  # an error is not waited for
                if time.monotonic() > deadline:
                    who, waited = ", ".join(map(str, missing)), self.timeout.total_seconds()
                    raise self.explain(name, TimeoutError(f"process {who} did not come within {waited:g} s"))
                if gone := self._failed_before(missing):
                    told = self._told(store.get(f"failed/{gone[0]}"))
                    raise self.explain(name, RuntimeError(f"process {gone[0]} has failed before, in {told}"))
                time.sleep(pause)  # polling: a wait in the store would hold up an error that another one states
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                break
        self._check_refused(name, found)
        settle(found)
        message = compare(found)
        self.wary = message is not None
        if message is not None:
            self.refused += 1
            raise common_error(message)
        self._met = self.call
        # Whoever stated in this call had read all statements of earlier ones.
        for key in self._stated[:-1]:
            store.delete(key)
        del self._stated[:-1]
        return [found[p] for p in range(self.world_size)]

    def _check_refused(self, name: str, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Fail the group when a process has carried out a call that another one refused."""
        counts = {p: statement["refused"] for p, statement in sorted(found.items())}
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] != counts[least]:
            why = f"{name}: process {most} has refused an earlier call that process {least} carried out"
            raise RuntimeError(f"{self._fail(why)}; the processes are out of step; create a new group")


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
