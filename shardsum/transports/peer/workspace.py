"""The peer memory of a process group: one, shared by all its ShardGroups.

A workspace is the symmetric block of every process, the launch counter that goes with it, and what orders its calls on
the host, across streams and groups. Why sharing it is sound: docs/engineering/peer.md, "Memory and life". A wait that
ended without its peer fails the workspace, hence all groups on it. Its memory is kept as long as the process lives, as
a peer may still write there.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch

from .layout import Regions
from .members import Group
from .memory import Gather, SymmetricMemory
from .prepared import Addresses

_BACKWARD = 1 << 31  # in the number of a call
_DIFFERS = 2  # FailureKind in csrc/peer/call.h

#: By process group and device; an entry goes with its process group, or when its last user releases it.
_workspaces: WeakKeyDictionary[Group, dict[torch.device, Workspace]] = WeakKeyDictionary()
#: Those that failed.
_kept: list[Workspace] = []


class Workspace:
    """Make one by :meth:`acquire`.

    Attributes:
        regions: what it is made of; the first group that uses it decides.
        addresses: for the words of plans.
        users: how many have acquired it and not released it.
    """

    def __init__(self, group: Group, device: torch.device, regions: Regions, gather: Gather) -> None:
        self.regions, self.users = regions, 0
        self._rank, self._group, self._device = group.rank(), ref(group), device
        self._memory = SymmetricMemory(regions.total_bytes, group, device, gather)
        self._memory.local[regions.inbox_at :].fill_(255)  # empty words: csrc/peer/words.cuh
        self._control = torch.zeros(4, dtype=torch.int32, device=device)
        self._failure = torch.zeros(9, dtype=torch.int64, device="cpu").pin_memory()
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        for event in self._events:
            event.record(torch.cuda.current_stream(device))  # the handle exists from the first record on
        handles = [event.cuda_event for event in self._events]
        self._host = torch.tensor([*handles, -1, 0, 0, 0], device="cpu")  # PeerHost
        torch.cuda.synchronize(device)
        self.addresses = Addresses(
            tuple(self._memory.addresses), *(x.data_ptr() for x in (self._host, self._control, self._failure))
        )
        gather(None)  # nobody writes before all inboxes are empty

    @staticmethod
    def acquire(group: Group, device: torch.device, choose: Callable[[], Regions], gather: Gather) -> Workspace:
        """The workspace of these processes; made, of the regions that ``choose()`` says, if there is none. Collective.

        Raises:
            RuntimeError: it has failed; or memory cannot be mapped.
        """
        found = _workspaces.setdefault(group, {}).get(device)
        states = gather("none" if found is None else "failed" if found.has_failed else "good")
        if "failed" in states:
            raise RuntimeError(
                f"the peer memory of these processes has failed (process {states.index('failed')} says so): create a "
                "new process group"
            )
        if len(set(states)) > 1:
            raise RuntimeError(f"peer memory: processes are out of step: {states} of it, by process")
        if found is None:
            found = _workspaces[group][device] = Workspace(group, device, choose(), gather)
        found.users += 1
        return found

    def release(self, gather: Gather) -> None:
        """Give it back; the last user frees it, once all processes have come here. Collective."""
        self.users -= 1
        torch.cuda.synchronize(self._device)
        if self.users > 0 or self._keep_failed():
            return
        gather(None)
        if (group := self._group()) is not None:
            _workspaces[group].pop(self._device, None)
        del self._memory

    @property
    def has_failed(self) -> bool:
        return int(self._failure[0]) != 0

    def _keep_failed(self) -> bool:
        if self.has_failed and self not in _kept:
            _kept.append(self)
        return self.has_failed

    def check(self, timeout: float) -> None:
        """Raise RuntimeError when it has failed; the message names process, block and launch. ``timeout``: seconds
        that a call waits."""
        if not self._keep_failed():
            return
        kind, process, block, epoch, reporter, *calls = self._failure.tolist()
        mine = reporter == self._rank
        found = "this process" if mine else f"process {reporter}"
        where = f"in block {block} of launch {epoch}"
        after = "Results of that launch and later ones are invalid (NaN); create a new process group"
        if kind == _DIFFERS:
            raise RuntimeError(
                f"peer transport: processes are out of step: {found} found process {process} in another call {where}"
                f"{_different(*calls) if mine else ''}. {after}"
            )
        raise RuntimeError(
            f"peer transport: process {process} did not come within {timeout:g} s: {found} waited for it {where}. "
            f"{after}"
        )


def number_of(call: int, origin: int) -> int:
    """What a launch carries (32 bits) as the number of a call; ``origin``: of the one whose backward it is, or that it
    repeats in a backward pass; 0 for neither."""
    return call & _BACKWARD - 1 if not origin else _BACKWARD | (origin & 0x7FFF) << 16 | call & 0xFFFF


def _said(number: int) -> str:
    if not number & _BACKWARD:
        return f"call {number} of the group"
    return f"call {number & 0xFFFF} (in a backward pass, for call {number >> 16 & 0x7FFF}) of the group"


def _different(number: int, signature: int, their_number: int, their_signature: int) -> str:
    if number == their_number:
        return f" ({_said(number)} has other arguments there)"
    return f" ({_said(number)} here, {_said(their_number).removesuffix(' of the group')} there)"
