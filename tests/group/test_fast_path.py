"""The fast path of plans over peer memory: which calls take it, and that all others are left to the usual path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardsum.group import exchanges

PLANNER: Any = SimpleNamespace(always_agrees=False, announce_call=lambda: None, check_peers=lambda: None)
BOUND, X = torch.zeros(1), torch.ones(3, 2)


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the native ones: what they were given."""
    monkeypatch.setattr(exchanges, "peer_call_new", lambda shard, bound: ("one", shard))
    monkeypatch.setattr(exchanges, "peer_call_new_list", lambda shards, bound: ["many", *shards])
    monkeypatch.setattr(exchanges, "peer_call", lambda out, shard, bound: None)


def test_plain_calls() -> None:
    out = torch.zeros(3, 2)
    assert exchanges.launch(PLANNER, BOUND, True, X, None) == ("one", X)
    assert exchanges.launch(PLANNER, BOUND, True, X, out) is out and out._version == 1
    for single in (True, False):
        found: Any = exchanges.launch(PLANNER, BOUND, single, [X, X], None)
        assert found[0] == "many" and len(found) == 3
    with torch.no_grad():
        assert exchanges.launch(PLANNER, BOUND, False, [X, X.clone().requires_grad_()], None)


@pytest.mark.parametrize("single", [True, False])
def test_other_calls_are_left_alone(single: bool) -> None:
    unusual = [
        ([X, X.clone().requires_grad_()], None), ([X, X.t()], None), ([X, None], None), ([X, X], [X, X]),
        ((X, X), None), (X.t(), None), (X.clone().requires_grad_(), None), (X, X.clone().requires_grad_()),
    ]  # fmt: skip
    for shards, out in [*unusual, *([] if single else [(X, None), (X, X.clone())])]:
        assert exchanges.launch(PLANNER, BOUND, single, shards, out) is None
    always: Any = SimpleNamespace(always_agrees=True)
    assert exchanges.launch(always, BOUND, single, [X], None) is None


def test_what_the_operators_refuse_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(exchanges, "peer_call_new_list", refuse)
    assert exchanges.launch(PLANNER, BOUND, False, [X, X], None) is None
