"""Folds over peer memory. All processes of a domain make the launches of a step together, also a process that folds
nothing in it: the others need its rows.

A launch is an exchange inside the domain (:mod:`.peer`): it moves the rows of a run to the processes that handle its
positions and adds them as they come, onto the accumulators that these have received, in one pass over memory. Folds of
one step share a launch where they add the same sources, and where what comes after the sum is the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import ExchangePlan, Interval, intersect, length
from ..core.numerics import NATIVE_DTYPES, Reduce, accumulator_dtype
from .carry_plan import CarryPlan
from .peer.layout import MAX_HOSTED
from .peer.prepared import PreparedCall
from .peer.transport import PeerTransport


class Launch(NamedTuple):
    """What the processes of a domain fold together, with nothing left to decide.

    Attributes:
        call, bounds: what ``call(outs, shards, bounds, ...)`` runs.
        rows: ``(source, interval)`` of the exchange that this process gives.
        folds: ``(piece, stage)`` of this process, one for each of its outputs.
        goes_on: whether there are accumulators to start at.
        carried: contributions to each accumulator, where the plan counts them.
    """

    call: PreparedCall
    bounds: list[int]
    rows: list[tuple[int, Interval]]
    folds: list[tuple[int, int]]
    goes_on: bool
    carried: int


def launches_of(
    carry: CarryPlan,
    process: int,
    peers: PeerTransport,
    width: int,
    dtype: torch.dtype,
    reduce: Reduce,
    signature: int,
) -> dict[int, list[Launch]]:
    """By step, the launches of the domain of ``process``, in the order in which its processes make them. Collective
    inside the domain where ``peers`` are not set up yet.

    Args:
        peers: of the domain.
        width: elements of a position.
        dtype: of the rows.
        signature: as in :meth:`.peer.transport.PeerTransport.prepare`.
    """
    together: dict[tuple[int, tuple[int, ...], bool, bool, int], list[tuple[int, int]]] = defaultdict(list)
    for index, piece in enumerate(carry.pieces):
        for s, stage in enumerate(piece.stages):
            if carry.domains[stage.process] == carry.domains[process]:
                ends = s + 1 == len(piece.stages)
                key = piece.chunk + carry.lag * s, stage.sources, s > 0, ends, stage.carried if ends else 0
                together[key].append((index, s))
    read = dtype if dtype in NATIVE_DTYPES else torch.int64
    launches: dict[int, list[Launch]] = defaultdict(list)
    for key in sorted(together):
        step, added, goes_on, ends, carried = key
        last = (reduce.dtype, reduce.op, reduce.scale) if ends else (accumulator_dtype(dtype), "sum", None)
        for folds in _fitting(carry, together[key]):
            plan, rows = _exchange(carry, process, added, folds)
            call = peers.prepare(plan, width, read, *last, signature=signature, goes_on=goes_on)
            mine = [(index, s) for index, s in folds if carry.pieces[index].stages[s].process == process]
            launches[step].append(Launch(call, peers.bounds(plan), rows, mine, goes_on, carried))
    return dict(launches)


def _fitting(carry: CarryPlan, folds: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same folds in parts with no more outputs on a process than a launch has room for."""
    part: list[tuple[int, int]] = []
    outputs: Counter[int] = Counter()
    for index, s in folds:
        handler = carry.pieces[index].stages[s].process
        if outputs[handler] == MAX_HOSTED:
            yield part
            part, outputs = [], Counter()
        part.append((index, s))
        outputs[handler] += 1
    yield part


def _exchange(
    carry: CarryPlan, process: int, added: tuple[int, ...], folds: Sequence[tuple[int, int]]
) -> tuple[ExchangePlan, list[tuple[int, Interval]]]:
    """The exchange of such folds among the domain's processes, numbered from 0, whose position 0 is the first that
    anybody folds. And the rows that ``process`` gives, one for each source that it hosts there."""
    members = carry.members[carry.domains[process]]
    number = {p: i for i, p in enumerate(members)}
    intervals = [carry.pieces[index].interval for index, _ in folds]
    handlers = [carry.pieces[index].stages[s].process for index, s in folds]
    begin, end = min(a for a, _ in intervals), max(b for _, b in intervals)

    def moved(interval: Interval) -> Interval:
        return interval[0] - begin, interval[1] - begin

    held = []  # all sources of the domain: each process gives at least one row, if an empty one
    for source, owner in enumerate(carry.plan.source_owners):
        if owner in number:
            common = intersect(carry.plan.sources[source], (begin, end))
            held.append((source, owner, common if source in added and length(common) else (begin, begin)))
    plan = ExchangePlan(
        tuple(moved(interval) for _, _, interval in held),
        tuple(number[owner] for _, owner, _ in held),
        tuple(map(moved, intervals)),
        tuple(number[p] for p in handlers),
        len(members),
    )
    return plan, [(source, interval) for source, owner, interval in held if owner == process]


def joined(parts: list[Tensor]) -> Tensor:
    """Parts of ``(positions, width)`` one behind the other: as they are, where they lie so."""
    first, end = parts[0], parts[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != memory:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    return first.as_strided((sum(part.shape[0] for part in parts), first.shape[1]), first.stride())
