"""How the processes of one ShardGroup reach each other beside their data: a part of the store, and a gloo group.

Both belong to one construction of one ShardGroup alone. The processes of a construction find each other by tokens
(:func:`meet`), not by counting: so a process that missed one is in step again at the next. The gloo group is not
registered with torch.distributed: a registered group's name depends on which others a process is in, which differs
between processes, and its threads and sockets would outlive the ShardGroup.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _get_process_group_name

from ..core.log import log
from ..transports import Stamp, TaggedWire, stamp
from ..transports.stamps import Step
from ..transports.store import BoundedStore, StoreGone, within
from ..transports.watch import Board

LONGEST_PAUSE_S = 0.02
_BEAT_S = 1.0
_BEATS_MISSED = 5


class SideChannel:
    """Of the processes of ``group`` in one construction.

    Attributes:
        store: this construction's part of the store, once they have met.
        wire: moves tensors of the CPU between them, once they are connected.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        root = BoundedStore.clone(_get_default_store(), timeout.total_seconds()).under("shardsum")
        # Threads may construct groups over several process groups of the same processes at once: their names tell them
        # apart. A number is the same on all processes; other names (of split groups) need not be.
        name = _get_process_group_name(group)
        self._members = root.under("-".join(map(str, self.ranks)) + (f"/{name}" if name.isdigit() else ""))
        self.board = Board(root.under("at"), self.ranks, self.rank)
        self.name = ""
        self.store = root
        self.wire: TaggedWire

    def meet(self, seconds: float) -> None:
        """Find the other processes of this construction. RuntimeError naming who has not come within ``seconds``."""
        root = self._members
        root.limit = seconds
        if self.rank == 0:
            self.name = self._gather_all(root, _Patience(root, seconds))
        else:
            self.name = self._find_first(root, _Patience(root, seconds, 1.0))  # process 0 knows better who is missing
        self.store = root.under(self.name)

    def _gather_all(self, root: BoundedStore, patience: _Patience) -> str:
        """Process 0: make a name, and offer it to the construction that each other process is in now."""
        name, others, pause = secrets.token_hex(8), range(1, self.world_size), 0.0002
        tokens: dict[int, str] = {}
        while True:
            for p in others:
                token, known = root.get(f"want/{p}"), tokens.get(p)
                if not token or token == known or (known and root.check(f"took/{known}")):
                    continue  # who took the name may be in its next construction already
                if known:  # of a construction that was given up, or is long done
                    root.delete(f"offer/{known}")
                tokens[p] = token
            absent = [p for p in others if p not in tokens]
            if not absent:
                for token in tokens.values():
                    root.set(f"offer/{token}", name)
                absent = [p for p in others if not root.check(f"took/{tokens[p]}")]
            if not absent:
                break
            if not patience(absent):
                who = ", ".join(map(str, absent))
                error = RuntimeError(f"ShardGroup: process {who} did not come within {patience.seconds:g} s")
                for token in tokens.values():
                    root.set(f"offer/{token}", f"!{error}")
                raise error
            pause = _sleep(pause)
        for token in tokens.values():
            root.delete(f"offer/{token}")
            root.delete(f"took/{token}")
        return name

    def _find_first(self, root: BoundedStore, patience: _Patience) -> str:
        """Any other process: say that it is here, and take the name that process 0 offers."""
        token, pause = secrets.token_hex(8), 0.0002
        root.set(f"want/{self.rank}", token)
        while (name := root.get(f"offer/{token}")) is None:
            if not patience(range(self.world_size)):
                root.set(f"want/{self.rank}", "")  # not deleted: a store's client waits for a key that is gone
                raise RuntimeError(f"ShardGroup: process 0 did not come within {patience.seconds:g} s")
            pause = _sleep(pause)
        if name.startswith("!"):
            raise RuntimeError(name[1:])
        root.set(f"took/{token}", "")
        return name

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Let the others wait for this process for as long as ``what`` takes, whatever their timeout."""
        done, key = threading.Event(), f"busy/{self.rank}"
        self._members.set(key, "0")

        def beat() -> None:
            count = 0
            while not done.wait(_BEAT_S):
                count += 1
                if count == 2:
                    log.warning("process %d: %s; the other processes wait for it", self.rank, what)
                with contextlib.suppress(StoreGone):
                    self._members.set(key, str(count))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._members.delete(key)

    def connect(
        self, timeout: timedelta, elsewhere: Callable[[Step], str | None], condemn: Callable[[Step, str], None]
    ) -> None:
        """Make the gloo group. Called once the processes have agreed that they construct the same ShardGroup."""

        def make() -> dist.ProcessGroupGloo:
            store = dist.PrefixStore("gloo", self.store.raw())
            group: Any = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
            group.barrier().wait()  # who leaves while another one still connects breaks that one's set-up
            return group

        try:
            group = within(timeout.total_seconds() + 1, make, alone=True)
        except TimeoutError:
            raise RuntimeError(f"no connection with every process within {timeout.total_seconds():g} s") from None
        self.wire = TaggedWire(group, timeout, self.name, self.board, elsewhere, condemn)

    def gather_objects(self, value: Any, call: int) -> list[Any]:
        """Every process's ``value`` (small, picklable), by process. No process returns before all have called."""
        data = pickle.dumps(value)
        sizes = [row[0] for row in self.gather_rows("set-up", [len(data)], call)]
        longest = -(-max(sizes) // 8)
        words = torch.frombuffer(bytearray(data.ljust(8 * longest, b"\0")), dtype=torch.int64)
        rows = self._gather(stamp("set-up", {"words": longest}), words, call)
        return [pickle.loads(row.numpy().tobytes()[:n]) for row, n in zip(rows, sizes)]

    def gather_rows(self, name: str, row: Sequence[int], call: int) -> list[list[int]]:
        """All processes' rows of ints, of one length. OutOfStep where another process is elsewhere."""
        said = stamp("row counts", {"values": len(row)})
        mine = torch.tensor(row, dtype=torch.int64, device="cpu")
        return [r.tolist() for r in self._gather(Stamp(said.hash, f"{name}, gathering row counts"), mine, call)]

    def _gather(self, what: Stamp, mine: torch.Tensor, call: int) -> Sequence[torch.Tensor]:
        everyone = torch.empty(self.world_size * mine.numel(), dtype=mine.dtype, device="cpu")
        self.wire.begin(what, call)
        self.wire.wait(self.wire.all_gather(everyone, mine), mine.device)
        return everyone.view(self.world_size, -1).unbind(0)


class _Patience:
    """Whether to go on waiting for processes: until the deadline, and while one of them is busy."""

    def __init__(self, store: BoundedStore, seconds: float, more: float = 0.0) -> None:
        self._store, self.seconds = store, seconds
        self._deadline = time.monotonic() + seconds + more
        self._beats: dict[int, str] = {}

    def __call__(self, processes: Iterable[int]) -> bool:
        now = time.monotonic()
        if now < self._deadline:
            return True
        for p in processes:
            beat = self._store.get(f"busy/{p}")
            if beat is not None and beat != self._beats.get(p):
                self._beats[p] = beat
                self._deadline = now + _BEATS_MISSED * _BEAT_S
        return now < self._deadline


def _sleep(pause: float) -> float:
    time.sleep(pause)
    return min(2 * pause, LONGEST_PAUSE_S)
