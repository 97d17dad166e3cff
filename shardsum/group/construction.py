"""Building a group: its arguments are checked and compared, then connections are made."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..core.checks import is_count
from ..core.layout import owners_of
from ..transports import TRANSPORTS
from ..transports import costs as cost_tables
from ..transports.domains import agree as agree_on_domains
from ..transports.domains import check as check_domains
from ..transports.domains import host
from ..transports.peer.inside import inside_domains
from ..transports.peer.memory import shares_gpus
from ..transports.peer.transport import PeerTransport
from ..transports.wire import abandoned_groups
from .agreement import Agreement
from .busy import refuse_at_exit
from .planner import Planner
from .routes import Router

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MAX_VIRTUAL_RANKS = 1 << 16  # plans list every virtual rank
_MAX_SECONDS = 10**8


def construct(
    num_virtual_ranks: int | None,
    group: dist.ProcessGroup | DeviceMesh | None,
    placement: str | Sequence[int],
    transport: str,
    domains: Sequence[int | str] | None,
    device: torch.device | str | None,
    check: str,
    timeout: float | timedelta | None,
    workspace_bytes: int | None,
    costs: str | os.PathLike[str] | Mapping[str, cost_tables.Costs] | None,
) -> tuple[Planner, dist.ProcessGroup | None]:
    """The planner of a :class:`~.group.CollectiveGroup` with these arguments, and its process group. Collective."""
    refuse_at_exit()
    pg = _process_group(group)
    rank, world_size = (0, 1) if pg is None else (dist.get_rank(pg), dist.get_world_size(pg))
    agreement = Agreement(pg, _timeout(pg, None))
    agreement.begin()
    try:
        limit = agreement.timeout = _timeout(pg, timeout)
        if check not in ("first", "always"):
            raise ValueError(f'check: expected "first" or "always", got {check!r}')
        agreement.check = check
        where = _device(pg, device)
        ranks = _count(num_virtual_ranks, pg, world_size)
        owners = owners_of(ranks, world_size, placement)
        _check_transport(transport, world_size)
        if workspace_bytes is not None and (not is_count(workspace_bytes) or workspace_bytes == 0):
            raise ValueError(f"workspace_bytes: expected a positive int, got {workspace_bytes!r}")
        if domains is not None:
            check_domains(domains, world_size)
        table = cost_tables.load(costs)
        agreement.load_native()
    except Exception as error:
        raise agreement.refuse("ShardGroup", error) from error
    signature: dict[str, Any] = {"num_virtual_ranks": ranks, "placement": list(owners), "transport": transport}
    signature |= {"check": check, "device": where.type, "costs": repr(table), "workspace_bytes": workspace_bytes}
    signature["domains"] = None if domains is None else list(domains)
    here = [host(), _gpu(where), _why_abandoned(pg, where)]
    places = [said["info"] for said in agreement.agree("ShardGroup", signature, info=here)] or [here]
    refuse_shared_gpu([gpu for _, gpu, _ in places])
    _refuse_abandoned([reason for _, _, reason in places])
    hosts = [name for name, _, _ in places]
    agreed = agree_on_domains(hosts if domains is None else domains, hosts)
    wire, peers = agreement.connect(max(map(owners.count, range(world_size))) + 1, where), None
    if pg is not None and wire is not None and (transport == "peer" or (transport == "auto" and where.type == "cuda")):
        peers = PeerTransport(
            pg, owners, where, timeout=limit.total_seconds(), workspace_bytes=workspace_bytes,
            gather=agreement.gather_objects,
        )  # fmt: skip
        if transport == "peer" and peers.reason is not None:
            raise ValueError(f'transport: "peer" cannot be used: {peers.reason}')
    inside: PeerTransport | None = None
    missing: str | None = None
    carries = transport == "carry" or (transport == "auto" and peers is not None and peers.reason is not None)
    folds = carries and where.type == "cuda" and 1 < agreed.count < world_size
    if pg is not None and folds:
        gather = agreement.gather_objects
        inside, missing = inside_domains(
            pg, gather, agreement.side.store, agreement.side.name, agreed, owners, where, limit.total_seconds(),
            workspace_bytes,
        )  # fmt: skip
    router = Router(agreed, transport, table, peers, inside=folds and missing is None, not_inside=missing)
    return Planner(owners, rank, wire, router, agreement, inside, where), pg


def _process_group(group: Any) -> dist.ProcessGroup | None:
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


def _device(pg: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
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


def _timeout(pg: dist.ProcessGroup | None, timeout: float | timedelta | None) -> timedelta:
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


def _count(value: int | None, pg: dist.ProcessGroup | None, world_size: int) -> int:
    """The number of virtual ranks."""
    if value is None:
        if pg is None:
            raise ValueError("num_virtual_ranks: a lone process cannot guess R; pass it, for example ShardGroup(4)")
        return world_size
    if not is_count(value) or not 1 <= value <= _MAX_VIRTUAL_RANKS:
        raise ValueError(f"num_virtual_ranks: expected an int between 1 and {_MAX_VIRTUAL_RANKS}, got {value!r}")
    return int(value)


def _check_transport(transport: str, world_size: int) -> None:
    names = ["auto", *TRANSPORTS, "carry", "peer"]
    if transport not in names:
        raise ValueError(f"transport: expected one of {names}, got {transport!r}")
    if world_size > 1 and transport == "local":
        raise ValueError(f'transport: "local" is for one process, the group has {world_size}')


def _gpu(device: torch.device) -> list[str] | None:
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


def _why_abandoned(pg: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the process group must not be used for data any more; None where it may. (On the CPU none moves over it.)"""
    return None if pg is None or device.type == "cpu" else abandoned_groups.get(pg)


def _refuse_abandoned(reasons: list[str | None]) -> None:
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(
                f"a transfer on this process group was abandoned on process {process} and may still stand there; make "
                f"a new process group (torch.distributed.new_group) for a new ShardGroup. {reason}"
            )
