"""The route of accumulators: pure arithmetic on positions, no tensors, no communication.

Sources 0, 1, ..., R-1 form *runs*: maximal sequences of consecutive sources of one domain. The accumulator of a
position starts at +0.0 and visits, in order, the runs that hold the position; each visit is a *stage*. In a stage one
process of the domain, the *handler*, folds the run's rows onto the accumulator and passes it on to the handler of the
next stage. That of the last one finishes and rounds; the result goes to the processes that want it. An accumulator
travels unrounded, so the sum is that of all rows in order, bit for bit.

Handlers: process i of a domain handles the i-th part of the positions, so that all of a host's network cards work.
Where a single process of the domain wants a position, that one does. Where different processes want many intervals,
these are not cut again: process i handles every m-th interval, i modulo the domain's m processes. Results go from
domain to domain in a chain (to one process of each, which passes them on inside), so no domain sends a result to more
than one other.

Everything is pipelined in chunks. Steps are numbered alike on all processes: stage s of chunk c folds in step
``c + lag * s``, once what travels in that step has arrived. ``lag`` is 1 where a process sends what it has just folded
at once, 2 where it sends in one batch with what it receives for the next step, and folds in the meantime.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.layout import ExchangePlan, Interval, intersect, length, union
from .carry_items import ACCUMULATORS, KINDS, RESULTS, ROWS, Item, Message, Piece, Run, Stage

_MANY_REGIONS = 4  # a process of a domain, on average


@dataclass(frozen=True)
class CarryPlan:
    """How an exchange of sums travels over ``domains`` (one number for every process).

    Args:
        plan: who holds and who wants which positions.
        domains: the domain of every process.
        chunks: how many parts every region of the result is cut into, where the same runs hold it.
        lag: steps from one stage to the next.
        counted: stages know how many contributions came before (for a mean).

    Example:
        Four ranks on two domains of one process each; every process wants all of six positions.

        >>> plan = ExchangePlan(((0, 6),) * 4, (0, 0, 1, 1), ((0, 6),) * 2, (0, 1), 2)
        >>> carry = CarryPlan(plan, (0, 1))
        >>> [(s.process, s.sources) for s in carry.pieces[0].stages]
        [(0, (0, 1)), (1, (2, 3))]
        >>> carry.traffic
        {('accumulators', 0, 1): 6, ('results', 1, 0): 6}
    """

    plan: ExchangePlan
    domains: tuple[int, ...]
    chunks: int = 1
    lag: int = 1
    counted: bool = False

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The processes of every domain."""
        return {d: tuple(p for p, e in enumerate(self.domains) if e == d) for d in sorted(set(self.domains))}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        runs: list[Run] = []
        for source, owner in enumerate(self.plan.source_owners):
            domain = self.domains[owner]
            if runs and runs[-1].domain == domain:
                runs[-1] = runs[-1]._replace(last=source + 1)
            else:
                runs.append(Run(domain, source, source + 1))
        return tuple(runs)

    @cached_property
    def _profile(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Bounds, and for the positions from each bound to the next the runs that hold them."""
        events: dict[int, list[int]] = defaultdict(list)
        for i, run in enumerate(self.runs):
            for begin, end in union(self.plan.sources[run.first : run.last]):
                events[begin].append(i)
                events[end].append(~i)
        bounds, holders, holding = sorted(events), [], set[int]()
        for bound in bounds:
            for i in events[bound]:
                holding.add(i) if i >= 0 else holding.discard(~i)
            holders.append(tuple(sorted(holding)))
        return bounds, holders

    @cached_property
    def _regions(self) -> list[tuple[Interval, tuple[int, ...]]]:
        """Intervals whose positions the same sinks want, and the processes of those."""
        events: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (begin, end), owner in zip(self.plan.sinks, self.plan.sink_owners):
            if begin < end:
                events[begin].append((owner, 1))
                events[end].append((owner, -1))
        bounds, regions = sorted(events), []
        wanting: dict[int, int] = defaultdict(int)
        for bound, after in zip(bounds, bounds[1:]):
            for owner, change in events[bound]:
                wanting[owner] += change
            owners = tuple(sorted(p for p, n in wanting.items() if n))
            if owners:
                regions.append(((bound, after), owners))
        return regions

    @cached_property
    def _alike(self) -> list[tuple[Interval, tuple[int, ...]]]:
        """The regions cut where other runs begin to hold positions. So every chunk has a share of all that is to do,
        and what goes one way need not wait for what goes another."""
        found = []
        for (begin, end), owners in self._regions:
            ordered = [begin, *_inside(self._profile[0], begin, end), end]
            found += [(interval, owners) for interval in zip(ordered, ordered[1:])]
        return found

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All positions that somebody holds and somebody wants, by chunk, then by position."""
        pieces: list[Piece] = []
        sizes = sorted({len(m) for m in self.members.values()})
        cut_in_parts = len(self._regions) < _MANY_REGIONS * sizes[-1]
        source_bounds = sorted({b for i in self.plan.sources for b in i}) if self.counted else []
        bounds, holders = self._profile
        for chunk in range(self.chunks):
            for region, ((lo, hi), wanted) in enumerate(self._alike):
                n = hi - lo
                begin, end = lo + n * chunk // self.chunks, lo + n * (chunk + 1) // self.chunks
                if cut_in_parts:
                    parts = {m: [begin + (end - begin) * i // m for i in range(m)] for m in sizes}
                else:  # part i of m begins where all positions lie behind it, and behind no later one
                    parts = {m: [begin] * (region % m + 1) for m in sizes}
                cuts = {begin, end, *(b for part in parts.values() for b in part)}
                cuts.update(_inside(bounds, begin, end), _inside(source_bounds, begin, end))
                ordered = sorted(cuts)
                for a, b in zip(ordered, ordered[1:]):
                    at = bisect_right(bounds, a) - 1
                    if at >= 0 and holders[at]:
                        _append(pieces, self._piece((a, b), chunk, holders[at], wanted, parts), begin)
        return tuple(pieces)

    def _piece(
        self, interval: Interval, chunk: int, holders: tuple[int, ...], wanted: tuple[int, ...], parts: dict
    ) -> Piece:
        def handler(domain: int) -> int:
            members = self.members[domain]
            mine = [p for p in wanted if self.domains[p] == domain]
            return mine[0] if len(mine) == 1 else members[bisect_right(parts[len(members)], interval[0]) - 1]

        visits: list[tuple[int, list[int]]] = []  # runs of one domain with none between them are one visit
        for i in holders:
            domain, first, last = self.runs[i]
            if not visits or visits[-1][0] != domain:
                visits.append((domain, []))
            visits[-1][1].extend(range(first, last))
        stages, carried = [], 0
        for domain, sources in visits:
            stages.append(Stage(handler(domain), tuple(sources), carried))
            if self.counted:
                carried += sum(begin <= interval[0] < end for begin, end in map(self.plan.sources.__getitem__, sources))
        return Piece(interval, chunk, tuple(stages), wanted, self._deliver(stages[-1].process, wanted, handler))

    def _deliver(
        self, last: int, wanted: tuple[int, ...], handler: Callable[[int], int]
    ) -> tuple[tuple[int, int, int], ...]:
        here, count = self.domains[last], max(self.domains) + 1
        domains = sorted({self.domains[p] for p in wanted}, key=lambda d: (here - d) % count)
        deliveries, hops, holder = [], 0, last
        for domain in domains:
            local = [p for p in wanted if self.domains[p] == domain]
            if domain != here:
                entry = handler(domain) if handler(domain) in local else local[0]
                hops += 1
                deliveries.append((hops, holder, entry))
                holder = entry
            deliveries.extend((hops + 1, holder, p) for p in local if p != holder)
        return tuple(deliveries)

    def transfers(
        self, index: int, piece: Piece, domain: int | None = None
    ) -> Iterator[tuple[int, str, int, int, Item]]:
        """All that travels of a piece, as (step, kind, sender, receiver, item); rows inside ``domain`` only."""
        interval = piece.interval
        for s, stage in enumerate(piece.stages):
            step = piece.chunk + self.lag * s
            for source in stage.sources if domain in (None, self.domains[stage.process]) else ():
                owner, common = self.plan.source_owners[source], intersect(self.plan.sources[source], interval)
                if owner != stage.process and length(common):
                    yield step, ROWS, owner, stage.process, Item(common, index, source)
            if s:
                yield step, ACCUMULATORS, piece.stages[s - 1].process, stage.process, Item(interval, index, s - 1)
        for hops, sender, receiver in piece.deliveries:
            step = piece.chunk + self.lag * (len(piece.stages) - 1 + hops)
            yield step, RESULTS, sender, receiver, Item(interval, index, -1)

    @cached_property
    def traffic_by_step(self) -> dict[tuple[int, str, int, int], int]:
        """Positions by (step, kind, sender, receiver)."""
        table: dict[tuple[int, str, int, int], int] = defaultdict(int)
        for index, piece in enumerate(self.pieces):
            for step, kind, sender, receiver, item in self.transfers(index, piece):
                table[step, kind, sender, receiver] += length(item.interval)
        return dict(table)

    @cached_property
    def traffic(self) -> dict[tuple[str, int, int], int]:
        """Positions by (kind, sender, receiver)."""
        table: dict[tuple[str, int, int], int] = defaultdict(int)
        for (_, kind, sender, receiver), positions in self.traffic_by_step.items():
            table[kind, sender, receiver] += positions
        return dict(table)

    def messages_of(self, process: int) -> list[Message]:
        """What ``process`` sends or receives, by step; both ends of a message list its items alike."""
        table: dict[tuple[int, str, int, int], list[Item]] = defaultdict(list)
        for index, piece in enumerate(self.pieces):
            for step, kind, sender, receiver, item in self.transfers(index, piece, self.domains[process]):
                if process in (sender, receiver):
                    table[step, kind, sender, receiver].append(item)
        order = sorted(table, key=lambda key: (key[0], KINDS.index(key[1]), *key[2:]))
        return [Message(*key, tuple(table[key])) for key in order]

    def folds_of(self, process: int) -> list[tuple[int, int, int]]:
        """What ``process`` folds, as (step, piece, stage) in the order of steps."""
        folds = [
            (piece.chunk + self.lag * s, index, s)
            for index, piece in enumerate(self.pieces)
            for s, stage in enumerate(piece.stages)
            if stage.process == process
        ]
        return sorted(folds)

    @cached_property
    def empty(self) -> tuple[Interval, ...]:
        """Wanted positions that no source holds."""
        held = union(self.plan.sources)
        gaps = []
        for lo, hi in union(self.plan.sinks):
            inside = [intersect(h, (lo, hi)) for h in held if length(intersect(h, (lo, hi)))]
            ends = [lo, *(bound for interval in inside for bound in interval), hi]
            gaps += [(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
        return tuple(gaps)


def _inside(bounds: Sequence[int], begin: int, end: int) -> Sequence[int]:
    """Those of the sorted bounds that lie in ``(begin, end)``."""
    return bounds[bisect_right(bounds, begin) : bisect_right(bounds, end - 1)]


def _append(pieces: list[Piece], piece: Piece, begin: int) -> None:
    """Add a piece, to the last one where both go the same way and lie in one region, which begins at ``begin``."""
    at = piece.interval[0]
    if at > begin and pieces and pieces[-1][1:] == piece[1:] and pieces[-1].interval[1] == at:
        pieces[-1] = pieces[-1]._replace(interval=(pieces[-1].interval[0], piece.interval[1]))
    else:
        pieces.append(piece)
