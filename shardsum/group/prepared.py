"""What every prepared exchange has (:mod:`.executor`), and the fast path of a plan over peer memory: one operator that
looks at its tensors itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.layout import ExchangePlan, length
from ..transports import TRANSPORTS
from ..transports.peer.operators import peer_call, peer_call_new, peer_call_new_list
from .handle import Job
from .routes import Route, stamp_of
from .terms import Terms

if TYPE_CHECKING:
    from .executor import Executor
    from .planner import Planner


class Prepared:
    """One exchange with everything decided that does not depend on the tensors of a call.

    Attributes:
        route: how it travels.
        shapes: of every hosted sink's result.
    """

    def __init__(self, executor: Executor, terms: Terms, plan: ExchangePlan, route: Route) -> None:
        self.route, self._executor, self._plan, self._reduce = route, executor, plan, terms.reduce
        self._sinks = plan.hosted_sinks(executor.rank)
        self.shapes = [(length(plan.sinks[q]), *terms.row_shape) for q in self._sinks]
        self._width = torch.Size(terms.row_shape).numel()
        self._is_empty = not self._width or not any(length(sink) for sink in plan.sinks)
        self._stamp, self._terms = stamp_of(terms, plan, route), terms

    def _cut_to(self, transport: str, cuts: Sequence[ExchangePlan]) -> None:
        """Let rows travel in these chunks."""
        terms, rank, wire = self._terms, self._executor.rank, self._executor.wire
        head = 0 if wire is None else wire.header_bytes
        made, shape = TRANSPORTS[transport], tuple(terms.row_shape)
        self._chunks = [(cut, made(cut, rank, shape, terms.dtype, head)) for cut in cuts]

    def _arriving(self, shards: Sequence[Tensor]) -> Iterator[Any]:
        """None, once the first transfers have started. Then every chunk with the rows of the hosted sinks; while they
        are summed, those of the next chunk travel."""
        wire, ((cut, transport), *later) = self._executor.wire, self._chunks
        pending = transport.start(shards, wire)
        yield None
        for next_cut, transport in later:
            ahead = transport.start(shards, wire)
            yield cut, pending.wait(wire)
            cut, pending = next_cut, ahead
        yield cut, pending.wait(wire)

    def start(self, shards: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        """Begin the exchange of contiguous shards ``(|I_r|, *F)``. With lengths on the device it is that of
        ``[x (k, S_MAX, *F), lengths (k,)]``, and all lengths ``(R',)`` follow the results.

        ``outs``, contiguous and without lazy signs, may be filled in place of new tensors: the result says whether
        they were.
        """
        raise NotImplementedError

    def bind(self) -> tuple[Tensor, bool] | None:
        """The plan tensor of :mod:`shardsum.transports.peer.operators`, and whether it has one row and one result; None
        where there is none. To be made after the first call."""
        return None

    def _results(self, first: Tensor, outs: Sequence[Tensor] | None) -> list[Tensor]:
        if outs is not None:
            return list(outs)
        return [first.new_empty(shape, dtype=self._reduce.dtype) for shape in self.shapes]


def launch(planner: Planner, bound: Tensor, single: bool, shards: Any, out: Any) -> Tensor | list[Tensor] | None:
    """The result of a plain call, of a list of shards one a hosted sink; None, and nothing has happened, where anything
    is unusual. ``bound`` and ``single`` are of :meth:`.Prepared.bind`."""
    several = type(shards) is list
    if planner.always_agrees or forward_ad._current_level >= 0 or (out is not None if several else not single):
        return None
    for shard in shards if several else (shards,):
        if type(shard) is not Tensor or not shard.is_contiguous():
            return None
        if shard.requires_grad and torch.is_grad_enabled():
            return None
    planner.announce_call()
    try:
        if out is None:
            return peer_call_new_list(shards, bound) if several else peer_call_new(shards, bound)
        if type(out) is not Tensor or out.requires_grad:
            return None
        peer_call(out, shards, bound)
    except RuntimeError:
        planner.check_peers()
        return None
    torch._C._increment_version((out,))  # autograd must notice when it has saved the values that are gone
    return out
