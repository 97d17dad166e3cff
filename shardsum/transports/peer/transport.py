"""Peer transport: gather and sum in one kernel launch over memory that GPUs of one NVLink domain map from each other.

A launch pushes or writes this process's rows to its peers, or puts them where peers read them, and sums all rows in
virtual-rank order as they come. Lengths ride in flags: they may change with every call and every replay of a CUDA
graph. docs/peer.md has the protocol.

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
import torch.distributed as dist
from torch import Tensor

from ...core.layout import ExchangePlan
from . import shapes as peer_plan
from .memory import Gather, SymmetricMemory, available, gather_objects, shares_gpus
from .operators import DTYPE_CODES, MAX_ROW_DIMS, PLAN_VERSION, peer_bind, peer_run
from .shapes import MemoryLayout, Message, Shape, Tuning

__all__ = ["PeerTransport", "PreparedCall", "Tuning", "available"]

_BYTES = DTYPE_CODES[torch.uint8]
_MAX_CALLS = 256

_DIFFERS = 2  # FailureKind in csrc/peer/call.h


def _different(number: int, signature: int, their_number: int, their_signature: int) -> str:
    if number == their_number:
        return f" (call {number} of the group has other arguments there)"
    return f" (call {number} of the group here, call {their_number} there)"


#: Memory of groups that failed: a peer may still read it.
_kept: list[Any] = []


class PreparedCall:
    """One signature, ready to launch; made by :meth:`PeerTransport.prepare`.

    Attributes:
        message, shape: what moves, and how it is launched.
        single: whether this process has one source and one sink.
    """

    def __init__(
        self,
        owner: PeerTransport,
        message: Message,
        shape: Shape,
        words: list[int],
        single: bool,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.message, self.shape = message, shape
        self._owner, self.single, self._dtypes = owner, single, dtypes
        self._plan = torch.tensor(words, dtype=torch.int64, device="cpu")

    def __call__(
        self,
        outs: Sequence[Tensor],
        shards: Sequence[Tensor],
        bounds: Sequence[int] = (),
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        number: int = 0,
    ) -> None:
        """Run on the current stream. Tensors are contiguous, on the transport's device, one a hosted sink or source.

        Args:
            outs: written; ``(|O_q|, *F)``. They share no memory with shards, which are read meanwhile.
            shards: at least ``length`` positions each.
            bounds: start and length of each shard, flat. Ignored where ``lengths`` is given:
            starts, lengths: integer tensors on the device, one value a shard, never read by the host; clamped to the
                result and to the shard. ``starts`` None: 0.
            number: of this call among those of its group, equal on all processes: the number that its state has after
                it (:mod:`.operators`).

        Raises:
            RuntimeError: the group has failed; a capture of a signature that has not run; what CUDA says.
        """
        try:
            peer_run(outs, shards, bounds, starts, lengths, number, self._plan)
        except RuntimeError:
            self._owner.check()
            raise

    def bind(self, bounds: Sequence[int], row_shape: Sequence[int], state: Tensor | None = None) -> Tensor:
        """The plan tensor of ``peer_call(out, shard, plan)`` and ``peer_call_new(shard, plan)``: this call, always with
        these bounds. For one source and one sink on this process (:attr:`single`).

        It addresses memory of the transport and of ``state``: keep both as long as the plan may run. See
        :mod:`.operators` for what the operators check and how they refuse.

        Args:
            bounds: start and length of the shard.
            row_shape: shape of one position; tensors are ``(positions, *row_shape)``.
            state: CPU int64 tensor of one element that the group owns; None: calls are neither counted nor held back.

        Raises:
            ValueError: several sources or sinks, or too many dimensions.
        """
        if not self.single:
            raise ValueError("bind: this process has several sources or sinks, or none; call the prepared call itself")
        if len(row_shape) > MAX_ROW_DIMS:
            raise ValueError(f"row_shape: {len(row_shape)} dimensions, at most {MAX_ROW_DIMS} can be bound")
        like = [torch.empty(0, dtype=dtype, device=self._owner.device) for dtype in self._dtypes]
        return peer_bind(self._plan, bounds, row_shape, *like, 0 if state is None else state.data_ptr())


class PeerTransport:
    """The symmetric memory of one group and the calls over it.

    Args:
        group: the processes; see :func:`available`.
        owners: the process of every virtual rank; at most 64 ranks, at most 32 on a process.
        device: this process's GPU.
        timeout: seconds that a kernel waits for another process before it fails the group.
        staging_bytes: staging for the rows of one process; larger messages take several launches. The symmetric memory
            is a multiple of it (:attr:`.peer_plan.MemoryLayout.total_bytes`). Default: 64 MiB; 128 MiB with more than
            two processes, whose launches are longer.
        tuning: launch shapes and switch points.
        gather: all processes' values of a small object (:mod:`.peer_memory`); default ``all_gather_object``.

    Raises:
        RuntimeError: peers cannot be read, or their memory does not hold what they wrote.
        ValueError: too many virtual ranks; settings differ between processes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        owners: Sequence[int],
        device: torch.device,
        *,
        timeout: float = 600.0,
        staging_bytes: int | None = None,
        tuning: Tuning | None = None,
        gather: Gather | None = None,
    ) -> None:
        self.group, self.owners, self.device = group, tuple(owners), device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout, self.tuning = timeout, tuning or Tuning()
        self._gather = gather or gather_objects(group)
        reason = available(group, device, self._gather)
        if reason is not None:
            raise RuntimeError(f'transport "peer" cannot be used: {reason}')
        if staging_bytes is None:
            staging_bytes = (64 if self.world_size <= 2 else 128) << 20
        self.layout = self._agree_layout(staging_bytes)
        self._memory = SymmetricMemory(self.layout.total_bytes, group, device, self._gather)
        self._memory.local[self.layout.inbox_at :].fill_(255)  # words that have not come: csrc/peer/peer_words.cuh
        self._calls: dict[Any, PreparedCall] = {}
        self._allocate_private()
        self._gather(None)

    def _agree_layout(self, staging_bytes: int) -> MemoryLayout:
        hosted = max(self.owners.count(g) for g in range(self.world_size))
        if len(self.owners) > peer_plan.MAX_RANKS or hosted > peer_plan.MAX_HOSTED:
            raise ValueError(
                f'transport "peer": at most {peer_plan.MAX_RANKS} virtual ranks, {peer_plan.MAX_HOSTED} on a process; '
                f"got {len(self.owners)}, {hosted} on a process"
            )
        # A block of the kernel has room for a second one beside it on every multiprocessor.
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        if shares_gpus():
            blocks //= self.world_size
        settings = self._gather([blocks, [repr(self.tuning), self.timeout, staging_bytes, self.owners]])
        for process, (_, theirs) in enumerate(settings):
            if theirs != settings[0][1]:
                raise ValueError(f"peer transport: process 0 has {settings[0][1]}, process {process} has {theirs}")
        blocks = min(self.tuning.blocks, *(s[0] for s in settings))
        limit = self.tuning.push_limit(self.world_size)
        writes = self.world_size <= self.tuning.write_processes
        streams = self.world_size <= self.tuning.stream_processes
        return MemoryLayout(len(self.owners), self.world_size, blocks, hosted, staging_bytes, limit, writes, streams)

    def _allocate_private(self) -> None:
        self._control = torch.zeros(4, dtype=torch.int32, device=self.device)
        self._failure = torch.zeros(9, dtype=torch.int64, device="cpu").pin_memory()
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        for event in self._events:
            event.record(torch.cuda.current_stream(self.device))  # the handle exists from the first record on
        handles = [event.cuda_event for event in self._events]
        self._host = torch.tensor([*handles, -1, 0, 0, 0], device="cpu")  # PeerHost
        torch.cuda.synchronize(self.device)

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
    ) -> PreparedCall:
        """The launch of such a call; the last 256 are kept.

        Args:
            width: elements of a position.
            two_shot: force an all_reduce's way.
            signature: whatever else must be equal on all processes; it and the arguments above make up what they
                compare in every launch.

        Raises:
            ValueError: what the transport cannot do: 2**31 positions, more than 32 outputs, more rows (of all, or of
                one process) than there are virtual ranks, a two-shot of anything but a sum that every process gets.
        """
        sources = None if peer_plan.is_replicated(plan) else plan.sources
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
        )
        found = self._calls.get(key)
        if found is None:
            message = peer_plan.describe_message(
                plan, width, dtype.itemsize, out_dtype.itemsize, op == "copy", dtype.is_floating_point
            )
            shape = peer_plan.choose_shape(message, self.layout, self.tuning, two_shot)
            codes = (_BYTES, _BYTES) if op == "copy" else (DTYPE_CODES[dtype], DTYPE_CODES[out_dtype])
            words = self._words(plan, message, shape, codes, op == "mean", scale, zlib.crc32(repr(key).encode()))
            single = len(plan.hosted_sources(self.rank)) == 1 and len(plan.hosted_sinks(self.rank)) == 1
            if len(self._calls) == _MAX_CALLS:
                del self._calls[next(iter(self._calls))]
            found = self._calls[key] = PreparedCall(self, message, shape, words, single, (dtype, out_dtype))
        return found

    def _words(
        self,
        plan: ExchangePlan,
        m: Message,
        shape: Shape,
        codes: tuple[int, int],
        mean: bool,
        scale: float | None,
        signature: int = 0,
    ) -> list[int]:
        """A plan as csrc/peer/plan.h reads it."""
        hosted, sinks = plan.hosted_sources(self.rank), plan.hosted_sinks(self.rank)
        if max(len(hosted), len(sinks)) > peer_plan.MAX_HOSTED:
            raise ValueError(f"peer transport: more than {peer_plan.MAX_HOSTED} rows or outputs on one process")
        (scale_bits,) = struct.unpack("<q", struct.pack("<d", 1.0 if scale is None else scale))
        t, at = shape.tiles, self.layout
        most = max(map(plan.source_owners.count, plan.source_owners), default=0)
        if len(plan.sources) > at.num_ranks or most > at.rows_per_process:
            raise ValueError(
                f"peer transport: {len(plan.sources)} rows, {most} on a process; there is memory for {at.num_ranks}, "
                f"{at.rows_per_process} on a process"
            )
        places = [plan.source_owners[:r].count(owner) for r, owner in enumerate(plan.source_owners)]
        staging_at, half_bytes, slot_bytes = at.staging_at, at.slots_bytes, at.row_bytes
        own_slots = not shape.write
        if shape.push:
            staging_at, half_bytes, slot_bytes = at.inbox_at, at.inboxes_bytes, at.inbox_row_bytes
            own_slots = at.inbox_rows < at.num_ranks
        elif shape.two_shot:
            slot_bytes = at.part_bytes
        slots = places if own_slots else range(len(places))
        needs = [(0, m.size)] * len(places)
        if not m.replicated:
            needs = [peer_plan.needed(plan, r, interval) for r, interval in enumerate(plan.sources)]
        parts: list[Sequence[int]] = [
            (PLAN_VERSION, 0, self._host.data_ptr(), shape.chunk, signature),
            (*codes, m.in_bytes, m.out_bytes, m.move, shape.two_shot, shape.push, shape.write),
            (mean, scale is not None, scale_bits),
            (m.size, m.width),
            (t.tile, t.stretch, t.stretches_per_tile, t.columns, t.tiles_per_piece, t.blocks, at.max_blocks),
            (self.tuning.threads, shape.producers),
            (at.stages_at, at.abort_at, staging_at, at.reduced_at),
            (half_bytes, slot_bytes, at.reduced_bytes),
            (self._control.data_ptr(), self._failure.data_ptr(), round(self.timeout * 1e9)),
            (at.num_ranks, len(plan.sources), self.world_size, self.rank, len(hosted), len(sinks)),
            self._memory.addresses,
            *((*row, *need) for row, need in zip(zip(plan.source_owners, places, slots), needs)),
            hosted,
            *(plan.sinks[q] for q in sinks),
        ]
        return [int(word) for part in parts for word in part]

    def check(self) -> None:
        """Raise RuntimeError when the group has failed; the message names process, block and launch."""
        kind, process, block, epoch, reporter, *calls = self._failure.tolist()
        if kind == 0:
            return
        if self not in _kept:
            _kept.append(self)
        found = "this process" if reporter == self.rank else f"process {reporter}"
        where = f"in block {block} of launch {epoch}"
        after = "Results of that launch and later ones are invalid (NaN); create a new process group"
        if kind == _DIFFERS:
            raise RuntimeError(
                f"peer transport: processes are out of step: {found} found process {process} in another call {where}"
                f"{_different(*calls) if reporter == self.rank else ''}. {after}"
            )
        raise RuntimeError(
            f"peer transport: process {process} did not come within {self.timeout:g} s: {found} waited for it {where}. "
            f"{after}"
        )

    def close(self) -> None:
        """Free the memory, once every process has come here. A failed group's is kept: a peer may still read it."""
        torch.cuda.synchronize(self.device)
        if int(self._failure[0]) != 0:
            if self not in _kept:
                _kept.append(self)
            return
        self._gather(None)
        self._calls.clear()
        del self._memory
