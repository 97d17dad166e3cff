"""CollectiveGroup: R virtual ranks on the G processes of a torch.distributed group, and the collectives between them.

``rank`` and ``world_size`` always mean processes. G = 1 without a launcher is the emulation of all R ranks in one
process; G = R is one rank a process; anything between hosts several ranks a process. The result of a collective
depends on the shards and on R, never on G, the placement, the transport or the device.

Common to all collectives (every process makes the same calls in the same order, from one thread, over all ShardGroups
that share a ProcessGroup):

shards    one Tensor ``(length, *F)`` when this process hosts one virtual rank, else a list in increasing virtual-rank
          order; padded Tensors ``(S_MAX, *F)``, or one ``(k, S_MAX, *F)`` for k hosted ranks, with ``lengths``.
lengths   (a) R ints, equal on all processes: nothing else travels.
          (b) None: the shards' row counts; every call begins with one small all_gather on the host.
          (c) an integer Tensor of the hosted ranks' lengths on the shards' device, with padded shards and ``size``:
          never read by the host; values are clamped to [0, S_MAX].
size      positions of the result; equal on all processes. Default: the largest length.
grad      what autograd does with a result that every process gets. "identity": every process computes the common
          loss from it once. "sum": each process's loss is its own part, cotangents are added in process order.
async_op  return a :class:`Handle`; not with inputs that require grad.

Equal on all processes are the collective, size, op, scale, out_dtype, grad, splits, intervals, lengths of form (a), and
the shards' dtype, trailing shape ``*F`` and (where the backward is a collective) whether they require grad. A process's
own are its shards, lengths of forms (b) and (c), ``out`` and ``async_op``.

Errors: bad input is a ValueError with the same sentence on every process, before data moves (at the first use of a
signature, or always with ``check="always"``); where several processes pass bad input, each of them names its own. A
process that dies or does not come is a RuntimeError within the timeout that names it; the group cannot be used
afterwards, nor where some processes passed lengths of form (b) and others did not (a ValueError all the same).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ..core.layout import owners_of
from ..core.words import Check, Placement, TransportName
from ..transports import costs as cost_tables
from ..transports.domains import agree as agree_on_domains
from ..transports.domains import check as check_domains
from ..transports.domains import host
from ..transports.peer.peers import Peers
from . import membership
from .agreement import Agreement
from .collectives import Options
from .executor import Executor
from .explain import Explanation, Stats
from .methods import Collectives
from .planner import Planner
from .routes import Router

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class CollectiveGroup(Collectives):
    """R virtual ranks on the processes of ``group``. The constructor is collective.

    Args:
        num_virtual_ranks: R, at least the number of processes. Default: one a process.
        group: a ProcessGroup or a one-dimensional DeviceMesh (``mesh["sp"]``). Default: the world's group when
            torch.distributed is initialised, else this process alone.
        placement: "contiguous", "zigzag", or the owning process of every virtual rank
            (:func:`shardsum.core.layout.owners_of`).
        transport: "auto", or "gather", "all_to_all", "carry" or "peer" to force it ("local" is a lone process's).
        domains: which processes share fast links: a name (an int or a str) for every process. Default: its host.
        device: where shards live. Default: the group's CUDA device if it has one, else the CPU; a lone process takes
            shards on any device.
        check: "first" compares arguments across processes once a signature, "always" on every call.
        timeout: seconds or timedelta to wait for other processes. Default: the group's.
        costs: the table or file for "auto" (:mod:`shardsum.transports.costs`).

    Raises:
        ValueError: an argument is malformed, or processes disagree; the same sentence on every process.
        RuntimeError: WORLD_SIZE says that there are other processes, but torch.distributed is not initialised.

    Example:
        >>> group = ShardGroup(3)
        >>> group.all_reduce([torch.tensor([10, 11, 12]), torch.tensor([20, 21]), torch.tensor([40])])
        tensor([70, 32, 12])
    """

    def __init__(
        self,
        num_virtual_ranks: int | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        placement: Placement | Sequence[int] = "contiguous",
        transport: TransportName = "auto",
        domains: Sequence[int | str] | None = None,
        device: torch.device | str | None = None,
        check: Check = "first",
        timeout: float | timedelta | None = None,
        costs: str | os.PathLike[str] | Mapping[str, cost_tables.Costs] | None = None,
    ) -> None:
        pg = membership.process_group(group)
        self.group = pg
        self.rank, self.world_size = (0, 1) if pg is None else (dist.get_rank(pg), dist.get_world_size(pg))
        self._agreement = Agreement(pg, membership.timeout(pg, None))
        self._agreement.begin()
        try:
            limit = self._agreement.timeout = membership.timeout(pg, timeout)
            self._agreement.check = membership.check_mode(check)
            self.device = membership.device(pg, device)
            self.num_virtual_ranks = membership.num_virtual_ranks(num_virtual_ranks, pg, self.world_size)
            self.owners = owners_of(self.num_virtual_ranks, self.world_size, placement)
            membership.check_transport(transport, self.world_size)
            if domains is not None:
                check_domains(domains, self.world_size)
            table = cost_tables.load(costs)
            self._agreement.load_native()
        except Exception as error:
            raise self._agreement.refuse("ShardGroup", error) from error
        signature: dict[str, Any] = {"num_virtual_ranks": self.num_virtual_ranks, "placement": list(self.owners)}
        signature |= {"transport": transport, "check": check, "device": self.device.type, "costs": repr(table)}
        signature["domains"] = None if domains is None else list(domains)
        here = [host(), membership.gpu(self.device), membership.abandoned(pg, self.device)]
        where = self._agreement.agree("ShardGroup", signature, here)
        membership.refuse_shared_gpu([gpu for _, gpu, _ in where])
        membership.refuse_abandoned([reason for _, _, reason in where])
        #: Which processes share fast links.
        self.domains = agree_on_domains([name for name, _, _ in where] if domains is None else domains)
        wire = self._agreement.connect(max(map(self.owners.count, range(self.world_size))) + 1, self.device)
        peers = self._find_peers(transport, limit) if wire is not None else None
        router = Router(self.domains, transport, table, peers)
        self._planner = Planner(Executor(self.owners, self.rank, wire, router, peers), self._agreement, self.device)
        self.transport, self.wire = transport, wire
        #: The virtual ranks hosted by this process, increasing.
        self.virtual_ranks = self._planner.virtual_ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveGroup:
        return self  # copies of a module that holds a group share it: processes and connections are not copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardGroup cannot be pickled: its processes and connections are this job's; construct it anew"
        )

    def __repr__(self) -> str:
        return (
            f"ShardGroup(num_virtual_ranks={self.num_virtual_ranks}, rank={self.rank}, world_size={self.world_size}, "
            f"virtual_ranks={list(self.virtual_ranks)}, transport={self.transport!r}, device={self.device}"
            + (f", domains={list(self.domains.of)})" if self.domains.count > 1 else ")")
        )

    def _find_peers(self, transport: str, limit: timedelta) -> Peers | None:
        if transport not in ("auto", "peer") or (transport == "auto" and self.device.type != "cuda"):
            return None
        assert self.group is not None
        gather = self._agreement.gather_objects
        peers = Peers(self.group, gather, self.owners, self.device, limit.total_seconds())
        if transport == "peer" and peers.reason is not None:
            raise ValueError(f'transport: "peer" cannot be used: {peers.reason}')
        return peers

    def positions(self, virtual_rank: int) -> tuple[int, int]:
        """Where a virtual rank lives: its process, and its index among that process's shards. ValueError for none."""
        return self._planner.position(virtual_rank)

    # Agreement for operations made of several collectives

    def refuse(self, name: str, error: Exception, counted: bool = False) -> Exception:
        """State this process's own error in place of the collective that the other processes call next; returns what
        to raise. ``counted`` when that is :meth:`gather_ints`, or a collective with lengths of form (b)."""
        with self._planner.calling(name):
            return self._planner.refuse(name, error, counted)

    def gather_ints(self, name: str, values: Sequence[int], most: int) -> list[list[int]]:
        """Every process's ``values``, at most ``most`` ints of 63 bits, by process: on the host's side channel."""
        with self._planner.calling(name):
            return self._agreement.gather_values(name, {}, values, most)

    # What happened and what would happen

    def stats(self) -> Stats:
        """Bytes of the last collective. Raises RuntimeError when there was none."""
        return self._planner.stats()

    def explain(
        self,
        lengths: Sequence[int],
        *,
        size: int | None = None,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        collective: Literal["all_reduce", "reduce_scatter", "all_gather"] = "all_reduce",
    ) -> Explanation:
        """Which transport such a call takes and why, with the bytes it moves. Nothing is sent.

        Args:
            lengths: R ints. For "exchange" ask a plan: ``group.plan("exchange", ...).explain()``.
            size, row_shape (``F``), dtype, out_dtype: of the call.
            collective: "all_reduce", "reduce_scatter" or "all_gather".
        """
        options = Options(size=size, out_dtype=out_dtype)
        return self._planner.explain(collective, lengths, options, row_shape, dtype)

    def check(self) -> None:
        """Raise RuntimeError when the group has failed (a process died, or a call timed out)."""
        if self._agreement.failed is not None:
            raise RuntimeError(self._agreement.failed)
        self._planner.check_peers()
