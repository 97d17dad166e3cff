"""Agreement between the processes of a group before data moves, and names for who is missing when it does not.

A *statement* is what one process says of one call: its name, its signature (values that all must pass alike) and its
error. Processes state and compare once a signature (or always). The medium is the process group's key-value store, so a
process with an error of its own states it and raises at once; peers read it there, also after a transfer failed.
Per-call lengths (form b) ride in one small all_gather on a gloo side channel, with the signature's hash. The channel is
not registered with torch.distributed: a registered group's name depends on which others a process is in, which differs
between processes, and its threads and sockets would outlive the ShardGroup.

Every method is called by all processes of the group in the same order, except where it says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from ..transports import TaggedWire, Wire, departures

Signature = Mapping[str, Any]

_instances: Counter[tuple[int, ...]] = Counter()
_MAX_AGREED = 1 << 16  # signatures remembered: every new set of host lengths is one
_LONGEST_PAUSE_S = 0.02
_GRACE_S = 2.0  # how long a process that failed waits for others to say how they fared


def fingerprint(signature: Signature) -> int:
    """A 63-bit hash of a signature."""
    text = json.dumps(signature, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


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


class Disagreement(ValueError):
    """Processes called with different values, or one of them with bad ones. The same sentence on every process."""


class Agreement:
    """The side channel of one group of ``world_size`` processes; with one process every method returns at once.

    Args:
        group: the torch.distributed group, or None for a lone process.
        timeout: how long a process waits for the others.

    Attributes:
        check: "first" compares once a signature, "always" on every call.
        call: the number of the current call.
        failed: why the group cannot be used any more, or None.
        wary: the last call ended in an error that others may not know of, since they had agreed on its signature
            before and read no statements: the next call compares statements in any case, lest the data of two calls
            be mixed.
        refused: how many calls have ended in such an error. Where that differs, a process has carried out a call that
            another one refused: their transfers match no more, and the group fails.
        forget: called when all signatures have been forgotten, since they became too many: a call that follows from one
            must be compared again, else this process would run it while another one waits for its statement.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.check, self.timeout = "first", timeout
        self.call = 0
        self.failed: str | None = None
        self.wary = False
        self.refused = 0
        self.forget: Callable[[], None] = lambda: None
        self._agreed: set[int] = set()
        self._stated: list[str] = []
        self._met = 0  # the last call in which all have stated the same: that they did says nothing of them now
        if group is None or self.world_size == 1:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        _instances[ranks] += 1
        prefix = f"shardsum/{'-'.join(map(str, ranks))}/{_instances[ranks]}"
        # A clone has a connection of its own: waiting here does not hold up other users of the store.
        self._store = dist.PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]

    def connect(self, slots: int) -> None:
        """Open the side channel. Called once the processes have agreed that they construct the same group.

        Args:
            slots: how many values :meth:`gather_values` moves in its one all_gather, of any call: gloo ends the program
                where processes meet with unequal sizes.
        """
        self._slots = slots
        if self.world_size > 1:
            store = dist.PrefixStore("side", self._store)
            try:
                side: Any = dist.ProcessGroupGloo(store, self.rank, self.world_size, self.timeout)
                side.barrier().wait()  # who leaves while another one still connects breaks that one's set-up
            except RuntimeError as error:
                raise self.explain("ShardGroup", error) from error
            self.side = side

    def wire(self, group: dist.ProcessGroup | None, device: torch.device) -> Wire | None:
        """What data moves on: on the CPU the side channel, which is this group's alone."""
        if self.world_size == 1:
            return None
        if device.type == "cpu":
            return TaggedWire(self.side, self.timeout)
        return Wire(group, self.rank, self.world_size, self.timeout)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every process's ``value`` (small, picklable), by process. No process returns before all have called."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        try:
            self.side._allgather_base(sizes, torch.tensor([data.numel()], device="cpu")).wait()
            longest = int(sizes.max())
            everyone = data.new_empty(self.world_size * longest)
            self.side._allgather_base(everyone, nn.functional.pad(data, (0, longest - data.numel()))).wait()
        except RuntimeError as error:
            raise self.explain("set-up", error) from error
        parts = zip(everyone.view(self.world_size, longest), sizes.tolist())
        return [pickle.loads(bytes(part[:n].tolist())) for part, n in parts]

    def begin(self) -> None:
        """Count one call. Raises RuntimeError when the group has failed before."""
        if self.failed is not None:
            raise RuntimeError(f"this group failed earlier and cannot be used again; make a new one. {self.failed}")
        self.call += 1

    def agree(self, name: str, signature: Signature, info: Any = None) -> list[Any]:
        """Compare ``signature`` with the other processes' when it is new (or always).

        Returns:
            Everybody's ``info`` (any JSON value, not compared) when statements were exchanged, else [].

        Raises:
            Disagreement: signatures differ, or a process stated an error.
            RuntimeError: a process stated nothing within the timeout; the message names it.
        """
        if self.world_size == 1:
            return [info]
        key = hash(f"{name}{signature}")  # of this process alone: what is compared are the statements
        if key in self._agreed and self.check == "first" and not self.wary:
            return []
        self._state(name, signature, None, info)
        statements = self._collect(name)
        if key not in self._agreed and len(self._agreed) >= _MAX_AGREED:  # on every process at once
            self._agreed.clear()
            self.forget()
        self._agreed.add(key)
        return [s["info"] for s in statements]

    def refuse(self, name: str, error: Exception, counted: bool = False) -> Disagreement:
        """State this process's own error, so that the others raise it too; returns what to raise.

        Args:
            counted: the others call :meth:`gather_values`, as with lengths of form (b); else this returns at once.
        """
        if self.world_size == 1:
            return Disagreement(str(error))
        self._state(name, {}, str(error))
        self.wary, self.refused = True, self.refused + 1
        if counted:
            self._gather(name, [-1] * (2 + self._slots))
        return Disagreement(f"{name}: process {self.rank}: {error}")

    def gather_values(self, name: str, signature: Signature, values: Sequence[int], most: int) -> list[list[int]]:
        """Every process's ``values``, in a small all_gather with the signature's hash; what is too long for it follows.

        Args:
            values: ints of 63 bits; their number may differ.
            most: how many they are at most.

        Raises:
            Disagreement, RuntimeError: as :meth:`agree`.
        """
        if self.world_size == 1:
            return [list(values)]
        signature = {**signature, "number of values": most}
        key = fingerprint({"name": name, "refused": self.refused, **signature})
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
        mine = torch.tensor(row, dtype=torch.int64, device="cpu")
        everyone = torch.empty(self.world_size * len(row), dtype=torch.int64, device="cpu")
        deadline = time.monotonic() + self.timeout.total_seconds()
        departures.note(everyone, mine)
        try:
            work = self.side._allgather_base(everyone, mine)
            while not self._wait_work(work):
                others = [p for p in range(self.world_size) if p != self.rank]
                elsewhere = [p for p in others if self._store.check([f"{self.call}/{p}"])]
                if elsewhere and not work.is_completed():
                    self.failed = f"{name}: process {elsewhere[0]} did not pass its row counts as the others did"
                    self._state(name, {"lengths": "counted"}, None)
                    self._tell_failure(name, "not all passed row counts")
                    self._collect(name)
                gone = self._failed_before(others)
                if gone and not work.is_completed():
                    raise RuntimeError(f"process {gone[0]} has failed before")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no row counts from every process within {self.timeout.total_seconds():g} s")
        except RuntimeError as error:
            raise self.explain(name, error) from error
        return everyone.view(self.world_size, -1).tolist()

    @staticmethod
    def _wait_work(work: dist.Work) -> bool:
        try:
            work.wait(timedelta(seconds=0.5))
        except RuntimeError:
            if work.is_completed():  # failed, not late
                raise
            return False
        return True

    def explain(self, name: str, error: BaseException) -> RuntimeError:
        """The error to raise when a transfer failed: who failed, who is elsewhere, who is silent. Not collective."""
        if self.world_size == 1:
            return RuntimeError(f"{name}: {error}")
        reason = str(error).splitlines()[0][:300]
        others: dict[int, Any] = {}
        try:
            self._tell_failure(name, reason)
            deadline = time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
            while len(others) < self.world_size - 1 and time.monotonic() < deadline:
                others.update(self._seen(set(range(self.world_size)) - {self.rank} - set(others)))
                time.sleep(0.05)
        except Exception:  # the store died with its host: say what is known
            pass
        lines = [f"process {p}: {text}" for p, text in sorted(others.items())]
        silent = sorted(set(range(self.world_size)) - {self.rank} - set(others))
        if silent:
            lines.append(f"no word from process {', '.join(map(str, silent))}: dead, silent or in another call")
        self.failed = f"{name} (call {self.call}) on process {self.rank} failed: {reason}; " + "; ".join(lines)
        return RuntimeError(self.failed)

    def leave(self, name: str, error: BaseException) -> None:
        """Tell the others that this process left a call in its middle (an interrupt). Returns at once."""
        if self.world_size > 1 and self.failed is None:
            self.failed = f"{name} (call {self.call}) on process {self.rank} was left by {error!r}"
            self._tell_failure(name, f"left by {error!r}")

    def _seen(self, processes: set[int]) -> dict[int, str]:
        """What other processes said of their failure, or of this very call."""
        found = {}
        for p in processes:
            if self._store.check([f"failed/{p}"]):
                said = json.loads(self._store.get(f"failed/{p}"))
                found[p] = f"failed in call {said['call']} ({said['name']}): {said['error']}"
            elif self._met < self.call and self._store.check([f"{self.call}/{p}"]):
                said = json.loads(self._store.get(f"{self.call}/{p}"))
                found[p] = f"is in {said['name']} {said['error'] or said['signature']}"
        return found

    def _tell_failure(self, name: str, error: str) -> None:
        """Say that this process has failed the group. It states nothing any more."""
        said = {"call": self.call, "name": name, "error": error[:300]}
        self._store.set(f"failed/{self.rank}", json.dumps(said))

    def _failed_before(self, processes: Sequence[int]) -> list[int]:
        """Those who have failed and said nothing of this call, so never will. (In this order: they state first.)"""
        said = [p for p in processes if self._store.check([f"failed/{p}"])]
        return [p for p in said if not self._store.check([f"{self.call}/{p}"])]

    def _state(self, name: str, signature: Signature, error: str | None, info: Any = None) -> None:
        statement = {"name": name, "signature": dict(signature), "error": error, "info": info}
        statement["refused"] = self.refused
        key = f"{self.call}/{self.rank}"
        self._store.set(key, json.dumps(statement, default=str))
        if key not in self._stated:
            self._stated.append(key)

    def _collect(self, name: str) -> list[dict[str, Any]]:
        """Everybody's statements of this call; raises when they disagree or one is missing at the deadline."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        found: dict[int, dict[str, Any]] = {}
        missing, pause = list(range(self.world_size)), 0.0002
        while missing:
            for p in missing:
                if self._store.check([f"{self.call}/{p}"]):
                    found[p] = json.loads(self._store.get(f"{self.call}/{p}"))
            missing = [p for p in missing if p not in found]
            if missing and not any(s["error"] for s in found.values()):  # an error is not waited for
                if time.monotonic() > deadline:
                    who, waited = ", ".join(map(str, missing)), self.timeout.total_seconds()
                    raise self.explain(name, TimeoutError(f"process {who} did not come within {waited:g} s"))
                if gone := self._failed_before(missing):
                    raise self.explain(name, RuntimeError(f"process {gone[0]} has failed before"))
                time.sleep(pause)  # polling: a wait in the store would hold up an error that another one states
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                break
        self._check_refused(name, found)
        message = compare(found)
        self.wary = message is not None
        if message is not None:
            self.refused += 1
            raise Disagreement(message)
        self._met = self.call
        # Whoever stated in this call had read all statements of earlier ones.
        for key in self._stated[:-1]:
            self._store.delete_key(key)
        del self._stated[:-1]
        return [found[p] for p in range(self.world_size)]

    def _check_refused(self, name: str, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Fail the group when a process has carried out a call that another one refused."""
        counts = {p: statement["refused"] for p, statement in sorted(found.items())}
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] != counts[least]:
            self.failed = f"{name}: process {most} has refused an earlier call that process {least} carried out"
            raise RuntimeError(f"{self.failed}; their transfers match no more, make a new group")
