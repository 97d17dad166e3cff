"""A call over peer memory with nothing left to decide: its plan's words, and who runs it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.layout import ExchangePlan
from .layout import MAX_HOSTED, MAX_RANKS, MemoryLayout
from .operators import MAX_ROW_DIMS, PLAN_VERSION, peer_bind, peer_run
from .shapes import Message, Shape, gap_of, needed

if TYPE_CHECKING:
    from .transport import PeerTransport


@dataclass(frozen=True)
class Addresses:
    """Of a workspace: every process's block as mapped here, and this process's own PeerHost, PeerControl, PeerFailure
    (csrc/peer/call.h)."""

    blocks: tuple[int, ...]
    host: int
    control: int
    failure: int


class PreparedCall:
    """One signature, ready to launch; made by :meth:`.transport.PeerTransport.prepare`.

    Attributes:
        shape: how it is launched.
    """

    def __init__(
        self,
        owner: PeerTransport,
        shape: Shape,
        words: list[int],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self._owner, self.shape, self._dtypes = owner, shape, dtypes
        self._plan = torch.tensor(words, dtype=torch.int64, device="cpu")

    def __call__(
        self,
        outs: Sequence[Tensor],
        shards: Sequence[Tensor],
        bounds: Sequence[int] = (),
        lengths: Tensor | None = None,
        number: int = 0,
        accumulators: Tensor | None = None,
        carried: int = 0,
        headers: Sequence[Tensor] = (),
    ) -> None:
        """Run on the current stream. Tensors are contiguous, on the transport's device, one a hosted sink or source.

        Args:
            outs: written; ``(|O_q|, *F)``. They share no memory with shards, which are read meanwhile.
            shards: at least ``length`` positions each.
            bounds: start and length of each shard, flat. Ignored where ``lengths`` is given:
            lengths: an integer tensor on the device, one value a shard, never read by the host; clamped to the result
                and to the shard. Rows start at position 0 then.
            number: of this call among those of its group, equal on all processes: the number that its state has after
                it (:mod:`.operators`).
            accumulators: sums of earlier rows, of ``carried`` rows each, at which these start: ``(sum of |O_q|, *F)``,
                in the accumulator's dtype. Only of a call that was prepared to go on.
            headers: at most two of two int64; they become -1 where this process does not get its sums
                (:meth:`shardsum.transports.Wire.spoils`).

        Raises:
            RuntimeError: the group has failed; a capture of a signature that has not run; what CUDA says.
        """
        try:
            peer_run(outs, shards, bounds, lengths, number, self._plan, accumulators, carried, headers)
        except RuntimeError:
            self._owner.check()
            raise

    def bind(self, bounds: Sequence[int], row_shape: Sequence[int], state: Tensor | None = None) -> Tensor:
        """The plan tensor of ``peer_call_new.list(shards, plan)``, and for one source and one sink on this process of
        ``peer_call(out, shard, plan)`` and ``peer_call_new(shard, plan)``: this call, always with these bounds.

        It addresses memory of the transport and of ``state``: keep both as long as the plan may run.

        Args:
            bounds: start and length of each shard, flat.
            row_shape: shape of one position; tensors are ``(positions, *row_shape)``.
            state: CPU int64 tensor of one element that the group owns; None: calls are neither counted nor held back.

        Raises:
            ValueError: too many dimensions.
        """
        if len(row_shape) > MAX_ROW_DIMS:
            raise ValueError(f"row_shape: {len(row_shape)} dimensions, at most {MAX_ROW_DIMS} can be bound")
        like = [torch.empty(0, dtype=dtype, device=self._owner.device) for dtype in self._dtypes]
        return peer_bind(self._plan, bounds, row_shape, *like, 0 if state is None else state.data_ptr())


def plan_words(
    plan: ExchangePlan,
    m: Message,
    shape: Shape,
    layout: MemoryLayout,
    addresses: Addresses,
    rank: int,
    codes: tuple[int, int],
    mean: bool = False,
    scale: float | None = None,
    timeout: float = 1.0,
    signature: int = 0,
) -> list[int]:
    """A plan as csrc/peer/plan.h reads it, for process ``rank``. ``codes``: of the dtypes of rows and results.

    Raises:
        ValueError: more rows or outputs than there is memory for.
    """
    hosted, sinks = plan.hosted_sources(rank), plan.hosted_sinks(rank)
    if max(len(hosted), len(sinks)) > MAX_HOSTED:
        raise ValueError(f"peer transport: more than {MAX_HOSTED} rows or outputs on one process")
    most = max(map(plan.source_owners.count, plan.source_owners), default=0)
    if len(plan.sources) > layout.num_ranks or most > layout.rows_per_process:
        raise ValueError(
            f"peer transport: {len(plan.sources)} rows, {most} on a process; there is memory for {layout.num_ranks}, "
            f"{layout.rows_per_process} on a process"
        )
    (scale_bits,) = struct.unpack("<q", struct.pack("<d", 1.0 if scale is None else scale))
    t, at = shape.tiles, layout.regions
    staging_at, half_bytes, slot_bytes = at.staging_at, at.staging, layout.row_bytes
    own_slots = not shape.write
    if shape.push:
        staging_at, half_bytes, slot_bytes = at.inbox_at, at.inboxes, layout.inbox_row_bytes
        own_slots = layout.inbox_rows < layout.num_ranks
    elif shape.two_shot:
        slot_bytes = layout.part_bytes
    places = [plan.source_owners[:r].count(owner) for r, owner in enumerate(plan.source_owners)]
    slots = places if own_slots else range(len(places))
    needs = [(0, m.size)] * len(places)
    if not m.replicated:
        needs = [needed(plan, r, interval) for r, interval in enumerate(plan.sources)]
    parts: list[Sequence[float]] = [
        (PLAN_VERSION, 0, addresses.host, shape.chunk, signature),
        (*codes, m.in_bytes, m.out_bytes, m.move, shape.two_shot, shape.push, shape.write),
        (mean, scale is not None, scale_bits),
        (m.size, m.width, *gap_of(plan, 1 - rank), *gap_of(plan, rank)),
        (t.tile, t.stretch, t.stretches_per_tile, t.columns, t.tiles_per_piece, t.blocks, at.max_blocks),
        (layout.tuning.threads, shape.producers),
        (at.stages_at, at.abort_at, staging_at, at.reduced_at),
        (half_bytes, slot_bytes, at.reduced),
        (addresses.control, addresses.failure, round(timeout * 1e9)),
        (MAX_RANKS, len(plan.sources), layout.world_size, rank, len(hosted), len(sinks)),
        addresses.blocks,
        *((*row, *need) for row, need in zip(zip(plan.source_owners, places, slots), needs)),
        hosted,
        *(plan.sinks[q] for q in sinks),
    ]
    return [int(word) for part in parts for word in part]
