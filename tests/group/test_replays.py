"""Calls that are launched again: what makes two calls the same, and what sends a known one the long way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import ExchangePlan
from shardsum.group.executor import LOCAL_ROUTE
from shardsum.group.group import _text
from shardsum.group.replays import Known, Replays
from shardsum.native import loader as native
from shardsum.transports.peer import transport as peer
from tests.processes import run_processes
from tests.values import RaisesOnce, assert_same, random_values

CPU = torch.device("cpu")
X = torch.ones(4, 3)


def key(shards: Any = X, lists: Any = ([4, 2],), out: Any = None, others: Any = None, name: str = "all_reduce") -> Any:
    return Replays(1, CPU).key(name, shards, lists, out, others)


@pytest.mark.parametrize(
    "other",
    [
        {"shards": X[:3]},
        {"shards": X.to(torch.float64)},
        {"shards": [X, X]},
        {"lists": ([4, 3],)},
        {"lists": ([4], [2], [7])},
        {"lists": ([4], [2])},
        {"lists": ([(4, 2)],)},
        {"lists": ([(4, 2), (0, 1)],)},
        {"out": X},
        {"out": X.to(torch.float64)},
        {"others": 1},
        {"name": "reduce_scatter"},
    ],
)
def test_every_argument_tells_calls_apart(other: dict[str, Any]) -> None:
    assert key() == key() and key() is not None
    assert key(**other) not in (None, key())


@pytest.mark.parametrize(
    "lists",
    [
        ([4.0, 2],),
        ([True, 2],),
        ([np.int64(4), 2],),
        ((4, 2),),
        (X,),
        (None,),
        ([],),
        ([(4, 2), 3],),
        ([(4, 2, 3), (1,)],),
        ([X],),
        (["ab"],),
    ],
)
def test_what_the_checks_must_see_is_not_known(lists: Any) -> None:
    assert key(lists=lists) is None


def test_odd_shards_and_outs_are_not_known() -> None:
    assert key(shards=(X,)) is None and key(shards=None) is None and key(shards=[None]) is None and key(out=3) is None
    assert key(shards=torch.nn.Parameter(X)) is None


class Calls(Replays):
    """Replays that remember one call, and what was launched."""

    def __init__(self, num_hosted: int, shards: Any, out: Tensor | None, device: torch.device = CPU) -> None:
        super().__init__(num_hosted, device)
        self.launched: list[list[Tensor]] = []
        self.call = self.key("all_reduce", shards, ([4, 2],), out, None)
        self.remember(self.call, Known(self.launch, [((5, 3) if out is None else out.shape, X.dtype)]))

    def launch(self, outs: list[Tensor], rows: list[Tensor]) -> None:
        self.launched.append([*outs, *rows])

    def one(self, runs: bool = True, results: Any = None) -> Calls:
        """The same call with a launch that looks at its tensors, and says that it runs or not."""

        def launch(out: Tensor, row: Tensor, lengths: list[int] | None) -> bool:
            self.launched.append([out, row])
            assert lengths is None  # they are in the key
            return runs

        known = self._known[self.call]
        self.remember(self.call, Known(known.launch, results or known.results, launch))
        return self


def test_a_known_call_is_launched_with_its_own_tensors() -> None:
    out, calls = torch.empty(4, 3), Calls(1, X, None)
    (made,) = calls.run(calls.call, X, None) or ()
    assert made.shape == (5, 3) and calls.launched[0][0] is made and calls.launched[0][1] is X
    calls = Calls(1, X, out)
    assert calls.run(calls.call, X, out) == [out] and calls.launched[0][0] is out
    stacked = torch.ones(2, 4, 3)
    calls = Calls(2, stacked, None)
    calls.run(calls.call, stacked, None)
    assert [t.data_ptr() for t in calls.launched[0][1:]] == [row.data_ptr() for row in stacked]


@pytest.mark.parametrize(
    "shard, out",
    [
        (torch.ones(3, 4).t(), torch.empty(4, 3)),
        (torch.ones(4, 3, requires_grad=True), torch.empty(4, 3)),
        (torch._neg_view(torch.ones(4, 3)), torch.empty(4, 3)),
        (torch.ones(4, 3, dtype=torch.complex64).conj(), torch.empty(4, 3)),
        (torch.ones(4, 3).to_sparse(), torch.empty(4, 3)),
        (X, torch.empty(3, 4).t()),
        (X, torch.empty(4, 3, requires_grad=True)),
        (X, torch.empty(4, 3).to_sparse()),
        (X, X),
        (torch.ones(7, 3)[:4], "inside"),
    ],
)
def test_layout_address_device_and_gradients_are_looked_at_again(shard: Tensor, out: Any) -> None:
    out = shard.view(-1)[9:12] if isinstance(out, str) else out
    calls = Calls(1, X, torch.empty(out.shape))
    assert calls.run(calls.call, shard, out) is None and not calls.launched
    with torch.no_grad():
        needs = [t for t in (shard, out) if t.requires_grad]
        if needs and needs[0] is shard:
            assert calls.run(calls.call, shard, out) == [out]


def test_the_shape_of_out_is_looked_at_again() -> None:
    calls = Calls(1, X, torch.empty(4, 3))
    assert calls.run(calls.call, X, torch.empty(3, 4)) is None and calls.run(calls.call, X, torch.empty(12)) is None
    assert calls.run(calls.call, X, torch.empty(5, 3)) is None and not calls.launched


@pytest.mark.parametrize(
    "out", [torch._neg_view(torch.empty(4, 3)), torch.empty(4, 3, dtype=torch.complex64).conj()], ids=["neg", "conj"]
)
def test_lazy_signs_of_out_go_the_long_way(out: Tensor) -> None:
    """The dispatcher would hand a copy to the launch, and then find no result to copy back."""
    calls = Calls(1, X, out)
    assert calls.run(calls.call, X, out) is None and not calls.launched


class Again:
    """A known all_reduce in terms of csrc/again.h, of which everything may be changed."""

    def __init__(self, runs: Any = True) -> None:
        if native.status().backend != "native":
            pytest.skip("needs the native library")
        self.agreement = SimpleNamespace(failed=None, wary=False, call=7)
        self.traffic = SimpleNamespace(sent=3, received=4)
        self.engine, self.wire = SimpleNamespace(last=None), SimpleNamespace(_failed=None)
        self.route, self.open, self.forward = object(), {}, SimpleNamespace(_current_level=-1)
        self.launched: list[tuple[Any, ...]] = []
        self.written: list[Any] = []

        def launch(*args: Any) -> Any:
            self.launched.append(args)
            assert self.agreement.call == 8 and self.engine.last is self.route
            if isinstance(runs, Exception):
                raise runs
            return runs

        told = (*map(vars, (self.wire, self.traffic)), self.open, vars(self.forward), self.written.append)
        told = (vars(self.agreement), vars(self.engine), self.route, *told)
        arguments = (600, "sum", SCALE, torch.float32, "identity")
        self.function = native.make_again((Tensor, *told, launch, *arguments))

    def __call__(self, shards: Any = X, lengths: Any = None, out: Any = None, **changed: Any) -> bool:
        names = {"size": 600, "op": "sum", "scale": SCALE, "out_dtype": torch.float32, "grad": "identity"} | changed
        return self.function(
            shards, LENGTHS if lengths is None else lengths, OUT if out is None else out, *names.values()
        )


LENGTHS, OUT, SCALE = [4, 2], torch.empty(4, 3), 0.5


def test_the_last_call_runs_again() -> None:
    again = Again()
    assert again() is True
    assert len(again.launched) == 1 and [*map(id, again.launched[0])] == [id(OUT), id(X), id(LENGTHS)]
    assert again.agreement.call == 8 and again.engine.last is again.route and again.written == [(OUT,)]
    assert (again.traffic.sent, again.traffic.received) == (0, 0)
    again.agreement.call = 7
    text, size = "".join(["su", "m"]), int("600")
    assert again(op=text, size=size) is True  # other objects, the same values
    with torch.no_grad():
        again.agreement.call = 7
        assert again(X.clone().requires_grad_()) is True
    assert len(again.launched) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"size": 601},
        {"size": None},
        {"size": 600.0},
        {"size": 1 << 70},
        {"size": np.int64(600)},
        {"size": X},
        {"op": "mean"},
        {"op": np.array(["sum", "sum"])},
        {"op": None},
        {"scale": None},
        {"scale": 0.25},
        {"scale": -0.5},
        {"scale": 1},
        {"out_dtype": torch.float64},
        {"out_dtype": None},
        {"grad": "sum"},
        {"lengths": (4, 2)},
        {"lengths": X},
        {"shards": [X]},
        {"shards": torch.nn.Parameter(X)},
        {"shards": X.clone().requires_grad_()},
        {"shards": 3},
        {"out": torch.nn.Parameter(X)},
        {"out": torch.empty(4, 3, requires_grad=True)},
        {"out": 3},
    ],
)
def test_what_differs_from_the_last_call_goes_another_way(other: dict[str, Any]) -> None:
    again = Again()
    assert again(**other) is False
    assert not again.launched and again.agreement.call == 7 and again.engine.last is None and not again.written
    assert again() is True


@pytest.mark.parametrize(
    "where, name, value",
    [
        ("agreement", "failed", "it was left"),
        ("agreement", "wary", True),
        ("wire", "_failed", "amid its transfers"),
        ("forward", "_current_level", 0),
    ],
)
def test_nothing_runs_again_where_the_long_way_must_look(where: str, name: str, value: Any) -> None:
    again = Again()
    setattr(getattr(again, where), name, value)
    assert again() is False and not again.launched and again.agreement.call == 7


def test_a_call_left_open_is_completed_first() -> None:
    again = Again()
    again.open[0] = lambda: None
    assert again() is False and not again.launched
    again.open.clear()
    assert again() is True


def test_a_last_call_that_its_launch_refuses_has_not_happened() -> None:
    again = Again(runs=False)
    assert again() is False and again.agreement.call == 7 and not again.written and len(again.launched) == 1
    again = Again(runs=RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        again()
    assert again.agreement.call == 8 and not again.written
    for items in ((), [1] * 15, (1,) * 14):
        with pytest.raises(RuntimeError, match="make_again"):
            native.make_again(items)
    with pytest.raises(RuntimeError, match="8 arguments"):
        again.function(X)


@pytest.mark.parametrize("turn", [1, 2])
def test_an_interrupt_before_the_last_call_runs_again_is_raised(turn: int) -> None:
    """In the Python code of a mode, which looks on while attributes are read; other errors are the long way's."""
    again = Again()
    with pytest.raises(KeyboardInterrupt), RaisesOnce(turn, KeyboardInterrupt):
        again()
    with RaisesOnce(turn, RuntimeError):
        assert again() is False
    assert not again.launched and again.agreement.call == 7
    assert again() is True


def test_the_last_call_is_the_last_of_its_group() -> None:
    calls = Calls(1, X, OUT)
    assert calls.last(X, LENGTHS, OUT) is False
    known = calls._known[calls.call]._replace(one=lambda *args: True, again=lambda *args: args)
    calls.remember(calls.call, known)
    assert calls.run(calls.call, X, OUT) == [OUT] and calls.last(X, LENGTHS, OUT) == (X, LENGTHS, OUT)
    gathered = calls.key("all_gather", X, ([4, 2],), OUT, "sum")
    calls.remember(gathered, known._replace(again=Known._field_defaults["again"]))
    assert calls.run(gathered, X, OUT) == [OUT] and calls.last(X, LENGTHS, OUT) == (X, LENGTHS, OUT)
    calls.clear()
    assert calls.last(X, LENGTHS, OUT) is False


class Peers:
    """The peer transport in terms of gloo, which says by which way it was called."""

    reason = None

    def __init__(self) -> None:
        self.ways: list[str] = []

    def check(self) -> None: ...

    def predict(self, *args: Any) -> Any:
        return False, (0, 0), (0, 0)

    def exchange(self, plan: ExchangePlan, shards: Any, outs: Any, op: str, scale: Any, way: str = "long") -> None:
        self.ways.append(way)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, shards[0][: plan.sources[dist.get_rank()][1]])
        outs[0].copy_(reference.ragged_sum(rows, [0, 0], len(outs[0]), op=op, scale=scale, out_dtype=outs[0].dtype))

    def launcher(self, plan: ExchangePlan, outs: Any, shards: Any, op: str, scale: Any, bound: list[int]) -> Any:
        def one(out: Tensor, shard: Tensor, lengths: list[int] | None) -> bool:
            if lengths is not None and lengths != bound:
                return False
            self.exchange(plan, [shard], [out], op, scale, "by its key" if lengths is None else "again")
            return True

        return None, one


def _all_reduce_again(rank: int, world_size: int) -> None:
    group, peers = ShardGroup(), Peers()
    group.engine.peers, agreement = peers, group._agreement  # type: ignore[assignment]
    assert group.engine.wire is not None
    other, before = [3, 6], agreement.call
    last = "again" if native.status().backend == "native" else "by its key"
    turns = [([6, 4], way) for way in ("long", "by its key", last, last)]
    turns += [(other, "long"), (other, "by its key"), (other, last), ([6, 4], "by its key"), ([6, 4], last)]
    for turn, (lengths, _) in enumerate(turns):
        rows = [random_values((n, 3), torch.float32, 2 * turn + r) for r, n in enumerate(lengths)]
        out = torch.empty(7, 3)
        version = out._version
        group.engine.last, group.engine.wire.traffic.sent = LOCAL_ROUTE, 5
        assert group.all_reduce(rows[rank], lengths, size=7, out=out) is out and out._version > version
        assert_same(out, reference.ragged_sum(rows, [0, 0], 7, out_dtype=torch.float32))
        assert group.stats().route.transport == "peer" and group.stats().sent == 0
        assert agreement.call - before == turn + 1
    assert peers.ways == [way for _, way in turns]
    for count in (torch.tensor(7), np.array(7)):  # ints that another call may find changed
        for size in (7, 7, 9):
            count[...] = size
            y = group.all_reduce(rows[rank], [6, 4], size=count)
            assert_same(y, reference.ragged_sum(rows, [0, 0], size, out_dtype=torch.float32))
            assert peers.ways.pop() == "long"
    agreement.failed = "it was left"
    with pytest.raises(RuntimeError, match="failed earlier"):
        group.all_reduce(rows[rank], lengths, size=7, out=out)
    assert len(peers.ways) == len(turns)


def test_an_all_reduce_between_processes_runs_again() -> None:
    run_processes(_all_reduce_again, 2)


def test_a_failed_launch_is_explained_by_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ShardGroup(2)
    runner = group._runner
    fails = lambda *args: (_ for _ in ()).throw(RuntimeError("CUDA error"))  # noqa: E731
    runner.replays.last = fails
    with pytest.raises(RuntimeError, match="CUDA error"):
        group.all_reduce([X, X], [4, 4], out=OUT)
    monkeypatch.setattr(group.engine, "peers", Owner())
    with pytest.raises(RuntimeError, match="the group has failed"):
        group.all_reduce([X, X], [4, 4], out=OUT)


def test_calls_are_forgotten_with_what_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that launches one again would leave alone another one that compares it anew."""
    group = ShardGroup(4)
    replays, agreement = group._runner.replays, group._agreement
    monkeypatch.setattr("shardsum.group.agreement._MAX_AGREED", 3)
    monkeypatch.setattr(agreement, "world_size", 2)
    monkeypatch.setattr(agreement, "_state", lambda *args: None)
    stated: list[str] = []
    monkeypatch.setattr(agreement, "_collect", lambda name: stated.append(name) or [])
    for n, known in ((0, 0), (1, 1), (2, 2), (0, 3), (3, 3), (3, 1), (0, 1), (1, 2)):
        assert len(replays) == known
        agreement.agree(str(n), {})  # as a call does: first this
        replays.remember(n, Known(lambda outs, rows: None, []))
    assert stated == ["0", "1", "2", "3", "0", "1"]


def test_tangents_go_the_long_way_which_refuses_them() -> None:
    calls = Calls(1, X, None)
    with forward_ad.dual_level():
        assert calls.run(calls.call, forward_ad.make_dual(X, X), None) is None and not calls.launched


def test_scales_that_print_or_compare_alike_are_not_one() -> None:
    assert len({_text(0.0), _text(-0.0), _text(0), _text(0.1), _text(np.float32(0.1)), _text(None)}) == 6
    assert _text(float("nan")) == _text(float("nan"))


def test_a_prepared_call_keeps_the_sign_of_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = object.__new__(peer.PeerTransport)
    transport.rank, transport.tuning, transport._calls = 0, peer.Tuning(), {}
    transport.layout = peer.MemoryLayout(2, 2, 8, 1, 1 << 20)
    scales = []
    monkeypatch.setattr(transport, "_words", lambda *args: scales.append(str(args[-1])) or [1], raising=False)
    plan = ExchangePlan(((0, 4), (0, 4)), (0, 1), ((0, 4), (0, 4)), (0, 1), 2)
    for scale in (0.0, -0.0, 0.0, None):
        transport.prepare(plan, 3, torch.float32, torch.float32, scale=scale)
    assert scales == ["0.0", "-0.0", "None"]


def test_tensors_elsewhere_go_the_long_way() -> None:
    calls = Calls(1, X, None, torch.device("cuda", 0))
    assert calls.run(calls.call, X, None) is None and not calls.launched


def test_what_may_change_is_not_remembered() -> None:
    calls = Calls(1, X, None)
    for others in ((Tensor, torch.tensor(7)), (1, (np.array(7),)), [7]):
        calls.remember(calls.key("all_reduce", X, ([4, 2],), None, others), Known(lambda outs, rows: None, []))
        assert len(calls) == 1
    calls.remember(
        calls.key("all_reduce", X, ([4, 2],), None, (np.int64, np.int64(7), None, _text(0.5))), Known(*2 * [None])
    )
    assert len(calls) == 2


def test_arguments_that_no_call_takes() -> None:
    calls = Calls(1, X, None)
    odd = calls.key("all_reduce", X, ([4, 2],), None, ([],))
    assert calls.run(odd, X, None) is None


def test_the_oldest_of_many_is_forgotten() -> None:
    calls = Calls(1, X, None)
    for n in range(2000):
        calls.remember(calls.key("all_reduce", X, ([n, 2],), None, 1), Known(lambda outs, rows: None, []))
    assert len(calls) == 1024 and calls.run(calls.call, X, None) is None


class Owner:
    device = torch.device("cuda", 3)

    def check(self) -> None:
        raise RuntimeError("the group has failed")


def test_a_launch_that_looks_itself_may_refuse() -> None:
    for runs in (True, False):
        calls = Calls(1, X, None).one(runs)
        assert (calls.run(calls.call, X.t().contiguous().t(), None) is not None) == runs
        assert calls.run(calls.call, X.clone().requires_grad_(), None) is None


def test_a_nested_tensor_is_not_known() -> None:
    assert key(shards=torch.nested.nested_tensor([X, X[:2]])) is None


def test_a_failed_group_says_so_in_a_prepared_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(peer, "peer_run", fail)
    call = peer.PreparedCall(Owner(), None, None, [7, 1, 9], True, (X.dtype, X.dtype))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the group has failed"):
        call([torch.empty(4, 3)], [X], [2, 5])
