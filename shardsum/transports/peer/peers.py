"""The peer transport of one group: whether it can be had, its set-up at first use, and what goes through it.

:class:`shardsum.transports.peer.PeerTransport` moves and sums in one launch, so it yields no rows: the engine hands it
whole exchanges. Set-up allocates memory that all processes map and is collective; it happens in the first call that
takes this way, which all processes make together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.layout import ExchangePlan, intervals_of
from ...local.ops import readable
from .layout import MAX_HOSTED, MAX_RANKS, MemoryLayout, choose_regions, default_staging
from .members import Group, place_in
from .memory import Gather, available
from .prepared import PreparedCall
from .traffic import predict
from .transport import PeerTransport
from .tuning import Tuning


class Peers:
    """Args:
        group: the processes.
        gather: every process's value of a small object, by process, for set-up.
        owners: the process of every virtual rank.
        device: this process's GPU.
        timeout: seconds that a kernel waits for another process.
        workspace_bytes: as in :class:`.PeerTransport`.

    Attributes:
        reason: why the transport cannot be used, or None; the same on all processes.
    """

    def __init__(
        self,
        group: Group,
        gather: Gather,
        owners: Sequence[int],
        device: torch.device,
        timeout: float,
        workspace_bytes: int | None = None,
    ) -> None:
        self._arguments = (group, tuple(owners), device)
        self._gather, self._timeout, self._most_bytes = gather, timeout, workspace_bytes
        self._transport: PeerTransport | None = None
        self._tuning = Tuning()
        _, world_size = place_in(group)
        hosted = max(owners.count(p) for p in range(world_size))
        if len(owners) > MAX_RANKS or hosted > MAX_HOSTED:
            self.reason: str | None = f"at most {MAX_RANKS} virtual ranks, {MAX_HOSTED} on a process"
            return
        self.reason = available(group, device, self._gather)
        # As it will be, but for the number of blocks, on which no way depends.
        regions = choose_regions(len(owners), world_size, 1, hosted, self._tuning, default_staging(world_size))
        self._layout = MemoryLayout.in_regions(regions, len(owners), hosted, self._tuning)

    @property
    def transport(self) -> PeerTransport:
        """The transport, set up at first use. Collective then."""
        if self._transport is None:
            group, owners, device = self._arguments
            self._transport = PeerTransport(
                group,
                owners,
                device,
                timeout=self._timeout,
                workspace_bytes=self._most_bytes,
                tuning=self._tuning,
                gather=self._gather,
            )
        return self._transport

    @property
    def workspace_bytes(self) -> int:
        """What the workspace takes on this process; 0 before its set-up."""
        return 0 if self._transport is None else self._transport.workspace_bytes

    def close(self) -> None:
        """Give the workspace back, if it was set up: :meth:`.PeerTransport.close`. Collective."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def check(self) -> None:
        """Raise RuntimeError when a kernel timed out waiting for another process."""
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
        goes_on: bool = False,
    ) -> tuple[PreparedCall, list[int]]:
        """Such an exchange with nothing left to decide, and the bounds of this process's sources: start and length
        each. ``prepared(outs, shards, bounds)`` runs it; :meth:`.PreparedCall.bind` makes the operators' plan of it.
        ``goes_on``: it is given accumulators."""
        prepared = self.transport.prepare(
            plan, width, dtype, out_dtype, op, scale, signature=signature, goes_on=goes_on
        )
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
        """``(two_shot, egress, ingress)``: by process, bytes of rows and results to others, and from them."""
        layout = self._layout if self._transport is None else self._transport.layout
        found = predict(plan, layout, self._tuning, width, in_bytes, out_bytes, move)
        return found.way == "two-shot", found.egress, found.ingress
