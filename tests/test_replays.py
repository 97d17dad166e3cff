"""Calls that are launched again: what makes two calls the same, and what sends a known one the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardsum import ShardGroup
from shardsum.group import _text
from shardsum.layout import ExchangePlan
from shardsum.replays import Known, Replays
from shardsum.transports import peer

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

    def launch(self, outs: list[Tensor], rows: list[Tensor]) -> bool:
        self.launched.append([*outs, *rows])
        return True


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


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(
    "out", [torch._neg_view(torch.empty(4, 3)), torch.empty(4, 3, dtype=torch.complex64).conj()], ids=["neg", "conj"]
)
def test_lazy_signs_of_out_go_the_long_way(out: Tensor, looks: bool) -> None:
    """The dispatcher would hand a copy to the launch, and then find no result to copy back."""
    calls = Calls(1, X, out)
    calls.remember(calls.call, Known(calls.launch, [(out.shape, out.dtype)], looks))
    assert calls.run(calls.call, X, out) is None and not calls.launched


def test_calls_are_forgotten_with_what_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that launches one again would leave alone another one that compares it anew."""
    group = ShardGroup(4)
    replays, agreement = group._runner.replays, group._agreement
    monkeypatch.setattr("shardsum.agreement._MAX_AGREED", 3)
    monkeypatch.setattr(agreement, "world_size", 2)
    monkeypatch.setattr(agreement, "_state", lambda *args: None)
    stated: list[str] = []
    monkeypatch.setattr(agreement, "_collect", lambda name: stated.append(name) or [])
    for n, known in ((0, 0), (1, 1), (2, 2), (0, 3), (3, 3), (3, 1), (0, 1), (1, 2)):
        assert len(replays) == known
        agreement.agree(str(n), {})  # as a call does: first this
        replays.remember(n, Known(lambda outs, rows: True, []))
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


def test_arguments_that_no_call_takes() -> None:
    calls = Calls(1, X, None)
    odd = calls.key("all_reduce", X, ([4, 2],), None, ([],))
    assert calls.run(odd, X, None) is None


def test_the_oldest_of_many_is_forgotten() -> None:
    calls = Calls(1, X, None)
    for n in range(2000):
        calls.remember(calls.key("all_reduce", X, ([n, 2],), None, 1), Known(lambda outs, rows: True, []))
    assert len(calls) == 1024 and calls.run(calls.call, X, None) is None


class Owner:
    device = torch.device("cuda", 3)

    def check(self) -> None:
        raise RuntimeError("the group has failed")


def test_a_launch_that_looks_itself_may_refuse() -> None:
    for runs in (True, False):
        calls = Calls(1, X, None)
        calls.remember(calls.call, Known(lambda outs, rows, runs=runs: runs, [((5, 3), X.dtype)], looks=True))
        assert (calls.run(calls.call, X.t().contiguous().t(), None) is not None) == runs
        assert calls.run(calls.call, X.clone().requires_grad_(), None) is None


def test_the_peer_launch_refuses_what_is_not_on_a_gpu() -> None:
    plan = torch.zeros(3, dtype=torch.int64)
    for out, shard in ((X, X), (X, X.to_sparse()), (X.to_sparse(), X), (X.to("meta"), X.to("meta"))):
        assert peer._run_bound(out, shard, plan) is False


def test_a_nested_tensor_is_not_known() -> None:
    assert key(shards=torch.nested.nested_tensor([X, X[:2]])) is None


def test_a_bound_call_hands_its_bounds_over(monkeypatch: pytest.MonkeyPatch) -> None:
    call = peer.PreparedCall(Owner(), None, None, [7, 1, 9], single=True)  # type: ignore[arg-type]
    ran = []
    monkeypatch.setattr(peer, "_bind", lambda plan, *bound: (plan.tolist(), *bound))
    monkeypatch.setattr(peer, "_run_bound", lambda out, shard, plan: ran.append((out, shard, plan)) or True)
    out = torch.empty(4, 3)
    assert call.bound([2, 5])([out], [X]) and call.looks
    assert ran == [(out, X, ([7, 1, 9], 2, 5, 3))]
    several = peer.PreparedCall(Owner(), None, None, [7, 1, 9], single=False)  # type: ignore[arg-type]
    monkeypatch.setattr(peer, "_run", lambda *args: ran.append(args))
    assert several.bound([2, 5, 0, 1])([out], [X, X]) and not several.looks
    assert ran[1][:5] == ([out], [X, X], [2, 5, 0, 1], None, None) and ran[1][5].tolist() == [7, 1, 9]


@pytest.mark.parametrize("single", [True, False])
def test_a_failed_group_says_so_in_a_bound_call(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(peer, "_bind", lambda *args: None)
    for name in ("_run_bound", "_run"):
        monkeypatch.setattr(peer, name, fail)
    call = peer.PreparedCall(Owner(), None, None, [7, 1, 9], single)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the group has failed"):
        call.bound([2, 5])([torch.empty(4, 3)], [X])
