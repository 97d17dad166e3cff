"""Peer transport: gather and sum in one kernel launch over memory that GPUs of one NVLink domain map from each other.

A launch pushes or writes this process's rows to its peers, or puts them where peers read them, and sums all rows in
virtual-rank order as they come. Lengths ride in flags: they may change with every call and every replay of a CUDA
graph. docs/engineering/peer.md has the protocol.

Contract: a :class:`PeerTransport` is made, used and closed by all processes of the group together; they make the same
calls in the same order, from one thread, on any streams (a call comes after the group's previous one). A call can be
captured in a CUDA graph once the same signature has run on every process; one graph of a group may be in flight. A
process that waits longer than ``timeout`` for another fails the group: the results of that call are NaN (-1 for
integers, every bit set for copies), and :meth:`PeerTransport.check` and all later calls raise.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.layout import ExchangePlan, intervals_of
from ...local.ops import readable
from . import shapes
from .layout import (
    MAX_BLOCKS,
    MAX_HOSTED,
    MAX_RANKS,
    MemoryLayout,
    Regions,
    bounded_staging,
    choose_regions,
    default_staging,
)
from .members import Group
from .memory import Gather, available, gather_objects, shares_gpus
from .operators import DTYPE_CODES
from .prepared import PreparedCall, plan_words
from .tuning import Tuning
from .workspace import Workspace

_BYTES = DTYPE_CODES[torch.uint8]
_MAX_CALLS = 256


class PeerTransport:
    """Calls of one group over the :class:`Workspace` of its processes, which is set up at the first one.

    It moves and sums in one launch, so it yields no rows: it is handed whole exchanges.

    Args:
        group: the processes.
        owners: the process of every virtual rank.
        device: this process's GPU.
        timeout: seconds that a kernel waits for another process before it fails the workspace.
        workspace_bytes: the most that the symmetric memory of a process may take. Default: what the default of
            ``staging_bytes`` takes. The first group on these processes decides; later ones use what is there.
        staging_bytes: instead, staging for the rows of one process; larger messages take several launches. The
            symmetric memory is a multiple of it. Default: 64 MiB; 128 MiB with more than two processes, whose launches
            are longer.
        tuning: launch shapes and switch points.
        gather: all processes' values of a small object (:mod:`.memory`); default ``all_gather_object``.

    Attributes:
        reason: why the transport cannot be used (:func:`available`; at most 64 virtual ranks, 32 on a process), or
            None; the same on all processes.
        layout: how the group cuts the workspace. Before that is set up it is as it will be, but for the number of
            blocks, on which no way depends.
    """

    def __init__(
        self,
        group: Group,
        owners: Sequence[int],
        device: torch.device,
        *,
        timeout: float,
        workspace_bytes: int | None = None,
        staging_bytes: int | None = None,
        tuning: Tuning | None = None,
        gather: Gather | None = None,
    ) -> None:
        self._group, self.owners, self.device = group, tuple(owners), device
        self.rank, self.world_size = group.rank(), group.size()
        self.timeout, self.tuning = timeout, tuning or Tuning()
        self._bytes, self._gather = (workspace_bytes, staging_bytes), gather or gather_objects(group)
        self._workspace: Workspace | None = None
        self._calls: dict[Any, PreparedCall] = {}
        self._hosted = max(self.owners.count(g) for g in range(self.world_size))
        if len(self.owners) > MAX_RANKS or self._hosted > MAX_HOSTED:
            self.reason: str | None = f"at most {MAX_RANKS} virtual ranks, {MAX_HOSTED} on a process"
            return
        self.reason = available(group, device, self._gather)
        size = (len(self.owners), self.world_size, 1, self._hosted, self.tuning)
        self._cut(choose_regions(*size, default_staging(self.world_size)))

    def _cut(self, regions: Regions) -> None:
        self.layout = MemoryLayout(regions, len(self.owners), self._hosted, self.tuning)

    def set_up(self) -> Workspace:
        """The workspace, acquired at first use. Collective then.

        Raises:
            RuntimeError: there is a :attr:`reason`, memory does not hold what was written, or the workspace has failed.
            ValueError: settings differ between processes; too few ``workspace_bytes``.
        """
        if self._workspace is None:
            if self.reason is not None:
                raise RuntimeError(f'transport "peer" cannot be used: {self.reason}')
            blocks = self._agree_blocks([repr(self.tuning), self.timeout, *self._bytes, self.owners])
            self._workspace = Workspace.acquire(
                self._group, self.device, lambda: self._choose_regions(blocks), self._gather
            )
            self._cut(self._workspace.regions)
        return self._workspace

    def _agree_blocks(self, settings: list[Any]) -> int:
        """The blocks of a launch that all GPUs can hold twice: a block of the kernels has room for a second one beside
        it on every multiprocessor."""
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        if shares_gpus():
            blocks //= self.world_size
        everyone = self._gather([blocks, settings])
        for process, (_, theirs) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise ValueError(f"peer transport: process 0 has {everyone[0][1]}, process {process} has {theirs}")
        return min(MAX_BLOCKS, *(theirs for theirs, _ in everyone))

    def _choose_regions(self, blocks: int) -> Regions:
        workspace_bytes, staging_bytes = self._bytes
        group = (len(self.owners), self.world_size, blocks, self._hosted, self.tuning)
        if staging_bytes is None and workspace_bytes is not None:
            staging_bytes = bounded_staging(*group, workspace_bytes)
        return choose_regions(*group, staging_bytes or default_staging(self.world_size))

    def exchange(
        self,
        plan: ExchangePlan,
        shards: Sequence[Tensor],
        outs: Sequence[Tensor],
        op: str = "sum",
        scale: float | None = None,
        lengths: Tensor | None = None,
        *,
        number: int = 0,
        signature: int = 0,
    ) -> None:
        """Fill ``outs``, one per hosted sink of ``plan``, from all processes' shards. On the current stream.

        Args:
            plan: equal on all processes; where every process wants the whole (all_reduce, all_gather) only its sinks
                need be, since source intervals travel with the call.
            shards: contiguous, at least ``(|I_r|, *F)`` per hosted source in order.
            op: "sum", "mean", or "copy" (disjoint sources, any dtype, bits are kept).
            lengths, number: as in :class:`PreparedCall`; with lengths on the device the plan's sources are the largest
                that may come.
            signature: as in :meth:`prepare`.

        Raises:
            RuntimeError, ValueError: as :class:`PreparedCall` and :meth:`prepare`.
        """
        rows = list(shards) if op == "copy" else [readable(s) for s in shards]
        first = rows[0]
        prepared = self.prepare(
            plan, first.shape[1:].numel(), first.dtype, outs[0].dtype, op, scale, signature=signature
        )
        prepared(outs, rows, self.bounds(plan) if lengths is None else [], lengths, number)

    def gather_lengths(self, plan_of: ExchangePlan, lengths: Tensor, number: int = 0) -> Tensor:
        """The ``(R,)`` lengths of all virtual ranks from each process's hosted ones, unread by the host."""
        count = len(plan_of.source_owners)
        sinks, owners = ((0, count),) * plan_of.world_size, tuple(range(plan_of.world_size))
        plan = ExchangePlan(tuple(intervals_of([1] * count)), plan_of.source_owners, sinks, owners, plan_of.world_size)
        out = torch.empty(count, dtype=lengths.dtype, device=lengths.device)
        self.exchange(plan, list(lengths.split(1)), [out], "copy", number=number)
        return out

    def bounds(self, plan: ExchangePlan) -> list[int]:
        """Start and length of each source of this process."""
        held = [plan.sources[r] for r in plan.hosted_sources(self.rank)]
        return [bound for begin, end in held for bound in (begin, end - begin)]

    def predict(
        self, plan: ExchangePlan, width: int, in_bytes: int, out_bytes: int, move: bool
    ) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """``(two_shot, egress, ingress)``: by process, bytes of rows and results to others, and from them."""
        way, egress, ingress = shapes.predict(plan, self.layout, width, in_bytes, out_bytes, move)
        return way == "two-shot", egress, ingress

    def prepare(
        self,
        plan: ExchangePlan,
        width: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str = "sum",
        scale: float | None = None,
        signature: int = 0,
        goes_on: bool = False,
    ) -> PreparedCall:
        """The launch of such a call, with nothing left to decide; the last 256 are kept. ``prepared(outs, shards,
        bounds)`` runs it; :meth:`PreparedCall.bind` makes the operators' plan of it.

        Args:
            width: elements of a position.
            signature: whatever else must be equal on all processes; it and the arguments above make up what they
                compare in every launch.
            goes_on: the call is given accumulators.

        Raises:
            ValueError: what the transport cannot do: 2**31 positions, more than 32 outputs, more rows (of all, or of
                one process) than there are virtual ranks.
        """
        workspace = self.set_up()
        sources = None if shapes.is_replicated(plan) else plan.sources
        factor = None if scale is None else struct.pack("<d", scale)  # 0.0 equals -0.0
        key = (
            plan.sinks,
            plan.sink_owners,
            plan.source_owners,
            sources,
            width,
            dtype,
            out_dtype,
            op,
            factor,
            signature,
            goes_on,
        )
        found = self._calls.get(key)
        if found is None:
            message = shapes.describe_message(
                plan, width, dtype.itemsize, out_dtype.itemsize, op == "copy", dtype.is_floating_point, goes_on
            )
            shape = shapes.choose_shape(message, self.layout)
            codes = (_BYTES, _BYTES) if op == "copy" else (DTYPE_CODES[dtype], DTYPE_CODES[out_dtype])
            words = plan_words(
                plan, message, shape, self.layout, workspace.addresses, self.rank, codes,
                op == "mean", scale, self.timeout, zlib.crc32(repr(key).encode()),
            )  # fmt: skip
            if len(self._calls) == _MAX_CALLS:
                del self._calls[next(iter(self._calls))]
            found = self._calls[key] = PreparedCall(self, shape, words, (dtype, out_dtype))
        return found

    @property
    def workspace_bytes(self) -> int:
        """What the symmetric memory of a process takes; groups over the same processes share it. 0 before its
        set-up."""
        return 0 if self._workspace is None else self._workspace.regions.total_bytes

    def check(self) -> None:
        """Raise RuntimeError when the workspace has failed; the message names process, block and launch."""
        if self._workspace is not None:
            self._workspace.check(self.timeout)

    def close(self) -> None:
        """Give the workspace back, if it was set up. Collective; its last user frees the memory. Plans of this
        transport must not run any more: the group refuses calls once it is closed."""
        self._calls.clear()
        if self._workspace is not None:
            self._workspace.release(self._gather)
            self._workspace = None
