"""Building a group: its arguments are checked and compared, then connections are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.layout import owners_of
from ..transports import Wire
from ..transports import costs as cost_tables
from ..transports.domains import Domains, host
from ..transports.domains import agree as agree_on_domains
from ..transports.domains import check as check_domains
from ..transports.peer.inside import inside_domains
from ..transports.peer.transport import PeerTransport
from . import membership
from .agreement import Agreement
from .busy import refuse_at_exit
from .executor import Executor
from .planner import Planner
from .routes import Router

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Built(NamedTuple):
    """``group`` is None for a lone process, and so is ``wire``; ``domains`` say which processes share fast links."""

    planner: Planner
    group: dist.ProcessGroup | None
    domains: Domains
    wire: Wire | None


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
) -> Built:
    """What :class:`~.group.CollectiveGroup` is made of; its arguments. Collective."""
    refuse_at_exit()
    pg = membership.process_group(group)
    rank, world_size = (0, 1) if pg is None else (dist.get_rank(pg), dist.get_world_size(pg))
    agreement = Agreement(pg, membership.timeout(pg, None))
    agreement.begin()
    try:
        limit = agreement.timeout = membership.timeout(pg, timeout)
        agreement.check = membership.check_mode(check)
        where = membership.device(pg, device)
        ranks = membership.num_virtual_ranks(num_virtual_ranks, pg, world_size)
        owners = owners_of(ranks, world_size, placement)
        membership.check_transport(transport, world_size)
        membership.check_workspace(workspace_bytes)
        if domains is not None:
            check_domains(domains, world_size)
        table = cost_tables.load(costs)
        agreement.load_native()
    except Exception as error:
        raise agreement.refuse("ShardGroup", error) from error
    signature: dict[str, Any] = {"num_virtual_ranks": ranks, "placement": list(owners), "transport": transport}
    signature |= {"check": check, "device": where.type, "costs": repr(table), "workspace_bytes": workspace_bytes}
    signature["domains"] = None if domains is None else list(domains)
    here = [host(), membership.gpu(where), membership.abandoned(pg, where)]
    places = agreement.agree("ShardGroup", signature, here)
    membership.refuse_shared_gpu([gpu for _, gpu, _ in places])
    membership.refuse_abandoned([reason for _, _, reason in places])
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
    executor = Executor(owners, rank, wire, router, agreement, peers, inside)
    return Built(Planner(executor, agreement, where), pg, agreed, wire)
