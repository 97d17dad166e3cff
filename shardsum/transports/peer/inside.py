"""Peer memory inside each domain of a group whose processes cannot all map each other's."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..domains import Domains
from ..store import BoundedStore
from .members import Members, gather_in
from .memory import Gather
from .transport import PeerTransport

#: The processes of this process's domain, by the whole group and their numbers in it. Groups on them share a workspace.
_members: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Members]] = WeakKeyDictionary()


def inside_domains(
    group: dist.ProcessGroup,
    gather: Gather,
    store: BoundedStore,
    name: str,
    domains: Domains,
    owners: Sequence[int],
    device: torch.device,
    timeout: float,
    workspace_bytes: int | None,
) -> tuple[PeerTransport | None, str | None]:
    """The peer transport of this process's domain; collective in ``group``. Arguments as of
    :class:`.transport.PeerTransport`.

    Args:
        store, name: a part that the processes of ``group`` have for this call alone, and its name.

    Returns:
        It (None where the process is alone in its domain), and why some domain of several processes has none: the same
        on all processes. None: all have one.
    """
    rank = dist.get_rank(group)
    numbers = domains.members[domains.of[rank]]
    known = _members.setdefault(group, {}).get(numbers)
    names = gather(None if known is None else known.name)
    peers = None
    if len(numbers) > 1:
        part, mine, count = store.under(f"inside/{numbers[0]}"), numbers.index(rank), len(numbers)
        if known is None or {names[p] for p in numbers} != {known.name}:
            known = _members[group][numbers] = Members(part, f"shardsum-{name}-{numbers[0]}", mine, count)
        local = tuple(numbers.index(owner) for owner in owners if owner in numbers)
        meet = gather_in(part.under("gather"), mine, count, timeout)
        peers = PeerTransport(known, local, device, timeout=timeout, workspace_bytes=workspace_bytes, gather=meet)
    reasons = gather(None if peers is None else peers.reason)
    reason = next((f"process {p}: {why}" for p, why in enumerate(reasons) if why is not None), None)
    return (None if reason is not None else peers), reason
