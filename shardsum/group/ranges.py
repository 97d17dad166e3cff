"""Named ranges around collectives, for torch.profiler and for whatever listens to it.

    shardsum.all_reduce (all_to_all, sends 4194304 bytes)

``torch.autograd.profiler.emit_nvtx()`` makes NVTX ranges of them. A call without a profiler looks at one flag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler
from torch.profiler import record_function

if TYPE_CHECKING:
    from .plan import Plan

_NO_RANGE = nullcontext()


def name_of(plan: Plan[Any]) -> str:
    """Collective, the user's name of it, transport, and the bytes that this process sends."""
    terms, made = plan.terms, plan.explain()
    name = terms.name if terms.label is None else f"{terms.name} {terms.label!r}"
    return f"shardsum.{name} ({made.route.transport}, sends {made.route.egress[plan.rank]} bytes)"


def range_of(plan: Plan[Any]) -> AbstractContextManager[Any]:
    """The range of a call; without a profiler a context that does nothing."""
    return record_function(plan.range_name) if profiler._is_profiler_enabled else _NO_RANGE
