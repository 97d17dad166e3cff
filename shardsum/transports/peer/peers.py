"""The peer transport of one group: whether it can be had, its set-up at first use, and what goes through it.

:class:`shardsum.transports.peer.PeerTransport` moves and sums in one launch, so it yields no rows: the engine hands it
whole exchanges. Set-up allocates memory that all processes map and is collective; it happens in the first call that
takes this way, which all processes make together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.layout import ExchangePlan, intervals_of, length
from ...local.ops import readable
from . import shapes as peer_plan
from .memory import Gather
from .transport import PeerTransport, PreparedCall, Tuning, available


class Peers:
    """Args:
        group: the processes.
        gather: every process's value of a small object, by process, for set-up.
        owners: the process of every virtual rank.
        device: this process's GPU.
        timeout: seconds that a kernel waits for another process.

    Attributes:
        reason: why the transport cannot be used, or None; the same on all processes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gather: Gather,
        owners: Sequence[int],
        device: torch.device,
        timeout: float,
    ) -> None:
        self._arguments = (group, tuple(owners), device)
        self._gather, self._timeout = gather, timeout
        self._transport: PeerTransport | None = None
        self._hosted = max(owners.count(p) for p in range(dist.get_world_size(group)))
        self.reason = self._too_many(len(owners)) or available(group, device, self._gather)

    def _too_many(self, num_ranks: int) -> str | None:
        if num_ranks > peer_plan.MAX_RANKS or self._hosted > peer_plan.MAX_HOSTED:
            return f"at most {peer_plan.MAX_RANKS} virtual ranks, {peer_plan.MAX_HOSTED} on a process"
        return None

    @property
    def transport(self) -> PeerTransport:
        """The transport, set up at first use. Collective then."""
        if self._transport is None:
            group, owners, device = self._arguments
            self._transport = PeerTransport(group, owners, device, timeout=self._timeout, gather=self._gather)
        return self._transport

    def check(self) -> None:
        """Raise RuntimeError when a kernel waited in vain."""
        if self._transport is not None:
            self._transport.check()

    def exchange(
        self,
        plan: ExchangePlan,
        shards: Sequence[Tensor],
        outs: Sequence[Tensor],
        op: str,
        scale: float | None,
        lengths: Tensor | None = None,
        *,
        number: int = 0,
        signature: int = 0,
    ) -> None:
        """Run one exchange on the current stream; arguments as :meth:`PeerTransport.exchange`."""
        rows = list(shards) if op == "copy" else [readable(s) for s in shards]
        self.transport.exchange(
            plan, rows, outs, op=op, scale=scale, lengths=lengths, number=number, signature=signature
        )

    def prepare(
        self,
        plan: ExchangePlan,
        width: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str,
        scale: float | None,
        signature: int = 0,
    ) -> tuple[PreparedCall, list[int]]:
        """Such an exchange with nothing left to decide, and the bounds of this process's sources: start and length
        each. ``prepared(outs, shards, bounds)`` runs it; :meth:`.PreparedCall.bind` makes the operators' plan of it."""
        prepared = self.transport.prepare(plan, width, dtype, out_dtype, op, scale, signature=signature)
        held = [plan.sources[r] for r in plan.hosted_sources(self.transport.rank)]
        return prepared, [bound for begin, end in held for bound in (begin, end - begin)]

    def gather_lengths(self, plan_of: ExchangePlan, lengths: Tensor, number: int = 0) -> Tensor:
        """The ``(R,)`` lengths of all virtual ranks from each process's hosted ones, unread by the host."""
        count = len(plan_of.source_owners)
        sinks = ((0, count),) * plan_of.world_size
        owners = tuple(range(plan_of.world_size))
        plan = ExchangePlan(tuple(intervals_of([1] * count)), plan_of.source_owners, sinks, owners, plan_of.world_size)
        out = torch.empty(count, dtype=lengths.dtype, device=lengths.device)
        self.exchange(plan, list(lengths.split(1)), [out], "copy", None, number=number)
        return out

    def predict(
        self, plan: ExchangePlan, width: int, in_bytes: int, out_bytes: int, move: bool
    ) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """``(two_shot, egress, ingress)``: bytes of rows and results from each process to others, and from them to it.

        What is read is what its reader wants. What is pushed or written is the hull of what others want of a row, and
        goes to all of them."""
        owners = self._arguments[1]
        message = peer_plan.describe_message(plan, width, in_bytes, out_bytes, move)
        tuning = Tuning()
        limit = tuning.push_limit(plan.world_size)
        layout = peer_plan.MemoryLayout(len(owners), plan.world_size, 1, self._hosted, 1 << 20, limit)
        processes = range(plan.world_size)
        if not peer_plan.takes_two_shot(message, layout, tuning):
            unread = max(tuning.stream_processes, tuning.write_processes)
            if peer_plan.is_pushed(message, layout) or plan.world_size <= unread:
                return False, *self._sent_to_all(plan, width * in_bytes)
            egress = tuple(plan.egress(p) * width * in_bytes for p in processes)
            return False, egress, tuple(plan.ingress(p) * width * in_bytes for p in processes)
        others, part = plan.world_size - 1, length(plan.sinks[0]) / plan.world_size
        held = [sum(length(plan.sources[r]) for r in plan.hosted_sources(p)) for p in processes]
        shared = part * others * width * out_bytes
        read = [(sum(held) - h) / plan.world_size * width * in_bytes for h in held]
        given = [h * others / plan.world_size * width * in_bytes for h in held]
        return True, tuple(int(g + shared) for g in given), tuple(int(r + shared) for r in read)

    def _sent_to_all(self, plan: ExchangePlan, position_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes from each process, and to it, where the needed part of every row goes to all others."""
        parts = [length(peer_plan.needed(plan, r, held)) * position_bytes for r, held in enumerate(plan.sources)]
        sent = [sum(parts[r] for r in plan.hosted_sources(p)) for p in range(plan.world_size)]
        return tuple(n * (plan.world_size - 1) for n in sent), tuple(sum(sent) - n for n in sent)
