"""Symmetric memory between GPUs of one NVLink domain: whether it can be had, its allocation, and a check of it.

Built on torch.distributed._symmetric_memory (CUDA backend): each process allocates a block and maps its peers' blocks.
What takes a ``gather`` is collective. ``gather(value)`` returns all processes' values of a small object, in process
order; it doubles as the barrier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...native import loader as native
from ..domains import host
from .members import Group, Members

Gather = Callable[[Any], list[Any]]
_TEST_WORDS = 512


def gather_objects(group: Group) -> Gather:
    """The default ``gather``: torch.distributed's own. :class:`Members` have none: who makes them brings one."""
    assert not isinstance(group, Members)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def shares_gpus() -> bool:
    """Several processes may use one GPU (a test mode of torch's symmetric memory; every wait takes milliseconds)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def available(group: Group, device: torch.device, gather: Gather) -> str | None:
    """Why the processes of ``group`` cannot read each other's memory from a kernel, or None; the same on all."""
    places = gather(_place(device))
    for process, place in enumerate(places):
        if isinstance(place, str):
            return f"process {process}: {place}"
    if len(places) < 2:
        return "one process has no peers"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    mine, reads = places[group.rank()], torch.cuda.can_device_access_peer
    verdicts = gather(unreachable(mine, places, visible, shares_gpus(), reads))
    return next((f"process {process}: {verdict}" for process, verdict in enumerate(verdicts) if verdict), None)


def _place(device: torch.device) -> list[str] | str:
    """Where this process computes: host and GPU; or why it cannot take part."""
    if device.type != "cuda":
        return f"shards live on {device.type}, not on CUDA"
    if not native.status().has_cuda:
        return f"no native CUDA library ({native.status().reason})"
    return [host(), str(torch.cuda.get_device_properties(device).uuid)]


def unreachable(
    mine: list[str],
    places: list[list[str]],
    visible: dict[str, int],
    may_share: bool,
    can_access: Callable[[int, int], bool],
) -> str | None:
    """What keeps a process at ``mine`` from reading the memory of those at ``places``. Pure."""
    for process, (where, gpu) in enumerate(places):
        if where != mine[0]:
            return f"process {process} is on another host ({where.split('|')[0]})"
        if gpu not in visible:
            return f"the GPU of process {process} is hidden from it by CUDA_VISIBLE_DEVICES"
        a, b = visible[mine[1]], visible[gpu]
        if a != b and not can_access(a, b):
            return f"cuda:{a} has no peer access to cuda:{b} of process {process}"
    gpus = [gpu for _, gpu in places]
    if len(set(gpus)) < len(gpus) and not may_share:
        return "several processes use one GPU"
    return None


class SymmetricMemory:
    """Zeroed bytes on every process, mapped by all others.

    Attributes:
        local: this process's block, uint8.
        addresses: of every process's block, as mapped here.
        made: how many this process has made. torch numbers the messages by which processes find each other over all of
            them, whoever took part: processes with other numbers would wait for each other until its time-out.
    """

    made: ClassVar[int] = 0

    def __init__(self, num_bytes: int, group: Group, device: torch.device, gather: Gather) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        rank, world_size = group.rank(), group.size()
        sizes, made = zip(*gather((num_bytes, SymmetricMemory.made)))
        if len(set(sizes)) > 1:
            raise ValueError(f"symmetric memory: processes ask for different sizes: {list(sizes)} bytes")
        if len(set(made)) > 1:
            raise RuntimeError(
                f"symmetric memory: these processes have made {list(made)} blocks before, and torch can only pair "
                "processes that have made as many; make groups and domains in which all take part first"
            )
        SymmetricMemory.made += 1
        # Not symmetric.empty: that may cut a tensor out of a pool, at an offset that differs between processes.
        self.local = symmetric._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self.local.zero_()
        torch.cuda.synchronize(device)
        if isinstance(group, Members):
            group.register()
            self._handle = symmetric._SymmetricMemory.rendezvous(self.local, group.name)
        else:
            self._handle = symmetric.rendezvous(self.local, group)
        views = [self._handle.get_buffer(g, (num_bytes,), torch.uint8) for g in range(world_size)]
        self.addresses = [view.data_ptr() for view in views]
        wrong = self._test(views, rank, device, gather)
        if self.addresses[rank] != self.local.data_ptr():
            wrong = f"process {rank} finds its own block elsewhere"
        errors = [w for w in gather(wrong) if w]
        if errors:
            raise RuntimeError(f"symmetric memory: {errors[0]}")
        self.local.zero_()
        torch.cuda.synchronize(device)
        gather(None)  # nobody writes before all blocks are zero

    def _test(self, views: list[Tensor], rank: int, device: torch.device, gather: Gather) -> str | None:
        """Every process must find in its peers' memory what they wrote there: a pattern of their own."""
        words = min(_TEST_WORDS, self.local.numel() // 8)
        count = torch.arange(words, device="cpu")
        salt = int.from_bytes(os.urandom(5), "little") << 16
        self.local[: words * 8].view(torch.int64).copy_(count + salt)
        torch.cuda.synchronize(device)
        wrong = None
        for process, theirs in enumerate(gather(salt)):
            seen = views[process][: words * 8].view(torch.int64).cpu()
            if not torch.equal(seen, count + theirs):
                wrong = f"process {rank} does not find in process {process}'s memory what that wrote"
        gather(None)  # all have read
        return wrong
