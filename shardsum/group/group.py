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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.checks import as_ints, check_size, needs_grad
from ..core.layout import Interval, intervals_of, owners_of
from ..transports import costs as cost_tables
from ..transports.peer.peers import Peers
from . import membership
from .agreement import Agreement
from .arguments import (
    Request,
    Shards,
    check_grad,
    check_intervals,
    check_lengths,
    check_out,
    check_reduce,
    check_scalars,
    check_splits,
    describe_reduce,
    describe_rows,
    into,
    narrow,
)
from .calls import Runner
from .executor import Engine, Reduce
from .reports import Explanation, Stats, explain

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class CollectiveGroup:
    """R virtual ranks on the processes of ``group``. The constructor is collective.

    Args:
        num_virtual_ranks: R, at least the number of processes. Default: one a process.
        group: a ProcessGroup or a one-dimensional DeviceMesh (``mesh["sp"]``). Default: the world's group when
            torch.distributed is initialised, else this process alone.
        placement: "contiguous", "zigzag", or the owning process of every virtual rank
            (:func:`shardsum.core.layout.owners_of`).
        transport: "auto", or "gather", "all_to_all" or "peer" to force it ("local" is a lone process's).
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
        placement: str | Sequence[int] = "contiguous",
        transport: str = "auto",
        device: torch.device | str | None = None,
        check: str = "first",
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
            table = cost_tables.load(costs)
        except Exception as error:
            raise self._agreement.refuse("ShardGroup", error) from error
        signature: dict[str, Any] = {"num_virtual_ranks": self.num_virtual_ranks, "placement": list(self.owners)}
        signature |= {"transport": transport, "check": check, "device": self.device.type, "costs": repr(table)}
        membership.refuse_shared_gpu(self._agreement.agree("ShardGroup", signature, membership.gpu(self.device)))
        self._agreement.connect(max(map(self.owners.count, range(self.world_size))) + 1)
        wire = self._agreement.wire(pg, self.device)
        peers = self._find_peers(transport, limit) if wire is not None else None
        self.engine = Engine(self.owners, self.rank, wire, transport, table, peers)
        self._runner = Runner(self.engine, self._agreement, self.device)
        #: The virtual ranks hosted by this process, increasing.
        self.virtual_ranks = self._runner.virtual_ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveGroup:
        return self  # copies of a module that holds a group share it: processes and connections are not copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardGroup cannot be pickled: its processes and connections are this job's; construct it anew"
        )

    def __repr__(self) -> str:
        return (
            f"ShardGroup(num_virtual_ranks={self.num_virtual_ranks}, rank={self.rank}, world_size={self.world_size}, "
            f"virtual_ranks={list(self.virtual_ranks)}, transport={self.engine.transport!r}, device={self.device})"
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
        return self._runner.position(virtual_rank)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor for shards. Collective; every process passes the same shape and dtype.

        With the peer transport its memory is mapped by all GPUs of the group: where peers read rows, they read aligned
        shards in it in place (:meth:`shardsum.transports.peer.PeerTransport.empty`). Else it is an ordinary tensor on
        the group's device.
        """
        if self.engine.peers is not None:
            return self.engine.peers.transport.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    # Collectives

    def all_reduce(
        self,
        shards: Shards,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        size: int | None = None,
        op: str = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        grad: str = "identity",
        async_op: bool = False,
    ) -> Any:
        """The ragged sum of all R shards on every process: ``y[j] = sum of x_r[j]`` over r with ``j < length_r``.

        Args and errors: see the module. ``op``, ``scale``, ``out_dtype``, ``out`` as in :func:`shardsum.ragged_sum`.

        Returns:
            ``(size, *F)`` (with ``async_op`` a :class:`Handle` of it).
        """
        if out is not None and not async_op and not _is_dynamo_compiling():
            try:
                if self._runner.replays.last(shards, lengths, out, size, op, scale, out_dtype, grad):
                    return out
            except BaseException as error:
                self._runner.launch_failed("all_reduce", error)
                raise
        others = (type(size), size, op, None if scale is None else _text(scale), out_dtype, grad)
        outs = None if async_op else self._runner.again("all_reduce", shards, (lengths,), out, others)
        if outs is not None:
            return into(outs[0], out)

        return self._runner.collective(
            "all_reduce",
            partial(self._reduce_request, shards, lengths, size, op, scale, out_dtype, out, grad, async_op),
            partial(_first_into, out),
            shards,
            lengths,
            out=out,
            async_op=async_op,
            known_by=((lengths,), others, (size, op, scale, out_dtype, grad)),
        )

    def _reduce_request(
        self,
        shards: Shards,
        lengths: Sequence[int] | Tensor | None,
        size: int | None,
        op: str,
        scale: float | None,
        out_dtype: torch.dtype | None,
        out: Tensor | None,
        grad: str,
        async_op: bool,
    ) -> Request:
        """The checked arguments of :meth:`all_reduce`. Not a function within it: variables that one shares cost a call
        that is known 0.2 us."""
        hosted = self._runner.shards(shards, async_op)
        wanted = out.dtype if out_dtype is None and isinstance(out, Tensor) else out_dtype
        reduce = check_reduce(op, scale, hosted[0].dtype, wanted)
        check_out(out, hosted, reduce.dtype)
        signature = {"grad": check_grad(grad), **describe_reduce(reduce)}
        end = None if size is None else check_size(size)
        request = self._runner.with_lengths("all_reduce", hosted, lengths, end, signature, out)
        end = self._runner.end(request, end)
        request.sinks, request.kinds, request.size = ((0, end),) * self.world_size, "vp", end
        request.reduce, request.grad = reduce, grad
        self._runner.take_out(request, out, end)
        return request

    def reduce_scatter(
        self,
        shards: Shards,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        size: int | None = None,
        splits: Sequence[int] | None = None,
        op: str = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        async_op: bool = False,
    ) -> Any:
        """The ragged sum, each virtual rank receiving its part of the positions.

        Args and errors: see the module; ``splits`` are R ints that sum to ``size`` (default: even, longer first).

        Returns:
            ``(splits[v], *F)`` per hosted virtual rank v: a list, or a Tensor when ``shards`` was one and this process
            hosts one virtual rank.
        """
        lists = (lengths,) if splits is None else (lengths, splits)
        others = (type(size), size, op, _text(scale), out_dtype)
        deliver = self._runner.same_form(shards)
        outs = None if async_op else self._runner.again("reduce_scatter", shards, lists, None, others)
        if outs is not None:
            return deliver(outs)

        def build() -> Request:
            hosted = self._runner.shards(shards, async_op)
            reduce = check_reduce(op, scale, hosted[0].dtype, out_dtype)
            signature = describe_reduce(reduce)
            signature["splits"] = None if splits is None else as_ints("splits", splits, self.num_virtual_ranks)
            end = None if size is None else check_size(size)
            request = self._runner.with_lengths("reduce_scatter", hosted, lengths, end, signature)
            request.size = self._runner.end(request, end)
            parts = check_splits(signature["splits"], self.num_virtual_ranks, request.size)
            request.sinks, request.kinds = tuple(intervals_of(parts)), "vv"
            request.reduce, request.grad = reduce, "sum"
            return request

        return self._runner.collective(
            "reduce_scatter", build, deliver, shards, lengths, async_op=async_op, known_by=(lists, others, ())
        )

    def all_gather(
        self,
        shards: Shards,
        lengths: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        grad: str = "sum",
        async_op: bool = False,
    ) -> Any:
        """All shards behind one another in virtual-rank order, on every process. Any dtype; bits are kept.

        Args and errors: see the module (lengths of forms (a) and (b)).

        Returns:
            ``(sum of lengths, *F)``.
        """
        outs = None if async_op else self._runner.again("all_gather", shards, (lengths,), out, grad)
        if outs is not None:
            return into(outs[0], out)

        def build() -> Request:
            hosted = self._runner.shards(shards, async_op)
            check_out(out, hosted, hosted[0].dtype)
            signature: dict[str, Any] = {"grad": check_grad(grad)}
            request = self._runner.with_lengths("all_gather", hosted, lengths, None, signature, out)
            if request.sources is None:
                raise ValueError(
                    "lengths: a device tensor does not tell the host how long the result is; pass ints or None"
                )
            request.sources = tuple(intervals_of([end - begin for begin, end in request.sources]))
            total = request.sources[-1][1]
            request.sinks, request.kinds, request.size = ((0, total),) * self.world_size, "vp", total
            request.reduce, request.grad = Reduce("copy", None, hosted[0].dtype), grad
            self._runner.take_out(request, out, total)
            return request

        return self._runner.collective(
            "all_gather",
            build,
            partial(_first_into, out),
            shards,
            lengths,
            out=out,
            async_op=async_op,
            known_by=((lengths,), grad, ()),
        )

    def exchange(
        self,
        shards: Shards,
        in_intervals: Sequence[Interval],
        out_intervals: Sequence[Interval],
        *,
        size: int,
        op: str = "sum",
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        async_op: bool = False,
    ) -> Any:
        """The operator itself: ``y_q[j] = sum of x_r[j]`` over r with ``j in I_r``, for ``j in O_q``.

        Args:
            shards: shard r holds the positions of ``in_intervals[r]`` (rows beyond them are ignored).
            in_intervals, out_intervals: R pairs ``(begin, end)`` of global positions each, equal on all processes;
                empty ones allowed, outputs may overlap. What no output covers is ignored and gets gradient 0.
            size: the end of all positions.

        Returns:
            ``(|O_v|, *F)`` per hosted virtual rank v, in the form of ``shards`` (see :meth:`reduce_scatter`).
        """
        lists = (in_intervals, out_intervals)
        others = (type(size), size, op, _text(scale), out_dtype)
        deliver = self._runner.same_form(shards)
        outs = None if async_op else self._runner.again("exchange", shards, lists, None, others)
        if outs is not None:
            return deliver(outs)

        def build() -> Request:
            hosted = self._runner.shards(shards, async_op)
            reduce = check_reduce(op, scale, hosted[0].dtype, out_dtype)
            end = check_size(size)
            sources = check_intervals("in_intervals", in_intervals, self.num_virtual_ranks, end)
            sinks = check_intervals("out_intervals", out_intervals, self.num_virtual_ranks, end)
            rows = hosted
            if not torch.compiler.is_compiling():  # bounds are symbols there; the operator checks and narrows
                lengths = [e - b for b, e in sources]
                check_lengths(lengths, hosted, self.virtual_ranks, None)
                rows = narrow(hosted, lengths, self.virtual_ranks)
            signature = {**describe_rows(hosted), "size": end, **describe_reduce(reduce)}
            signature |= {"in_intervals": sources, "out_intervals": sinks, "requires grad": needs_grad(hosted)}
            return Request("exchange", rows, sources, sinks, "vv", reduce, "sum", signature, end)

        return self._runner.collective(
            "exchange", build, deliver, shards, (), async_op=async_op, known_by=(lists, others, ())
        )

    def token_mean(self, loss_sum: Shards, num_valid: Shards, *, grad: str = "identity") -> tuple[Tensor, Tensor]:
        """The mean loss over all valid tokens of all virtual ranks, without synchronisation.

        Args:
            loss_sum: 0-dim floating Tensor per hosted virtual rank: the sum of its tokens' losses.
            num_valid: 0-dim integer Tensor (or int) per hosted virtual rank: how many tokens that was.
            grad: see the module; each token's gradient is 1 / (all valid tokens) with "identity".

        Returns:
            ``(mean, count)``: float32 and int64, both 0-dim; mean 0 where count is 0.
        """
        try:
            losses = check_scalars("loss_sum", loss_sum, self.virtual_ranks, floating=True)
            counts = check_scalars("num_valid", num_valid, self.virtual_ranks, floating=False)
        except ValueError as error:
            raise self.refuse("token_mean", error) from error
        losses = [x.reshape(1).to(torch.float32) for x in losses]
        counts = [torch.as_tensor(n, dtype=torch.int64, device=x.device) for n, x in zip(counts, losses)]
        ones = [1] * self.num_virtual_ranks
        total = self.all_reduce(losses, ones, size=1, grad=grad)
        count = self.all_reduce([n.reshape(1) for n in counts], ones, size=1)
        mean = torch.where(count > 0, total / count.clamp(min=1).to(torch.float32), torch.zeros_like(total))
        return mean.reshape(()), count.reshape(())

    # Agreement for operations made of several collectives

    def refuse(self, name: str, error: Exception, counted: bool = False) -> ValueError:
        """State this process's own error in place of the collective that the other processes call next; returns what
        to raise. ``counted`` when that is :meth:`gather_ints`, or a collective with lengths of form (b)."""
        self._runner.begin(name)
        return self._agreement.refuse(name, error, counted)

    def gather_ints(self, name: str, values: Sequence[int], most: int) -> list[list[int]]:
        """Every process's ``values``, at most ``most`` ints of 63 bits, by process: on the host's side channel."""
        self._runner.begin(name)
        return self._agreement.gather_values(name, {}, values, most)

    # What happened and what would happen

    def stats(self) -> Stats:
        """Bytes of the last collective. Raises RuntimeError when there was none."""
        if self.engine.last is None:
            raise RuntimeError("stats: no collective has run in this group")
        traffic = self.engine.wire.traffic if self.engine.wire is not None else None
        return Stats(self.engine.last, traffic.sent if traffic else 0, traffic.received if traffic else 0)

    def explain(
        self,
        lengths: Sequence[int],
        *,
        size: int | None = None,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        collective: str = "all_reduce",
    ) -> Explanation:
        """Which transport such a call takes and why, with the bytes it moves. Nothing is sent.

        Args:
            lengths: R ints. For "exchange"-like questions use :meth:`stats` after a call.
            size, row_shape (``F``), dtype, out_dtype: of the call.
            collective: "all_reduce", "reduce_scatter" or "all_gather".
        """
        return explain(self.engine, collective, lengths, size, row_shape, dtype, out_dtype, self.device.type)

    def check(self) -> None:
        """Raise RuntimeError when the group has failed (a process died, or a call timed out)."""
        if self._agreement.failed is not None:
            raise RuntimeError(self._agreement.failed)
        if self.engine.peers is not None:
            self.engine.peers.check()


def _first_into(out: Tensor | None, outs: list[Tensor]) -> Tensor:
    return into(outs[0], out)


def _text(scale: Any) -> tuple[type, str] | None:
    """A scale to compare: 0.0 differs from -0.0, NaN equals NaN; other types may print alike."""
    return None if scale is None else (type(scale), repr(scale))
