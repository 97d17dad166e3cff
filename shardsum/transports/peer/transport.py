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

from ...core.layout import ExchangePlan
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
from .members import Group, place_in
from .memory import Gather, available, gather_objects, shares_gpus
from .operators import DTYPE_CODES
from .prepared import PreparedCall, plan_words
from .tuning import Tuning
from .workspace import Workspace

__all__ = ["PeerTransport", "PreparedCall", "Tuning", "available"]

_BYTES = DTYPE_CODES[torch.uint8]
_MAX_CALLS = 256


class PeerTransport:
    """Calls of one group over the :class:`.Workspace` of its processes.

    Args:
        group: the processes; see :func:`available`.
        owners: the process of every virtual rank; at most 64 ranks, at most 32 on a process.
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
        layout: how the group cuts the workspace.

    Raises:
        RuntimeError: peers cannot be read, their memory does not hold what they wrote, or their workspace has failed.
        ValueError: too many virtual ranks; settings differ between processes; too few ``workspace_bytes``.
    """

    def __init__(
        self,
        group: Group,
        owners: Sequence[int],
        device: torch.device,
        *,
        timeout: float = 600.0,
        workspace_bytes: int | None = None,
        staging_bytes: int | None = None,
        tuning: Tuning | None = None,
        gather: Gather | None = None,
    ) -> None:
        self.owners, self.device = tuple(owners), device
        self.rank, self.world_size = place_in(group)
        self.timeout, self.tuning = timeout, tuning or Tuning()
        self._gather = gather or gather_objects(group)
        reason = available(group, device, self._gather)
        if reason is not None:
            raise RuntimeError(f'transport "peer" cannot be used: {reason}')
        self._hosted = max(self.owners.count(g) for g in range(self.world_size))
        if len(self.owners) > MAX_RANKS or self._hosted > MAX_HOSTED:
            raise ValueError(
                f'transport "peer": at most {MAX_RANKS} virtual ranks, {MAX_HOSTED} on a process; '
                f"got {len(self.owners)}, {self._hosted} on a process"
            )
        blocks = self._agree_blocks([repr(self.tuning), timeout, workspace_bytes, staging_bytes, self.owners])

        def choose() -> Regions:
            return self._choose_regions(blocks, workspace_bytes, staging_bytes)

        self._workspace = Workspace.acquire(group, device, choose, self._gather)
        regions = self._workspace.regions
        self.layout = MemoryLayout.in_regions(regions, len(self.owners), self._hosted, self.tuning)
        self._calls: dict[Any, PreparedCall] = {}

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

    def _choose_regions(self, blocks: int, workspace_bytes: int | None, staging_bytes: int | None) -> Regions:
        group = (len(self.owners), self.world_size, blocks, self._hosted, self.tuning)
        if staging_bytes is None and workspace_bytes is not None:
            staging_bytes = bounded_staging(*group, workspace_bytes)
        return choose_regions(*group, staging_bytes or default_staging(self.world_size))

    def exchange(
        self,
        plan: ExchangePlan,
        shards: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        op: str = "sum",
        scale: float | None = None,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        number: int = 0,
        signature: int = 0,
    ) -> None:
        """Fill ``outs``, one per hosted sink of ``plan``, from all processes' shards. On the current stream.

        Args:
            plan: equal on all processes; where every process wants the whole (all_reduce, all_gather) only its sinks
                need be, since source intervals travel with the call.
            shards: contiguous, at least ``(|I_r|, *F)`` per hosted source in order.
            op: "sum", "mean", or "copy" (disjoint sources, any dtype, bits are kept).
            starts, lengths, number: as in :class:`PreparedCall`; with lengths on the device the plan's sources are the
                largest that may come.
            signature: as in :meth:`prepare`.

        Raises:
            RuntimeError, ValueError: as :class:`PreparedCall` and :meth:`prepare`.
        """
        first = shards[0]
        prepared = self.prepare(
            plan, first.shape[1:].numel(), first.dtype, outs[0].dtype, op, scale, signature=signature
        )
        bounds: list[int] = []
        if lengths is None:
            for r in plan.hosted_sources(self.rank):
                begin, end = plan.sources[r]
                bounds += (begin, end - begin)
        prepared(outs, shards, bounds, starts, lengths, number)

    def prepare(
        self,
        plan: ExchangePlan,
        width: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str = "sum",
        scale: float | None = None,
        two_shot: bool | None = None,
        signature: int = 0,
        goes_on: bool = False,
    ) -> PreparedCall:
        """The launch of such a call; the last 256 are kept.

        Args:
            width: elements of a position.
            two_shot: force an all_reduce's way.
            signature: whatever else must be equal on all processes; it and the arguments above make up what they
                compare in every launch.
            goes_on: the call is given accumulators.

        Raises:
            ValueError: what the transport cannot do: 2**31 positions, more than 32 outputs, more rows (of all, or of
                one process) than there are virtual ranks, a two-shot of anything but a sum that every process gets.
        """
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
            two_shot,
            signature,
            goes_on,
        )
        found = self._calls.get(key)
        if found is None:
            message = shapes.describe_message(
                plan, width, dtype.itemsize, out_dtype.itemsize, op == "copy", dtype.is_floating_point, goes_on
            )
            shape = shapes.choose_shape(message, self.layout, self.tuning, two_shot)
            codes = (_BYTES, _BYTES) if op == "copy" else (DTYPE_CODES[dtype], DTYPE_CODES[out_dtype])
            words = plan_words(
                plan, message, shape, self.layout, self.tuning, self._workspace.addresses, self.rank, codes,
                op == "mean", scale, self.timeout, zlib.crc32(repr(key).encode()),
            )  # fmt: skip
            single = len(plan.hosted_sources(self.rank)) == 1 and len(plan.hosted_sinks(self.rank)) == 1
            if len(self._calls) == _MAX_CALLS:
                del self._calls[next(iter(self._calls))]
            found = self._calls[key] = PreparedCall(self, message, shape, words, single, (dtype, out_dtype))
        return found

    @property
    def workspace_bytes(self) -> int:
        """What the symmetric memory of a process takes; groups over the same processes share it."""
        return self._workspace.regions.total_bytes

    def check(self) -> None:
        """Raise RuntimeError when the workspace has failed; the message names process, block and launch."""
        self._workspace.check(self.timeout)

    def close(self) -> None:
        """Give the workspace back. Collective; its last user frees the memory. Plans of this transport must not run any
        more: the group refuses calls once it is closed."""
        self._calls.clear()
        self._workspace.release(self._gather)
