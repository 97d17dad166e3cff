"""Finds out why a transfer does not end: the processes are out of step, or wait for each other in different groups.

Transfers that end soon pay nothing for it. A thread looks every ``TICK_S`` whether one still waits that waited at
its last look. Then the process publishes in the store what it is in (its last exchanges on every wire, and for whom it
waits) and reads what the others have published. Two findings are certain:

* Another process has another exchange under the same number on the same wire.
* Processes wait for each other in a circle, each for one that has not begun the exchange it is awaited in (and makes
  all its calls in one thread).

Whoever finds that closes the connections of the wire, which ends the waits of all its processes.

The interpreter does not begin to end before a look has: see :mod:`.store`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .store import LONGEST_EXIT_S, BoundedStore

if TYPE_CHECKING:
    from .tagged import TaggedWire

TICK_S = 0.2
LONGEST_PAUSE_S = 1.0  # between two looks at the same wait

_wires: WeakSet[TaggedWire] = WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_ending = threading.Event()


def _forget_thread() -> None:
    global _thread, _lock, _ending
    _thread, _lock, _ending = None, threading.Lock(), threading.Event()
    _wires.clear()


os.register_at_fork(after_in_child=_forget_thread)


@atexit.register
def _end() -> None:
    _ending.set()
    if (thread := _thread) is not None:
        thread.join(LONGEST_EXIT_S)


def add(wire: TaggedWire) -> None:
    """Watch the waits of a wire for as long as it exists."""
    global _thread
    with _lock:
        _wires.add(wire)
        if _thread is None:
            _thread = threading.Thread(target=_run, daemon=True, name="shardsum watch")
            _thread.start()


def _run() -> None:
    global _thread
    while not _ending.wait(TICK_S):
        with _lock:
            wires = [*_wires]
            if not wires:
                _thread = None
                return
        for wire in wires:
            with contextlib.suppress(Exception):  # the store is gone: the wait's own limit ends it, and says so
                wire.look()
        del wires, wire


class Board:
    """Where the processes of the program publish what they wait for.

    Args:
        store: common to all processes of the program.
        ranks: the global numbers of this group's processes.
        rank: this process's number in the group.
    """

    def __init__(self, store: BoundedStore, ranks: Sequence[int], rank: int) -> None:
        self._store, self.ranks, self.rank = store, tuple(ranks), rank
        self._circle: Any = None

    def publish(self) -> None:
        """Publish what this process does on all its wires."""
        with _lock:
            said = {}
            for wire in [*_wires]:
                said[wire.name] = state = wire.state()
                if state["waits"] is not None:
                    state["waits"][0] = wire.board.ranks[state["waits"][0]]
        self._store.set(str(self.ranks[self.rank]), json.dumps(said))

    def read(self, process: int) -> dict[str, Any]:
        """What a process (by its global number) has published."""
        said = self._store.get(str(process))
        return json.loads(said) if said is not None else {}

    def find(self, wire: TaggedWire) -> str | None:
        """What has gone wrong, for certain, in one sentence; None where nothing is known."""
        if (told := self.told(wire)) is not None:
            return told
        mine = {number: (stamp, call, text) for number, stamp, call, text in wire.state()["steps"]}
        for p, rank in enumerate(self.ranks):
            if p == self.rank:
                continue
            for number, stamp, call, text in self.read(rank).get(wire.name, {"steps": []})["steps"]:
                if number in mine and mine[number][:2] != (stamp, call):
                    sides = sorted([(self.rank, *mine[number][1:]), (p, call, text)])
                    told = ", ".join(f"process {q} is in {text} (call {call})" for q, call, text in sides)
                    return f"the processes are out of step: {told}; create a new group"
        return self._find_circle()

    def told(self, wire: TaggedWire) -> str | None:
        """What another process has found of the wire's current exchange."""
        if (said := self._store.get(f"circle/{self.ranks[self.rank]}")) is not None:
            name, number, text = json.loads(said)
            if (name, number) == (wire.name, wire.step.number):
                return text
        return None

    def _find_circle(self) -> str | None:
        """Processes that wait for each other in a circle, named when it is seen twice: one of the waits may just have
        ended the first time.

        What others have published may be old. It is still true in such a circle, for this reason. This process knows
        that it waits now. If it has not begun the exchange in which another process waits for it, that process waits
        still, and has published nothing since. So what is known of that one is true now, and of the next one, and so on
        until the circle closes.

        Two things prove nothing. A process that does not tell of a wire may have left the exchange, and the group, long
        ago. And where calls come from several threads, another thread may begin the exchange that is awaited.
        """
        me = self.ranks[self.rank]
        said: dict[int, dict[str, Any]] = {}
        waits: list[tuple[int, str, list[Any]]] = []
        process = me
        while process not in said:
            said[process] = self.read(process)
            waiting = [(name, state["waits"]) for name, state in said[process].items() if state["waits"]]
            if not waiting or any(state["threads"] for state in said[process].values()):
                self._circle = None
                return None
            waits.append((process, *waiting[0]))
            process = waiting[0][1][0]
        seen, self._circle = self._circle, [process, waits]
        begun = any(self._has_begun(said[wait[0]].get(name), wait[1]) for _, name, wait in waits)
        if process != me or begun or seen != self._circle:
            return None
        names = {name for _, name, _ in waits}
        told = [f"process {p} waits for process {wait[0]} in {wait[2]} (call {wait[3]})" for p, _, wait in waits]
        several = " of several groups" if len(names) > 1 else ""
        text = f"processes wait for each other in calls{several}, made in different orders: {'; '.join(told)}"
        for p, name, wait in waits:  # the others may not look before this one has gone
            if p != me:
                self._store.set(f"circle/{p}", json.dumps([name, wait[1], text]))
        return text

    @staticmethod
    def _has_begun(state: Any, number: int) -> bool:
        """Whether an exchange may have begun, by a process's state of that wire."""
        return state is None or (bool(state["steps"]) and state["steps"][-1][0] >= number)
