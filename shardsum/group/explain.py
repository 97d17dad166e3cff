"""What a collective moved, what one would move, and named ranges around calls for torch.profiler and its listeners:

    shardsum.all_reduce (all_to_all, sends 4194304 bytes)

``torch.autograd.profiler.emit_nvtx()`` makes NVTX ranges of them. A call without a profiler looks at one flag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler
from torch.profiler import record_function

from ..transports.domains import Domains
from .routes import Route

if TYPE_CHECKING:
    from .plan import Plan

_NO_RANGE = nullcontext()


@dataclass(frozen=True, repr=False)
class Stats:
    """Bytes of the last collective.

    Attributes:
        route: the transport taken, and what every process sends and receives by its plan.
        sent, received: bytes this process handed to and took from the backend; 0 for peer, whose kernels move rows.
    """

    route: Route
    sent: int
    received: int

    @property
    def total(self) -> int:
        """Bytes on all wires together."""
        return sum(self.route.egress)

    def __repr__(self) -> str:
        return (
            f"Stats(transport={self.route.transport!r}, sent={self.sent}, received={self.received}, total={self.total})"
        )


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a call would do, to be read."""

    collective: str
    route: Route
    virtual_ranks_per_process: float
    domains: Domains

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        r = self.route
        shots = f"{len(r.carry.runs)} runs" if r.carry is not None else "two-shot" if r.two_shot else "one-shot"
        lines = [
            f"{self.collective} by {r.transport} ({shots}, {r.chunks} chunk{'s' * (r.chunks > 1)}): {r.reason}",
            f"bytes: {sum(r.egress)} in total; busiest process sends {max(r.egress)}, receives {max(r.ingress)}",
        ]
        if self.domains.count > 1:
            lines.append(self.domains.describe())
            if r.load is not None:
                lines[-1] += f"; bytes inside them {r.load.inside}, between them {r.load.between}"
        hosts = f"each process hosts {self.virtual_ranks_per_process:g} virtual rank"
        hosts += "s" * (self.virtual_ranks_per_process != 1)
        if r.carry is not None:
            lines.append(
                f"{hosts}; a run of ranks sends one unrounded accumulator an element, in the order of the ranks"
            )
        elif r.transport != "local":
            lines.append(
                f"{hosts} and sends that many rows an element "
                "(nothing is summed before it travels: the order of additions is the ranks')"
            )
        return "\n".join(lines)


def name_of(plan: Plan[Any]) -> str:
    """Collective, the user's name of it, transport, and the bytes that this process sends."""
    terms, made = plan.terms, plan.explain()
    name = terms.name if terms.label is None else f"{terms.name} {terms.label!r}"
    return f"shardsum.{name} ({made.route.transport}, sends {made.route.egress[plan.rank]} bytes)"


def range_of(plan: Plan[Any]) -> AbstractContextManager[Any]:
    """The range of a call; without a profiler a context that does nothing."""
    return record_function(plan.range_name) if profiler._is_profiler_enabled else _NO_RANGE
