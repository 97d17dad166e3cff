"""The hosted virtual ranks' functions side by side in one thread: the forwards of unmodified models.

A collective takes the shards of all virtual ranks that a process hosts at once. The forward of an unmodified model
calls it deep inside a layer, with one virtual rank's tensors. ``group.lockstep(functions)`` runs one function a hosted
virtual rank, each as a coroutine (greenlet). A function that reaches a *meeting point* with its one tensor waits there
until the functions of all hosted ranks have arrived at the same call; then that call runs once, on the list of their
tensors, and each goes on with its own part. Meeting points are ``exchange``, ``reduce_scatter``, ``all_gather`` and
``all_reduce`` of the group, :func:`shardsum.context_parallel_attention`, the calls of a batch
(``group.context_parallel``), and ``group.checkpoint``.

**Bits.** Autograd runs a graph's nodes in the reverse of the order in which one thread made them. Between two meetings
the functions run one after the other, so each rank's nodes keep the order that they have alone, and so do the sums
that autograd makes of gradients. (Threads would lose it: nodes are numbered per thread.) Give every virtual rank its
own module (``group.replicas(model)``): gradients of a shared one are added by autograd.

**State of the thread.** Grad mode and autocast belong to each function: they are switched with it, and functions that
meet must have the same. Around each function its virtual rank's random streams are current (``group.rng``), with one
hosted rank as well. Modes of torch and hooks on saved tensors are entered around ``group.lockstep``, not inside.

**Activation checkpointing.** ``torch.utils.checkpoint`` computes a layer of one virtual rank again, inside the
backward, where its collective call would wait for the others forever. ``group.checkpoint`` is a meeting point
instead: one torch checkpoint holds the layer of all hosted ranks, and its recomputation is a lockstep of its own. So a
process makes the same collective calls in its backward whatever number of ranks it hosts. Random streams are set back
for the recomputation.

**torch.compile.** A compiled graph is one node of autograd. With a meeting point inside, its backward would have to
wait in the middle for those of other ranks, which the autograd engine runs one after the other. So a batch's attention
ends the graph: eager code makes the call, and another graph follows. ``fullgraph=True`` is torch's error with that
reason. Other meeting points in compiled code are refused.

Backward runs after ``group.lockstep`` has returned, once, from the losses of all hosted ranks together.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .modes import Modes, is_compiled

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup
    from .shard_group import ShardGroup

#: ``outside_graphs(call, *args, **options)``: that call, which torch.compile leaves to eager code. None before the
#: first lockstep in a program that has imported torch's compiler: to import it takes seconds.
outside_graphs: Callable[..., Any] | None = None

#: Collectives whose shards may be a lone virtual rank's Tensor while a lockstep runs.
_COLLECTIVES = ("exchange", "reduce_scatter", "all_gather", "all_reduce")


def run(group: ShardGroup, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What ``group.lockstep(functions)`` returns (:meth:`shardsum.ShardGroup.lockstep`)."""
    functions, ranks = list(functions), group.virtual_ranks
    if len(functions) != len(ranks) or not all(map(callable, functions)):
        raise ValueError(f"functions: expected {len(ranks)} callables, one for each of virtual ranks {list(ranks)}")
    if len(functions) == 1:
        with group.rng(ranks[0]):
            return [functions[0]()]
    if running(group) is not None:
        raise ValueError("lockstep: called inside a function of a lockstep of the same group")
    return Lockstep(group, functions).run()


def running(group: CollectiveGroup) -> Lockstep | None:
    """The lockstep one of whose functions is running now; None outside, and while a call runs for all of them."""
    return getattr(group, "_lockstep", None)


@dataclass
class _Call:
    """A call at which a function waits: ``call(*lists, *args, **options)`` runs it for all of them."""

    name: str
    call: Callable[..., Any]
    hosted: tuple[Any, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    modes: Modes

    def same_as(self, other: _Call) -> bool:
        mine, theirs = (self.name, self.modes), (other.name, other.modes)
        return (
            mine == theirs
            and self.call == other.call
            and _equal([self.args, self.options], [other.args, other.options])
        )

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.options.items())]
        return f"{self.name}({', '.join(['...', *given])}), {self.modes}"


class Lockstep:
    """One run of the hosted ranks' functions. Attributes are for this module; :meth:`meet` is for meeting points."""

    def __init__(self, group: ShardGroup, functions: Sequence[Callable[[], Any]]) -> None:
        try:
            from greenlet import GreenletExit, greenlet
        except ImportError as error:
            raise ImportError('lockstep needs the package greenlet: pip install "shardsum[models]"') from error
        global outside_graphs
        if outside_graphs is None and "torch._dynamo" in sys.modules:
            outside_graphs = torch.compiler.disable(_call, reason="in a lockstep it waits for other functions")
        self._group, self._ranks = group, group.virtual_ranks
        self._outside = Modes.now(group.device)
        self._modes = [self._outside] * len(functions)
        self._calls: list[_Call | None] = [None] * len(functions)
        self._results: list[Any] = [None] * len(functions)
        self._coroutines = [greenlet(partial(self._function, i, f)) for i, f in enumerate(functions)]
        for coroutine in self._coroutines:
            coroutine.gr_context = contextvars.copy_context()
        self._index, self._exit = -1, GreenletExit
        self._closed = False

    def run(self) -> list[Any]:
        """Run all functions to their ends."""
        values: list[Any] = [None] * len(self._ranks)
        error: Exception | None = None
        try:
            while True:
                for i in range(len(self._ranks)):
                    self._resume(i, values[i], error)
                if all(c is None for c in self._calls):
                    return self._results
                self._check_same()
                error = None
                try:
                    values = self._call()
                except Exception as raised:  # every function's call raises it, as it would with a rank a process
                    error = raised
        finally:
            self._close()

    def meet(
        self, name: str, call: Callable[..., Any], hosted: Sequence[Any], args: Sequence[Any] = (), **options: Any
    ) -> Any:
        """Wait for the other functions' same call, and return this function's part of its result.

        Args:
            name: of the call, for errors.
            call: ``call(*lists, *args, **options)``: each of ``lists`` holds one of ``hosted`` of every function, in
                virtual-rank order. It returns a list by function, tuples of such lists, or what is common to all.
            hosted: what belongs to this function's virtual rank.
            args, options: what must be equal for all functions.
        """
        i = self._index
        if is_compiled():
            raise ValueError(
                f"{name}: virtual rank {self._ranks[i]} calls it in a lockstep inside code under torch.compile, where "
                "only a batch's attention can wait for other functions; compile what lies between such calls, or host "
                "one virtual rank a process"
            )
        modes = Modes.now(self._group.device)
        if self._closed:
            raise RuntimeError(f"{name}: virtual rank {self._ranks[i]} calls it while its lockstep ends")
        if modes.stacks != self._outside.stacks:
            raise ValueError(
                f"{name}: virtual rank {self._ranks[i]} calls it under torch.utils.checkpoint, hooks on saved tensors "
                "or a mode of torch that was entered in its function, and other functions of the lockstep run "
                "meanwhile; enter it around group.lockstep, and checkpoint by group.checkpoint"
            )
        self._calls[i] = _Call(name, call, tuple(hosted), tuple(args), options, modes)
        return self._coroutines[i].parent.switch()

    def _function(self, i: int, function: Callable[[], Any], *_: Any) -> None:
        self._results[i] = function()

    def _resume(self, i: int, value: Any, error: BaseException | None = None) -> None:
        """Let function i run to its next meeting or its end."""
        coroutine = self._coroutines[i]
        if coroutine.dead:
            return
        self._calls[i] = None
        outside = Modes.now(self._group.device)
        try:
            with self._group.rng(self._ranks[i]), self._collectives_meet(i):
                self._modes[i].set()
                if error is None:
                    coroutine.switch(value)
                else:
                    coroutine.throw(error)
        except Exception as raised:
            if hasattr(raised, "add_note") and raised is not error:
                raised.add_note(f"in the function of virtual rank {self._ranks[i]} of a lockstep")
            raise
        finally:
            self._modes[i] = Modes.now(self._group.device)
            outside.set()

    @contextmanager
    def _collectives_meet(self, i: int) -> Iterator[None]:
        """While a function runs, its group's collectives are meeting points."""
        shadows = vars(self._group)
        shadows.update({name: partial(self._collective, name) for name in _COLLECTIVES}, _lockstep=self)
        self._index = i
        try:
            yield
        finally:
            for name in (*_COLLECTIVES, "_lockstep"):
                del shadows[name]

    def _collective(self, name: str, shards: Any, *args: Any, **options: Any) -> Any:
        v = self._ranks[self._index]
        if not isinstance(shards, Tensor):
            raise ValueError(
                f"shards: virtual rank {v} passes {type(shards).__name__} to {name} in a lockstep, not its one Tensor"
            )
        if options.get("out") is not None or options.get("async_op"):
            raise ValueError(f"{name}: out and async_op are not for calls in a lockstep (virtual rank {v})")
        identity = options.get("grad", "identity" if name == "all_reduce" else "sum") == "identity"
        if name in ("all_reduce", "all_gather") and identity and shards.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f'grad: {name} in a lockstep (virtual rank {v}) cannot be differentiated by "identity", which is for '
                'one loss a process; pass grad="sum", or call it on the list of results after the lockstep'
            )
        return self.meet(name, MethodType(getattr(type(self._group), name), self._group), (shards,), args, **options)

    def _check_same(self) -> None:
        """All functions wait at the same call."""
        waiting = [(v, c) for v, c in zip(self._ranks, self._calls) if c is not None]
        v, first = waiting[0]
        error = None
        for w, call in zip(self._ranks, self._calls):
            if call is None:
                error = f"virtual rank {w}'s function has returned, virtual rank {v}'s waits in {first}"
            elif not first.same_as(call):
                error = f"virtual rank {v} calls {first}, virtual rank {w} calls {call}"
        if error is not None:
            refused = ValueError(f"lockstep: {error}; every virtual rank makes the same calls in the same order")
            raise self._group.refuse(first.name, refused)

    def _call(self) -> list[Any]:
        calls = [c for c in self._calls if c is not None]
        first, outside = calls[0], Modes.now(self._group.device)
        first.modes.set()
        try:
            result = first.call(*map(list, zip(*(c.hosted for c in calls))), *first.args, **first.options)
        finally:
            outside.set()
        return [_part(result, i) for i in range(len(calls))]

    def _close(self) -> None:
        """End functions that still wait. What their ``finally`` clauses raise is not what went wrong."""
        self._closed = True
        for i, coroutine in enumerate(self._coroutines):
            if coroutine and not coroutine.dead:
                with suppress(Exception):
                    self._resume(i, None, self._exit())


def _call(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return call(*args, **options)


def _part(result: Any, i: int) -> Any:
    if isinstance(result, list):
        return result[i]
    return tuple(_part(r, i) for r in result) if isinstance(result, tuple) else result


def _equal(a: Any, b: Any) -> bool:
    """Equality of arguments; tensors are equal when they are the same object, or hold the same values on the CPU."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return a is b or (both and a.device.type == "cpu" == b.device.type and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, partial) and isinstance(b, partial):  # replicas have copies of those that a module holds
        return _equal([a.func, a.args, a.keywords], [b.func, b.args, b.keywords])
    return bool(a == b)
