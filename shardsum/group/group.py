"""CollectiveGroup: R virtual ranks on the G processes of a torch.distributed group, and the collectives between them.

``rank`` and ``world_size`` always mean processes. G = 1 without a launcher is the emulation of all R ranks in one
process; G = R is one rank a process; anything between hosts several ranks a process. The result of a collective
depends on the shards and on R, never on G, the placement, the transport or the device.

Common to all collectives (every process makes the same calls in the same order, from one thread, over all ShardGroups
that share a ProcessGroup):

shards    one Tensor ``(length, *F)`` when this process hosts one virtual rank, else a list in increasing virtual-rank
          order; padded Tensors ``(S_MAX, *F)``, or one ``(k, S_MAX, *F)`` for k hosted ranks, with ``lengths``.
          Where one rank is hosted, ``(1, S_MAX, *F)`` might be one shard of one row. It is taken as stacked by a plan,
          which knows ``*F``, else if its length is above 1, or ``out`` has the dimensions of that. With a length of 0
          or 1 it is what the other processes' shards make of it (their trailing shapes must be equal), and one row
          where theirs might be either, too; later calls with the same shape and lengths keep that meaning. With
          lengths on the device it is stacked, but for a size of 1: that is a ValueError. A list is never mistaken.
          Without lengths nothing stacked is taken.
lengths   (a) R ints, equal on all processes: nothing else travels.
          (b) None: the shards' row counts; every call begins with one small all_gather on the host.
          (c) an integer Tensor of the hosted ranks' lengths on the shards' device, with padded shards and ``size``:
          never read by the host; values are clamped to [0, S_MAX].
size      positions of the result; equal on all processes. Default: the largest length (of :func:`shardsum.ragged_sum`
          it is S_MAX).
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
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.checks import brief
from ..core.words import Check, Placement, TransportName
from ..transports import costs as cost_tables
from .construction import construct
from .explain import Explanation, Stats
from .methods import Collectives, HostLengths
from .plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack

    from .methods import AllGatherPlan, AllReducePlan, ExchangePlan, ReduceScatterPlan


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
        workspace_bytes: the most GPU memory that the peer transport maps for these processes; all groups over them
            share it. Default: what its launches are tuned for (``group.workspace_bytes`` says how much that is).
        costs: the table or file for "auto" (:mod:`shardsum.transports.costs`).

    Raises:
        ValueError: an argument is malformed, or processes disagree; the same sentence on every process.
        RuntimeError: WORLD_SIZE says that there are other processes, but torch.distributed is not initialised.

    Example:
        >>> group = ShardGroup(3)
        >>> group.all_reduce([torch.tensor([10, 11, 12]), torch.tensor([20, 21]), torch.tensor([40])])
        tensor([70, 32, 12])
        >>> group.close()  # or: with ShardGroup(3) as group: ...
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
        workspace_bytes: int | None = None,
        costs: str | os.PathLike[str] | Mapping[str, cost_tables.Costs] | None = None,
    ) -> None:
        self._planner, self.group = construct(
            num_virtual_ranks, group, placement, transport, domains, device, check, timeout, workspace_bytes, costs
        )
        planner = self._planner
        self.transport, self.domains, self.wire = transport, planner.router.domains, planner.wire
        self.device, self.owners = planner.device, planner.owners
        self.rank, self.world_size = planner.rank, planner.world_size
        self.num_virtual_ranks = planner.num_virtual_ranks
        #: The virtual ranks hosted by this process, increasing.
        self.virtual_ranks = planner.virtual_ranks

    def __del__(self) -> None:
        if (planner := self.__dict__.get("_planner")) is not None:  # else the constructor failed
            planner.let_go()

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveGroup:
        return self  # copies of a module that holds a group share it: processes and connections are not copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardGroup cannot be pickled: its processes and connections are this job's; construct it anew"
        )

    def __repr__(self) -> str:
        return (
            f"ShardGroup(num_virtual_ranks={self.num_virtual_ranks}, rank={self.rank}, world_size={self.world_size}, "
            f"virtual_ranks={brief(self.virtual_ranks)}, transport={self.transport!r}, device={self.device}"
            + (f", domains={brief(self.domains.of)})" if self.domains.count > 1 else ")")
        )

    def close(self) -> None:
        """Give back the group's memory and connections. Collective; later calls of the group and its plans raise."""
        self._planner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:  # after an error the others may not come
            self.close()

    @property
    def workspace_bytes(self) -> int:
        """What the peer transport's memory takes on this process; 0 where it is not used, or not yet."""
        return sum(peers.workspace_bytes for peers in self._planner.all_peers())

    def positions(self, virtual_rank: int) -> tuple[int, int]:
        """Where a virtual rank lives: its process, and its index among that process's shards. ValueError for none."""
        return self._planner.position(virtual_rank)

    @overload
    def plan(
        self, collective: Literal["all_reduce"], lengths: HostLengths = None, /, **options: Unpack[AllReducePlan]
    ) -> Plan[Tensor]: ...
    @overload
    def plan(
        self, collective: Literal["all_gather"], lengths: HostLengths = None, /, **options: Unpack[AllGatherPlan]
    ) -> Plan[Tensor]: ...
    @overload
    def plan(
        self,
        collective: Literal["reduce_scatter"],
        lengths: HostLengths = None,
        /,
        **options: Unpack[ReduceScatterPlan],
    ) -> Plan[list[Tensor]]: ...
    @overload
    def plan(
        self, collective: Literal["exchange"], lengths: HostLengths = None, /, **options: Unpack[ExchangePlan]
    ) -> Plan[list[Tensor]]: ...
    def plan(
        self,
        collective: str,
        lengths: Sequence[int] | None = None,
        /,
        *,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        s_max: int | None = None,
        **options: Any,
    ) -> Plan[Any]:
        """A collective with everything decided, to be called again and again. Collective.

        Args:
            collective: "all_reduce", "reduce_scatter", "all_gather" or "exchange".
            lengths: R ints. Not for "exchange".
            row_shape, dtype: trailing shape ``*F`` and dtype of the shards.
            s_max: in place of ``lengths`` where the device alone knows them: the rows of every padded shard. The
                lengths then come with each call (``plan(shards, lengths=tensor)``), and ``size`` is required.
            options: what the collective of that name takes beside shards, lengths, ``out`` and ``async_op``.

        Raises:
            ValueError: an argument is malformed, or processes disagree; on every process.

        Example:
            >>> group = ShardGroup(4)
            >>> plan = group.plan("reduce_scatter", [4, 2, 0, 3], row_shape=(8,), dtype=torch.bfloat16)
            >>> parts = plan([torch.ones(n, 8, dtype=torch.bfloat16) for n in (4, 2, 0, 3)])
        """
        if collective == "all_reduce":
            options = {"grad": "identity", **options}
        planner = self._planner
        with planner.calling(collective):
            try:
                terms = planner.terms(collective, lengths, options, row_shape, dtype, s_max)
            except Exception as error:
                raise planner.refuse(collective, error) from error
            return planner.find(terms) or planner.agreed(terms, False)

    # Agreement for operations made of several collectives

    def refuse(self, name: str, error: Exception, counted: bool = False) -> Exception:
        """State this process's own error in place of the collective that the other processes call next; returns what
        to raise. ``counted`` when that is :meth:`gather_ints`, or a collective with lengths of form (b)."""
        with self._planner.calling(name):
            return self._planner.refuse(name, error, counted)

    def gather_ints(self, name: str, values: Sequence[int], most: int, **signature: Any) -> list[list[int]]:
        """Every process's ``values``, at most ``most`` ints of 63 bits, by process: on the host's side channel.
        ValueError on every process where the ``signature`` differs."""
        with self._planner.calling(name):
            return self._planner.agreement.gather_values(name, signature, values, most)

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
        """
        options = {name: value for name, value in (("size", size), ("out_dtype", out_dtype)) if value is not None}
        return self.preview(collective, lengths, row_shape=row_shape, dtype=dtype, **options).explain()

    def preview(
        self,
        collective: str,
        lengths: Sequence[int] | None = None,
        *,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Plan[Any]:
        """What :meth:`plan` would return, for a look at it. Not collective; its calls would be compared first."""
        return Plan(self._planner, self._planner.terms(collective, lengths, options, row_shape, dtype))

    def check(self) -> None:
        """Raise RuntimeError when the group has failed (a process died, or a call timed out)."""
        self._planner.check()
