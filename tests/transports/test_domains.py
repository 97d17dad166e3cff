from __future__ import annotations

import pytest

from shardsum.transports import domains


def test_domains_are_numbered_by_their_first_process() -> None:
    d = domains.agree(["b", "a", "b", 7])
    assert d.of == (0, 1, 0, 2) and d.names == ("b", "a", "7") and d.members == ((0, 2), (1,), (3,))
    assert d.describe() == "3 domains: b [0, 2], a [1], 7 [3]"
    assert d.single.of == (0, 1, 2, 3) and d.single.count == 4


def test_hosts_of_one_name_that_booted_separately_differ() -> None:
    d = domains.agree(["node|1", "node|1", "node|2", "other|3"])
    assert d.of == (0, 0, 1, 2) and d.names == ("node (process 0)", "node (process 2)", "other")
    assert domains.agree([domains.host()] * 3).count == 1


@pytest.mark.parametrize("bad", ["ab", 3, ["a"], ["a", None], [True, False], [0.5, 1]])
def test_bad_domains_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="domains: "):
        domains.check(bad, 2)  # type: ignore[arg-type]
    domains.check(["a", 1], 2)
