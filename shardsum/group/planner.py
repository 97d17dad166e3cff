"""The plans of one group on this process, and what every call of it begins and ends with.

A plan is kept by its terms, which all processes share, so that all keep and forget the same ones: where a plan is new
to one process it is new to all, and they compare it. A second dictionary leads from the arguments of a call, as the
user wrote them, to its plan.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..core.checks import is_count
from ..core.layout import ExchangePlan
from ..transports import Wire
from ..transports.peer.transport import PeerTransport
from ..transports.peer.workspace import number_of
from . import compiled
from .agreement import Agreement, is_common
from .arguments import check_bounds, check_planned_lengths, check_row_shape, check_rows
from .busy import Calling
from .collectives import check_options, describe
from .explain import Stats
from .plan import Plan
from .routes import Route, Router
from .terms import Terms

_MAX_PLANS = 4096
_names = itertools.count()


class Planner:
    """What the registered operators find by a group's name; :class:`~.group.CollectiveGroup` is its face.

    Args:
        owners: the process of every virtual rank.
        wire: None for a lone process.
        inside: the peer transport of this process's domain, where processes can map each other's memory inside each
            domain alone. Its ``reason`` is None.
        device: where shards live when there are several processes.

    Attributes:
        peers: the peer transport, where all processes can do so.
        last: the route of the last exchange.
        state: one int64 that native operators share with Python (:mod:`shardsum.transports.peer.operators`).
        name: what the registered operators know the group by (local to this process).
        virtual_ranks: hosted here, increasing.
        shard_device: where shards must live; None for a lone process, which takes any device.
    """

    def __init__(
        self,
        owners: Sequence[int],
        rank: int,
        wire: Wire | None,
        router: Router,
        agreement: Agreement,
        inside: PeerTransport | None,
        device: torch.device,
    ) -> None:
        self.wire, self.router, self.agreement, self.inside, self.device = wire, router, agreement, inside, device
        self.rank, self.world_size, self.peers = rank, router.world_size, router.peers
        self.owners, self.num_virtual_ranks = tuple(owners), len(owners)
        self.virtual_ranks = tuple(v for v, owner in enumerate(owners) if owner == rank)
        self.last: Route | None = None
        self.state = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.shard_device = None if self.world_size == 1 else device
        hosted = Counter[int]()
        self._positions = []
        for owner in self.owners:
            self._positions.append((owner, hosted[owner]))
            hosted[owner] += 1
        self.most_hosted = max(hosted.values())
        self.name = f"group{next(_names)}"
        self._closed = False
        self._plans: MutableMapping[Terms, Plan] = {}
        self.by_arguments: dict[Hashable, Plan] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.describe = partial(describe, self.num_virtual_ranks, self.world_size)
        self._state = ctypes.c_int64.from_address(self.state.data_ptr())
        compiled.groups[self.name] = self

    def position(self, virtual_rank: int) -> tuple[int, int]:
        if not is_count(virtual_rank) or not virtual_rank < self.num_virtual_ranks:
            raise ValueError(f"virtual_rank: expected 0 to {self.num_virtual_ranks - 1}, got {virtual_rank!r}")
        return self._positions[virtual_rank]

    def hosted(self, of: Sequence[Any], kind: str) -> list[Any]:
        """What belongs to this process among one item per virtual rank ("v") or per process ("p")."""
        return [of[v] for v in self.virtual_ranks] if kind == "v" else [of[self.rank]]

    def stats(self) -> Stats:
        if self.last is None:
            raise RuntimeError("stats: no collective has run in this group")
        wire = self.wire
        return Stats(self.last, wire.sent if wire is not None else 0, wire.received if wire is not None else 0)

    # What a call begins and ends with

    def calling(self, name: str, begun: bool = False) -> Calling:
        """``with planner.calling(name):`` around all that a call does; ``begun`` around the rest of one."""
        return Calling(self, name, begun)

    def enter(self, name: str) -> None:
        """Begin a call. RuntimeError when the group is in use or closed, or has failed, or what an earlier call left
        open does."""
        if self._closed:
            raise RuntimeError("this group was closed; create a new one")
        self.agreement.busy.__enter__()
        try:
            self.agreement.begin(name)
            self.close_open_call()  # before this process waits for another in this call: it may wait in that one
        except BaseException as error:
            try:
                self.fail(name, error)
            finally:
                self.leave()
            raise

    def let_go(self) -> None:
        """Keep only plans that others hold: the group was dropped. (Plans hold their planner: a reference cycle.)"""
        self.by_arguments.clear()
        self._plans = WeakValueDictionary(self._plans)

    def close(self) -> None:
        """Give back memory and connections once every process has come here; later calls raise."""
        if self._closed:
            return
        with self.calling("close"):
            self.agreement.agree("close", {})
            for peers in self.all_peers():
                peers.close()
        self._closed = True
        self._plans.clear()
        self.by_arguments.clear()
        self.wire = None
        self.agreement.close()

    def all_peers(self) -> list[PeerTransport]:
        """The peer transports that this process takes part in."""
        return [peers for peers in (self.peers, self.inside) if peers is not None]

    def leave(self) -> None:
        self.agreement.busy.release()

    def close_open_call(self) -> None:
        """Complete the call whose transfers have not all started, if there is one."""
        if self.wire is not None:
            self.wire.close()

    def layout(self, terms: Terms) -> ExchangePlan:
        """Who holds and who wants what, with owners."""
        owners = {"v": self.owners, "p": tuple(range(self.world_size))}
        return ExchangePlan(terms.sources, owners[terms.kinds[0]], terms.sinks, owners[terms.kinds[1]], self.world_size)

    def peer_number(self) -> int:
        """What a launch over peer memory carries as the number of its call."""
        return number_of(self.agreement.call, self.agreement.origin)

    def refuse(self, name: str, error: Exception, counted: bool = False) -> Exception:
        if is_common(error) or self.agreement.failed is not None:
            return error
        return self.agreement.refuse(name, error, counted)

    def fail(self, name: str, error: BaseException) -> None:
        """End the group over an error in the middle of a call, before it is raised. (Not for bad input.) Raises it
        itself where it is a transfer's, with the names of who is missing."""
        if not isinstance(error, RuntimeError):
            self.agreement.leave(name, error)  # the next call would meet what the others still send of this one
            return
        why = self.agreement.failed
        if self.world_size == 1 or (why is not None and why in str(error)):  # its own, or explained already
            raise error
        if why is not None:
            raise RuntimeError(f"{name} was not completed before this group failed; make a new one. {why}") from error
        cause = error
        try:
            self.check_peers()
        except RuntimeError as known:
            cause = known
        raise self.agreement.explain(name, cause) from error

    def announce_call(self) -> None:
        """Tell the native operators the number of this call: they add 1 to the calls that were made before it."""
        self._state.value = self.peer_number() - 1

    def check(self) -> None:
        if self._closed or self.agreement.failed is not None:
            raise RuntimeError(self.agreement.failed or "this group was closed; create a new one")
        self.check_peers()  # the cause, where headers were spoiled after it
        self.agreement.look()

    def check_peers(self) -> None:
        """Raise RuntimeError when a kernel timed out waiting for another process."""
        for peers in self.all_peers():
            peers.check()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """What asynchronous calls run on."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @property
    def always_agrees(self) -> bool:
        """Whether the next call is compared even where its plan has been."""
        return self.world_size > 1 and (self.agreement.check == "always" or self.agreement.wary)

    def agree(self, terms: Terms, collective_gradient: bool, other: Terms | None = None) -> bool:
        """Compare a call with the other processes'; whether it is that of ``other`` terms, which may be meant, too."""
        signatures = [said.signature() for said in (terms, other) if said is not None]
        for signature in () if terms.local_adjoint else signatures:
            signature["requires grad"] = collective_gradient  # all take part in the backward, or none
        said = self.agreement.agree(terms.name, *signatures)
        return bool(said) and said[self.rank]["settled"]

    # Plans

    def terms(
        self, name: str, lengths: Any, options: Mapping[str, Any], row_shape: Any, dtype: Any, s_max: Any = None
    ) -> Terms:
        checked, shape = check_options(name, options), check_row_shape(row_shape)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: expected a torch.dtype, got {dtype!r}")
        lengths = check_planned_lengths(name, lengths, s_max, self.num_virtual_ranks, self.device)
        terms = self.describe(name, shape, dtype, lengths, checked)
        self.check_values(terms)
        return terms

    def find(self, terms: Terms) -> Plan | None:
        return self._plans.get(terms)

    def agreed(self, terms: Terms, collective_gradient: bool, other: Terms | None = None) -> Plan:
        """The plan of new terms, once the processes have compared a call with it; of ``other``, which may be meant as
        well, where that is what they agree on."""
        if self.agree(terms, collective_gradient, other):
            terms = other or terms
        plan = self.derived(terms)
        plan.mark_agreed(collective_gradient)
        return plan

    def derived(self, terms: Terms) -> Plan:
        """The plan of terms that have been compared, or need not be, such as an adjoint's. Not collective."""
        plan = self._plans.get(terms)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:  # on all processes at once: they have kept the same
                self._plans.clear()
                self.by_arguments.clear()
            plan = self._plans[terms] = Plan(self, terms)
        return plan

    def check_values(self, terms: Terms) -> None:
        """What is common to all processes and could not be checked while it was a symbol."""
        if terms.device_lengths and self.world_size > 1 and self.router.transport == "all_to_all":
            raise ValueError('lengths: transport "all_to_all" cannot take device lengths; use "gather" or ints')
        check_bounds(terms)

    def remember(self, key: Hashable, plan: Plan) -> None:
        if len(self.by_arguments) >= 4 * _MAX_PLANS:
            self.by_arguments.clear()
        self.by_arguments[key] = plan

    @torch.no_grad()
    def run_registered(self, terms: Terms, shards: list[Tensor], lengths: Tensor | None = None) -> list[Tensor]:
        """What the registered operators do when they run: the plan's results, one a hosted sink."""
        if terms.grad == "adjoint":
            return self.derived(terms).execute(shards, lengths)
        plan = self.find(terms) or self._from_registered(terms, shards)
        return plan.execute(shards, lengths)

    def _from_registered(self, terms: Terms, shards: list[Tensor]) -> Plan:
        with self.calling(terms.name):
            try:
                self.check_values(terms)
                if not terms.device_lengths:
                    held = [end - begin for begin, end in self.hosted(terms.sources, terms.kinds[0])]
                    check_rows(terms, self.virtual_ranks, shards, held)
            except Exception as error:
                raise self.refuse(terms.name, error) from error
            return self.agreed(terms, False)
