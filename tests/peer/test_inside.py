"""How processes of one domain find each other, on the CPU. What they do with their memory: tests/gpu."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum.group.side_channel import SideChannel
from shardsum.transports import domains
from shardsum.transports.peer import inside
from tests.processes import run_processes


class Made:
    """In place of a domain's peer transport: what it was made of."""

    reason = None

    def __init__(self, group: Any, owners: Any, device: Any, *, gather: Any, **options: Any) -> None:
        self.group, self.gather, self.owners = group, gather, owners


def constructed(group: dist.ProcessGroup, timeout: float) -> Made:
    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * 4
        dist.all_gather_object(values, value)
        return values

    side = SideChannel(group, timedelta(seconds=30))
    side.meet(30)
    where, owners = domains.agree(["a", "b", "a", "b"]), (0, 1, 2, 3, 2)
    peers, reason = inside.inside_domains(
        group, gather, side.store, side.name, where, owners, torch.device("cpu"), timeout, None
    )
    assert isinstance(peers, Made) and reason is None
    return peers


def groups_of_one_domain(rank: int, world_size: int) -> None:
    inside.PeerTransport = Made  # type: ignore[assignment, misc]
    group, index = dist.group.WORLD, rank // 2
    assert group is not None
    first, second = constructed(group, 30), constructed(group, 0.2)
    assert first.group is second.group and (first.group.rank(), first.group.size()) == (index, 2)
    assert first.owners == ((0, 1) if rank % 2 else (0, 1, 1))
    assert first.gather(rank) == second.gather(rank) == [rank % 2, rank % 2 + 2]
    if index == 0:  # the other one does not come
        with pytest.raises(RuntimeError, match=r"member 1 of this domain did not come within 0\.2 s"):
            second.gather(rank)
    dist.barrier()
    assert first.gather(str(rank)) == [str(rank % 2), str(rank % 2 + 2)]  # nor is this one out of step now


def test_groups_share_what_names_a_domain_and_nothing_else() -> None:
    run_processes(groups_of_one_domain, 4)
