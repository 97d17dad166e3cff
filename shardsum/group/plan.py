"""A plan: one collective with everything decided, held by whoever repeats it.

``group.plan(...)`` checks the arguments, compares them with the other processes', chooses the transport and works out
who sends what to whom. Calling the plan does none of that again. The group's collectives look a plan up, make it if it
is new, and call it: there is no other road.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import profiler

from ..core.checks import needs_grad
from ..core.layout import length
from .arguments import Shards, check_device_lengths, hosted_shards
from .autograd import Exchange, PaddedExchange
from .exchanges import Prepared, launch, prepare
from .explain import Explanation, Stats, name_of, range_of
from .forms import Tensors, deliver, fillable, is_single, movable, stack, traced
from .handle import Handle, Job, start_on_cpu, start_on_stream
from .padded import PreparedPadded
from .terms import Terms

if TYPE_CHECKING:
    from .planner import Planner

_is_compiling = torch.compiler.is_compiling
#: What a list of shards gives: a Tensor (all_reduce, all_gather), or a list of them.
R = TypeVar("R")


class Plan(Generic[R]):
    """Made by :meth:`shardsum.ShardGroup.plan`; call it with the shards of this process.

    It works in eager code, under autograd, inside ``torch.compile(fullgraph=True)``, and in CUDA graph capture once it
    has run. It belongs to its group: where that has failed or was closed, a call raises the group's error.

    Attributes:
        terms: what is computed.
        bounds: ``(begin, length)`` in global positions of every hosted source.

    Example:
        >>> group = ShardGroup(3)
        >>> plan = group.plan("all_reduce", [3, 2, 1], row_shape=(), dtype=torch.float32)
        >>> plan([torch.tensor([10.0, 11.0, 12.0]), torch.tensor([20.0, 21.0]), torch.tensor([40.0])])
        tensor([70., 32., 12.])
    """

    def __init__(self, planner: Planner, terms: Terms) -> None:
        self.terms, self._planner = terms, planner
        self.virtual_ranks, self.device, self.owners = planner.virtual_ranks, planner.device, planner.owners
        self.rank, layout = planner.rank, planner.layout(terms)
        self.bounds = [(layout.sources[r][0], length(layout.sources[r])) for r in layout.hosted_sources(self.rank)]
        self.tensors = Tensors(planner, terms, self.bounds, [layout.sinks[q] for q in layout.hosted_sinks(self.rank)])
        #: Where rows and results travel over peer memory: the operators' plan, after one call.
        self._bound: tuple[Tensor, bool] | None = None
        #: Whether processes have agreed on calls without and with a gradient that is a collective. That on a plan
        #: covers its adjoint.
        self._agreed = [terms.grad == "adjoint"] * 2

    @cached_property
    def _prepared(self) -> Prepared:
        if self.terms.device_lengths:
            return PreparedPadded(self._planner, self.terms)
        return prepare(self._planner, self.terms, self.device.type)

    #: What profiles call a call of this plan, and the number of the group's current call.
    range_name = cached_property(name_of)
    call = property(lambda self: self._planner.agreement.call)

    def origin_of_operator(self) -> int:
        """What the current call belongs to, which a registered operator makes: notes it, or finds what was noted."""
        return self._planner.agreement.regions.of_operator(self.call)

    # Calls

    @overload
    def __call__(
        self, shards: Tensor, out: Tensor | Sequence[Tensor] | None = ..., *, lengths: Tensor | None = ...
    ) -> Tensor: ...
    @overload
    def __call__(
        self, shards: Sequence[Tensor], out: Tensor | Sequence[Tensor] | None = ..., *, lengths: Tensor | None = ...
    ) -> R: ...
    def __call__(self, shards: Shards, out: Any = None, *, lengths: Tensor | None = None) -> Any:
        """Run the collective. Collective: all processes call the same plans in the same order.

        Args:
            shards: one Tensor ``(n, *F)`` a hosted virtual rank, n at least its length (what lies behind is not read):
                a list in increasing virtual-rank order, one Tensor where this process hosts one virtual rank, or a
                stacked one ``(k, S_MAX, *F)``.
            out: receives the result in place of a new tensor; for reduce_scatter and exchange a list with one Tensor a
                hosted virtual rank (or the Tensor where there is one). Not where a gradient is needed.
            lengths: for a plan with device lengths only, ``(k,)`` integers on the shards' device.

        Returns:
            One Tensor for all_reduce and all_gather. Else one a hosted virtual rank: a list, or a Tensor where
            ``shards`` was one and this process hosts one virtual rank.

        Raises:
            ValueError: shards, out or lengths do not fit the plan. Raised on every process where it is the first call.
            RuntimeError: the group has failed, or another process is missing or runs another call.
        """
        run = self._traced if _is_compiling() else self.run_call
        return run(shards, out, lengths)

    def run_call(
        self, shards: Shards, out: Any, lengths: Tensor | None, in_range: bool = False, origin: int = 0
    ) -> Any:
        """An eager call. ``origin``: the number of the call whose backward it is."""
        if profiler._is_profiler_enabled and not in_range:
            with range_of(self):
                return self.run_call(shards, out, lengths, True, origin)
        planner, name = self._planner, self.terms.name
        planner.enter(name)
        planner.agreement.origin = origin or planner.agreement.origin
        try:  # as ``with planner.calling(name)``, in half the time
            if self._bound is not None and lengths is None and self._agreed[False]:
                result = launch(self._planner, *self._bound, shards, out)
                if result is not None:
                    return result[0] if type(result) is list and self.terms.replicated else result
            hosted, outs, given = self._check(shards, out, lengths)
            self._agree(hosted)
            results = None if needs_grad(hosted) else self._run(hosted, outs, given)
        except ValueError:
            raise
        except BaseException as error:
            planner.fail(name, error)
            raise
        finally:
            planner.leave()
        if results is None:  # hooks of autograd may raise: by now the call is over
            results = self._record(hosted, given)
        return deliver(results, self.terms, out, is_single(shards, planner, self.terms))

    def on_list(self, shards: list[Tensor], origin: int = 0, lengths: Tensor | None = None) -> list[Tensor]:
        """A call with one Tensor a hosted source that gives one a hosted sink, whatever the collective's form."""
        given: Shards = shards[0] if len(shards) == 1 else shards
        outs: Any = self(given) if _is_compiling() else self.run_call(given, None, lengths, origin=origin)
        return outs if isinstance(outs, list) else [outs]

    @overload
    def start(
        self, shards: Tensor, out: Tensor | Sequence[Tensor] | None = ..., *, lengths: Tensor | None = ...
    ) -> Handle[Tensor]: ...
    @overload
    def start(
        self, shards: Sequence[Tensor], out: Tensor | Sequence[Tensor] | None = ..., *, lengths: Tensor | None = ...
    ) -> Handle[R]: ...
    def start(self, shards: Shards, out: Any = None, *, lengths: Tensor | None = None) -> Handle[Any]:
        """Begin the collective; ``wait()`` of the handle gives the result. Not with shards that require grad.

        The group's next call begins when this one's transfers have started. Until ``wait()`` write to no shard, and
        neither read nor write ``out``. The lists, and ``lengths``, are free again at once.
        """
        if _is_compiling():
            result = self._traced(shards, out, lengths)
            return Handle(lambda: result)
        planner, terms = self._planner, self.terms
        with planner.calling(terms.name), range_of(self):
            hosted, outs, given = self._check(shards, out, lengths)
            if needs_grad(hosted):
                raise planner.refuse(terms.name, ValueError("async_op: not possible with shards that require grad"))
            self._agree(hosted)
            kept = outs if isinstance(out, (list, tuple)) else out
            single, count = is_single(shards, planner, terms), self.tensors.num_results
            give = lambda results: deliver(results[:count], terms, kept, single)  # noqa: E731
            if hosted[0].is_cuda:
                given = None if given is None else given.clone()
                tensors = [*hosted, *(outs or []), *([] if given is None else [given])]
                stream = planner.stream(hosted[0].device)
                return start_on_stream(stream, tensors, lambda: self._run(hosted, outs, given), give)
            return start_on_cpu(planner, terms.name, self._begin(_joined(hosted, given), fillable(outs)), give)

    @cached_property
    def adjoint(self) -> Plan:
        """The exchange with inputs and outputs swapped: what backward runs. Of a mean, the sum before its division."""
        return self.of(self.terms.adjoint())

    def again(self, dtype: torch.dtype) -> Plan:
        """The same collective with results of ``dtype``, for second derivatives."""
        name, reduce = f"second derivative of {self.terms.name}", replace(self.terms.reduce, dtype=dtype)
        return self.of(replace(self.terms, name=name, reduce=reduce))

    def of(self, terms: Terms) -> Plan:
        """The plan of other terms in the same group. Not collective: the agreement on this plan covers it."""
        return self._planner.derived(terms)

    def explain(self) -> Explanation:
        """Which transport the plan takes and why, with the bytes that it moves."""
        ratio = self._planner.num_virtual_ranks / self._planner.world_size
        return Explanation(self.terms.name, self._prepared.route, ratio, self._planner.router.domains)

    def stats(self) -> Stats:
        """As of the group."""
        return self._planner.stats()

    def __repr__(self) -> str:
        terms = self.terms
        return f"Plan({terms.name}, size={terms.size}, row_shape={terms.row_shape}, dtype={terms.dtype})"

    def _traced(self, shards: Shards, out: Any, lengths: Tensor | None) -> Any:
        planner, terms = self._planner, self.terms
        hosted = hosted_shards(shards, self.tensors.sources(), planner.shard_device, len(terms.row_shape))
        return deliver(traced(planner, terms, hosted, lengths), terms, out, is_single(shards, planner, terms))

    def _begin(self, tensors: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Job:
        """The rest of a call, without autograd, of what :meth:`.exchanges.Prepared.start` takes."""
        return self._prepared.start(movable(tensors), outs)

    def _check(
        self, shards: Shards, out: Any, lengths: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor] | None, Tensor | None]:
        try:
            hosted = self.tensors.take(shards)
            if (lengths is not None) != self.terms.device_lengths:
                expected = "device lengths" if self.terms.device_lengths else "no lengths: they are part of the plan"
                raise ValueError(f"lengths: this plan takes {expected}")
            if lengths is not None:
                lengths = check_device_lengths(lengths, hosted)
            outs = self.tensors.take_outs(hosted, out)
        except Exception as error:
            raise self._planner.refuse(self.terms.name, error) from error
        return hosted, outs, lengths

    def _agree(self, hosted: list[Tensor]) -> None:
        """Compare with the other processes where that has not been done for such a call (or always)."""
        terms, planner = self.terms, self._planner
        collective_gradient = not terms.local_adjoint and needs_grad(hosted)
        if planner.always_agrees or not self._agreed[collective_gradient]:
            planner.agree(terms, collective_gradient)
            self._agreed[collective_gradient] = True

    def mark_agreed(self, collective_gradient: bool) -> None:
        self._agreed[collective_gradient] = True

    def _run(self, hosted: list[Tensor], outs: list[Tensor] | None, lengths: Tensor | None) -> list[Tensor]:
        results = self._begin(_joined(hosted, lengths), fillable(outs)).result()
        if self._bound is None and self._prepared.route.transport == "peer":
            self._bound = self._prepared.bind()
        return results if lengths is None else results[:-1]

    def _record(self, hosted: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
        if lengths is not None:
            return list(PaddedExchange.apply(self, stack(hosted), lengths)[:-1])
        return list(Exchange.apply(self, *hosted))

    def run_recorded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What autograd's functions run: the rest of a call that was checked and agreed on."""
        with self._planner.calling(self.terms.name, begun=True):
            return self._begin(tensors).result()

    def execute(self, shards: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
        """A call without autograd that gives one result a hosted sink, for the registered operators, of valid rows or
        more of every hosted source; with lengths on the device all lengths follow."""
        planner, name = self._planner, self.terms.name
        with planner.calling(name), range_of(self):
            try:
                rows = self.tensors.take(shards)
            except Exception as error:
                raise planner.refuse(name, error) from error
            self._agree(rows)
            planner.agreement.origin = planner.agreement.origin or self.origin_of_operator()
            return self._begin(_joined(rows, lengths)).result()


def _joined(hosted: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    return hosted if lengths is None else [stack(hosted), lengths]
