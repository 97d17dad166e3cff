"""What a ShardGroup is made of: its process group, device, timeout, and what may not be combined."""

from __future__ import annotations

import operator
import os
import socket
from datetime import timedelta
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from ..core.checks import is_count
from ..transports import TRANSPORTS
from ..transports.peer.memory import shares_gpus
from ..transports.wire import abandoned_groups

MAX_VIRTUAL_RANKS = 1 << 16  # plans list every virtual rank
_MAX_SECONDS = 10**8


def process_group(group: Any) -> dist.ProcessGroup | None:
    if group is not None:
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise ValueError(f'group: a DeviceMesh of {group.ndim} dimensions; pass one dimension, as mesh["sp"]')
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise ValueError("group: this process is not a member; construct the ShardGroup on its members only")
        return group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before ShardGroup()"
        )
    return None


def device(pg: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device: {device!r} is not a valid device: {error}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: {device}, but torch finds no CUDA device")
    elif pg is not None and torch.cuda.is_available() and _has_cuda_backend(pg):
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _has_cuda_backend(pg: dist.ProcessGroup) -> bool:
    """Whether a backend other than gloo serves CUDA (gloo registers for CUDA, too, but alone it means CPUs)."""
    cuda = [d for d in pg._device_types if d.type == "cuda"]
    return any(pg._get_backend(d).name() != "gloo" for d in cuda)


def timeout(pg: dist.ProcessGroup | None, timeout: float | timedelta | None) -> timedelta:
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, Real) or isinstance(seconds, bool) or not 0 < seconds <= _MAX_SECONDS:
            raise ValueError(f"timeout: expected seconds between 0 and {_MAX_SECONDS} or a timedelta, got {timeout!r}")
        return timedelta(seconds=float(seconds))
    if pg is not None:
        for device in pg._device_types:
            limit = getattr(getattr(pg._get_backend(device), "options", None), "_timeout", None)
            if limit is not None:
                return limit
    return timedelta(minutes=10)


def num_virtual_ranks(value: int | None, pg: dist.ProcessGroup | None, world_size: int) -> int:
    if value is None:
        if pg is None:
            raise ValueError("num_virtual_ranks: a lone process cannot guess R; pass it, for example ShardGroup(4)")
        return world_size
    try:
        count = operator.index(value) if not isinstance(value, bool) else 0
    except TypeError:
        count = 0
    if not 1 <= count <= MAX_VIRTUAL_RANKS:
        raise ValueError(f"num_virtual_ranks: expected an int between 1 and {MAX_VIRTUAL_RANKS}, got {value!r}")
    return count


def check_mode(check: str) -> str:
    if check not in ("first", "always"):
        raise ValueError(f'check: expected "first" or "always", got {check!r}')
    return check


def check_transport(transport: str, world_size: int) -> None:
    names = ["auto", *TRANSPORTS, "carry", "peer"]
    if transport not in names:
        raise ValueError(f"transport: expected one of {names}, got {transport!r}")
    if world_size > 1 and transport == "local":
        raise ValueError(f'transport: "local" is for one process, the group has {world_size}')


def check_workspace(workspace_bytes: int | None) -> None:
    if workspace_bytes is not None and (not is_count(workspace_bytes) or workspace_bytes == 0):
        raise ValueError(f"workspace_bytes: expected a positive int, got {workspace_bytes!r}")


def gpu(device: torch.device) -> list[str] | None:
    """Host name and GPU, to notice two processes on one."""
    if device.type != "cuda" or shares_gpus():
        return None
    return [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]


def refuse_shared_gpu(gpus: list[Any]) -> None:
    seen: dict[tuple[str, ...], int] = {}
    for process, gpu in enumerate(gpus):
        if gpu is None:
            continue
        other = seen.setdefault(tuple(gpu), process)
        if other != process:
            raise ValueError(
                f"processes {other} and {process} use the same GPU {gpu[1]} of {gpu[0]}; NCCL refuses that. "
                "Host several virtual ranks in one process instead: ShardGroup(num_virtual_ranks=R), one process a GPU"
            )


def abandoned(pg: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the process group must not be used for data any more; None where it may. (On the CPU none moves over it.)"""
    return None if pg is None or device.type == "cpu" else abandoned_groups.get(pg)


def refuse_abandoned(reasons: list[str | None]) -> None:
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(
                f"a transfer on this process group was abandoned on process {process} and may still stand there; make "
                f"a new process group (torch.distributed.new_group) for a new ShardGroup. {reason}"
            )
