from __future__ import annotations

import logging

import pytest

from shardsum.core.log import log


def test_messages_carry_the_rank_where_there_is_one(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    log.warning("took %d s", 3)
    monkeypatch.setenv("RANK", "5")
    log.warning("took %d s", 3)
    assert caplog.record_tuples == [
        ("shardsum", logging.WARNING, "took 3 s"),
        ("shardsum", logging.WARNING, "[rank 5] took 3 s"),
    ]
