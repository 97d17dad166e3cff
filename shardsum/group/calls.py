"""How a collective call runs on one process: check, compare with the others, transfer, reduce, deliver.

:class:`Runner` is what the registered operators find by a group's name; :class:`shardsum.ShardGroup` is its face.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import is_count, needs_grad
from ..core.layout import Interval
from ..local.ops import is_readable
from ..native import loader as native
from ..transports.peer.peers import Launch
from ..transports.wire import open_calls
from . import exchange as operators
from .agreement import Agreement, Disagreement
from .arguments import (
    Request,
    Shards,
    check_lengths,
    classify_lengths,
    describe_reduce,
    describe_rows,
    hosted_shards,
    narrow,
)
from .executor import Engine, Job, Reduce, Route
from .padded import exchange_padded
from .replays import Known, Replays

_names = itertools.count()
_is_compiling = torch.compiler.is_compiling


class Handle:
    """A collective under way. ``wait()`` returns its result; on CUDA it only makes the current stream wait.

    On the CPU a large message travels in several steps. A process takes them in ``wait()``, or in its next call of the
    group: until then, others may wait for it.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


class Runner:
    """The calls of one group on this process.

    Args:
        engine: executes exchanges; knows the owners of the virtual ranks.
        agreement: the side channel.
        device: where shards live when there are several processes.

    Attributes:
        name: what the registered operators know the group by (local to this process).
        virtual_ranks: hosted here, increasing.
    """

    def __init__(self, engine: Engine, agreement: Agreement, device: torch.device) -> None:
        self.engine, self.agreement, self.device = engine, agreement, device
        self.rank, self.world_size = engine.rank, engine.world_size
        self.owners, self.num_virtual_ranks = engine.owners, len(engine.owners)
        self.virtual_ranks = tuple(v for v, owner in enumerate(self.owners) if owner == self.rank)
        self._hosted = Counter[int]()
        self._positions = []
        for owner in self.owners:
            self._positions.append((owner, self._hosted[owner]))
            self._hosted[owner] += 1
        self.name = f"group{next(_names)}"
        engine.call = lambda: agreement.call
        self.replays = Replays(len(self.virtual_ranks), device)
        agreement.forget = self.replays.clear
        self._stream: torch.cuda.Stream | None = None
        self._agreed = False  # inside a call whose arguments were compared
        operators.groups[self.name] = self

    def position(self, virtual_rank: int) -> tuple[int, int]:
        """A virtual rank's process, and its index among that process's shards."""
        if not is_count(virtual_rank) or not virtual_rank < self.num_virtual_ranks:
            raise ValueError(f"virtual_rank: {virtual_rank!r} is none of the {self.num_virtual_ranks} virtual ranks")
        return self._positions[virtual_rank]

    def begin(self, name: str) -> None:
        """Begin a call. RuntimeError when the group has failed, or when what an earlier call left open does now."""
        self.agreement.begin()
        try:
            self.close()  # before this process waits for another in this call: the other may wait in that one
        except BaseException as error:
            self.end_badly(name, error)
            raise

    def close(self) -> None:
        """Complete the call that was left open, if any."""
        if self.engine.wire is not None:
            self.engine.wire.close()

    def run(
        self,
        name: str,
        shards: Sequence[Tensor],
        sources: Sequence[Interval],
        sinks: Sequence[Interval],
        kinds: str,
        reduce: Reduce,
        out: Tensor | None = None,
    ) -> Job:
        """Start an exchange of checked arguments (what the registered operators call)."""
        plan = self.engine.plan(tuple(sources), tuple(sinks), kinds)
        rows = [s.resolve_conj().resolve_neg().contiguous() for s in shards]  # bytes travel, not lazy signs
        return self.engine.start(name, plan, rows, reduce, out)

    def hosted(self, of: Sequence[Any], kind: str) -> list[Any]:
        """What belongs to this process among one item per virtual rank ("v") or per process ("p")."""
        return [of[v] for v in self.virtual_ranks] if kind == "v" else [of[self.rank]]

    def shards(self, shards: Shards, async_op: bool) -> list[Tensor]:
        hosted = hosted_shards(shards, self.virtual_ranks, None if self.world_size == 1 else self.device)
        if async_op and needs_grad(hosted):
            raise ValueError("async_op: not possible with shards that require grad")
        return hosted

    def with_lengths(
        self,
        name: str,
        hosted: list[Tensor],
        lengths: Any,
        size: int | None,
        signature: dict[str, Any],
        out: Tensor | None = None,
    ) -> Request:
        """A request whose sources start at 0, from lengths of any form. This process's own errors come before: where
        lengths are counted, the others take part in the transfer from here on."""
        form, values = classify_lengths(lengths, self.num_virtual_ranks, self.virtual_ranks, hosted[0].device)
        signature = {**describe_rows(hosted), **signature, "size": size, "lengths": form}
        if signature.get("grad") != "identity":
            signature["requires grad"] = needs_grad(hosted)  # all take part in the backward, or none
        request = Request(name, hosted, None, (), "", Reduce("sum", None, hosted[0].dtype), "", signature)
        if form == "device":
            if size is None:
                raise ValueError("size: required with lengths on the device (the host never reads them)")
            if self.world_size > 1 and self.engine.transport == "all_to_all":
                raise ValueError('lengths: transport "all_to_all" cannot take device lengths; use "gather" or ints')
            if len({s.shape for s in hosted}) > 1:
                raise ValueError(
                    f"shards: device lengths need equally padded shards, got {[tuple(s.shape) for s in hosted]}"
                )
            signature["S_MAX"] = hosted[0].shape[0]
            padded = hosted[0][None] if len(hosted) == 1 else torch.stack(hosted)
            request.shards, request.device_lengths = [padded], values
            return request
        if form == "counted" and torch.compiler.is_compiling() and self.world_size > 1:
            raise ValueError(
                "lengths: None needs a host exchange on every call; pass ints or a tensor in compiled code"
            )
        if form == "counted":
            counts = [s.shape[0] for s in hosted]
            if size is not None:
                for v, n in zip(self.virtual_ranks, counts):
                    if n > size:
                        raise ValueError(f"lengths: virtual rank {v} has {n}, beyond size {size}")
            values, request.out_rows = self._count(name, signature, counts, out)
        else:
            signature["lengths"] = values
        if not torch.compiler.is_compiling():  # values are symbols there; the operator narrows
            check_lengths(values, hosted, self.virtual_ranks, size)
            request.shards = narrow(hosted, values, self.virtual_ranks)
        request.sources = tuple((0, n) for n in values)
        return request

    def _count(
        self, name: str, signature: dict[str, Any], counts: list[int], out: Tensor | None
    ) -> tuple[list[int], list[int]]:
        """All R lengths from the hosted shards' row counts (form b), and the rows of every process's ``out``: one small
        all_gather on the host."""
        rows = -1 if out is None else out.shape[0]
        most = max(self._hosted.values()) + 1
        everyone = self.agreement.gather_values(name, signature, [*counts, rows], most)
        out_rows = [row[-1] for row in everyone] if self.world_size > 1 else []
        return [everyone[owner][slot] for owner, slot in self._positions], out_rows

    @staticmethod
    def take_out(request: Request, out: Tensor | None, rows: int) -> None:
        """Let the result be written to ``out``; ValueError unless it has ``rows`` rows, on every process."""
        for process, n in enumerate(request.out_rows):
            if n not in (-1, rows):
                raise Disagreement(f"{request.name}: process {process}: out: {n} rows, but the result has {rows}")
        if out is not None and out.shape[0] != rows:
            raise ValueError(f"out: {out.shape[0]} rows, but the result has {rows}")
        request.out = out

    @staticmethod
    def end(request: Request, size: int | None) -> int:
        return size if size is not None else max(end for _, end in request.sources or ())

    def again(
        self, name: str, shards: Shards, lists: Sequence[Any], out: Tensor | None, others: Hashable
    ) -> list[Tensor] | None:
        """The results of a call that is known by these arguments (:meth:`Replays.key`), launched again; None where it
        must go through :meth:`collective`, of which nothing has happened then."""
        if _is_compiling() or self.engine.peers is None or self.agreement.wary:
            return None
        key = self.replays.key(name, shards, lists, out, others)
        if key is None:
            return None
        try:
            return self.replays.run(key, shards, out)
        except ValueError:
            raise
        except BaseException as error:
            self.launch_failed(name, error)
            raise

    def launch_failed(self, name: str, error: BaseException) -> None:
        """As :meth:`end_badly` where the launch of a known call raised ``error``: the peers may know better why."""
        if isinstance(error, RuntimeError) and self.engine.peers is not None:
            try:
                self.engine.peers.check()
            except RuntimeError as known:
                error = known
        self.end_badly(name, error)

    def collective(
        self,
        name: str,
        build: Callable[[], Request],
        deliver: Callable[[list[Tensor]], Any],
        shards: Shards,
        lengths: Any,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        known_by: tuple[Sequence[Any], Hashable, tuple[Any, ...]] | None = None,
    ) -> Any:
        """Run one call.

        Args:
            build: checks the arguments.
            deliver: makes the result from one tensor a hosted sink.
            known_by: host lengths or intervals, and the remaining arguments, by which :meth:`again` launches a call
                like this one without all this; None where it never does. Third, those of :attr:`Replays.last`.
        """
        if torch.compiler.is_compiling():
            result = deliver(self._apply(build()))
            return Handle(lambda: result) if async_op else result
        self.begin(name)
        try:
            return self._eager(name, build, deliver, shards, lengths, out, async_op, known_by)
        except ValueError:
            raise
        except BaseException as error:
            self.end_badly(name, error)
            raise
        finally:
            self._agreed = False

    def _eager(
        self,
        name: str,
        build: Callable[[], Request],
        deliver: Callable[[list[Tensor]], Any],
        shards: Shards,
        lengths: Any,
        out: Tensor | None,
        async_op: bool,
        known_by: tuple[Sequence[Any], Hashable, tuple[Any, ...]] | None,
    ) -> Any:
        """A call that has begun: checked, compared and run."""
        key = None
        if known_by is not None and not async_op and self.engine.peers is not None and not self.agreement.wary:
            key = self.replays.key(name, shards, known_by[0], out, known_by[1])
        try:
            request = build()
        except Disagreement:
            raise
        except Exception as error:
            if self.agreement.failed is not None:
                raise
            raise self.agreement.refuse(name, error, counted=lengths is None) from error
        if lengths is not None:  # counted lengths have agreed on the way
            self.agreement.agree(name, request.signature)
        self._agreed = True
        if async_op:
            return self._begin(request, deliver)
        outs = self._apply(request) if request.needs_grad else self._job(request).result()
        if key is not None and known_by is not None:
            self._remember(key, request, outs, known_by[0], known_by[2])
        return deliver(outs)

    def _remember(
        self, key: Hashable, request: Request, outs: list[Tensor], lists: Sequence[Any], arguments: tuple[Any, ...]
    ) -> None:
        route, peers = self.engine.last, self.engine.peers
        if peers is None or route is None or route.transport != "peer" or self.agreement.check != "first":
            return
        if request.needs_grad or request.sources is None:
            return
        if torch._C._are_functorch_transforms_active():  # what is made here would end with the transform
            return
        if not request.shards[0].shape[1:].numel() or not any(begin < end for begin, end in request.sinks):
            return  # nothing is launched
        if request.reduce.op != "copy" and not all(map(is_readable, request.shards)):
            return
        plan, reduce = self.engine.plan(request.sources, request.sinks, request.kinds), request.reduce
        lengths = lists[0] if len(lists) == 1 else ()
        launch, one = peers.launcher(plan, outs, request.shards, reduce.op, reduce.scale, lengths)

        def again(outs: list[Tensor], shards: list[Tensor]) -> None:
            self.agreement.begin()
            self.engine.begin(route)
            launch(outs, shards)

        known = Known(again, [(o.shape, o.dtype) for o in outs])
        if one is not None:
            last = native.make_again((*self._told(route), one, *arguments)) if arguments else known.again
            known = known._replace(one=self._one_again(one, route), again=last)
        self.replays.remember(key, known)

    def _told(self, route: Route) -> tuple[Any, ...]:
        """What a call without this module's Python looks at and tells (csrc/again.h), as those with it do."""
        wire = self.engine.wire
        assert wire is not None
        objects = vars(self.agreement), vars(self.engine), route, vars(wire), vars(wire.traffic)
        return Tensor, *objects, open_calls, vars(forward_ad), torch._C._increment_version

    def _one_again(self, launch: Launch, route: Route) -> Launch:
        agreement, begin = self.agreement, self.engine.begin

        def again(out: Tensor, shard: Tensor, lengths: list[int] | None) -> bool:
            agreement.begin()
            begin(route)
            if launch(out, shard, lengths):
                return True
            agreement.call -= 1  # the long way counts it
            return False

        return again

    def agree_compiled(
        self,
        terms: operators.Terms,
        first: Tensor,
        bounds: list[Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Check and compare the arguments of an operator that compiled code calls (eager calls have done it)."""
        if self._agreed:
            return
        self.begin(terms.name)
        try:
            check()
        except ValueError as error:
            raise self.agreement.refuse(terms.name, error) from error
        signature = {**describe_rows([first]), "grad": terms.grad, "bounds": bounds, **describe_reduce(terms.reduce)}
        self.agreement.agree(terms.name, signature)

    def end_badly(self, name: str, error: BaseException) -> None:
        """End the group over an error amid a call, before it is raised. (Bad input is none: nothing has moved.)

        Raises:
            RuntimeError: a transfer's error, explained.
        """
        if isinstance(error, RuntimeError):
            raise self.failure(name, error) from error
        self.agreement.leave(name, error)  # the next call would meet what the others still send of this one

    def failure(self, name: str, error: RuntimeError) -> RuntimeError:
        """A transfer's error, with the names of who is missing; a lone process's errors are its own."""
        if self.world_size == 1 or self.agreement.failed is not None:  # or explained already
            return error
        return self.agreement.explain(name, error)

    def _apply(self, request: Request) -> list[Tensor]:
        """Run as a registered operator (with autograd, or while compiling)."""
        reduce = request.reduce
        tail = (request.name, request.kinds, reduce.op, reduce.scale, reduce.dtype, request.grad, self.name)
        sinks = operators.flatten(request.sinks)
        if request.sources is None:
            return exchange_padded(request.shards[0], request.device_lengths, sinks, *tail)[:-1]
        sources = operators.flatten(request.sources)
        return operators.exchange(request.shards, sources, sinks, None, request.size, *tail)

    def _job(self, request: Request) -> Job:
        if request.sources is None:  # its arguments were compared just now, so it runs now, also with async_op
            return Job(self._apply(request), iter(()))
        sources, sinks = request.sources, request.sinks
        return self.run(request.name, request.shards, sources, sinks, request.kinds, request.reduce, request.out)

    def _begin(self, request: Request, deliver: Callable[[list[Tensor]], Any]) -> Handle:
        """Start a call and return its handle. On CUDA everything runs on a stream of the group's own."""
        tensors = [*request.shards, *([] if request.device_lengths is None else [request.device_lengths])]
        if not tensors[0].is_cuda:
            job = self._job(request)

            def complete() -> list[Tensor]:  # perhaps in another group's call
                try:
                    return job.result()
                except BaseException as error:
                    self.end_badly(request.name, error)
                    raise

            if job.more and self.engine.wire is not None:
                self.engine.wire.leave_open(complete)

            def finish() -> Any:
                if job.more:
                    self.close()
                return deliver(complete())

            return Handle(finish)
        current = torch.cuda.current_stream(tensors[0].device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)
        stream = self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outs = self._job(request).result()
        for t in tensors:
            t.record_stream(stream)
        done = stream.record_event()

        def join() -> Any:
            waiting = torch.cuda.current_stream(tensors[0].device)
            waiting.wait_event(done)
            for t in outs:
                t.record_stream(waiting)
            return deliver(outs)

        return Handle(join)

    def same_form(self, shards: Shards) -> Callable[[list[Tensor]], Any]:
        single = isinstance(shards, Tensor) and len(self.virtual_ranks) == 1
        return lambda outs: outs[0] if single else outs
