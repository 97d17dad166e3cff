"""One workspace a process group: who makes it, who shares it, who frees it. Its memory on GPUs: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardsum.transports.peer import workspace as module
from shardsum.transports.peer.layout import Regions
from shardsum.transports.peer.workspace import Workspace, number_of

DEVICE = torch.device("cuda", 0)
REGIONS = Regions(2, 132, 1 << 20, 1 << 20, 1 << 20)


class Group:
    """A process group as far as the registry knows it."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Workspace]:
    """The workspaces that are made, without memory."""
    found: list[Workspace] = []

    def init(self: Any, group: Any, device: torch.device, regions: Regions, gather: Any) -> None:
        self.regions, self.users = regions, 0
        self._rank, self._group, self._device, self._memory = 0, module.ref(group), device, object()
        self._failure = torch.zeros(9, dtype=torch.int64)
        found.append(self)

    monkeypatch.setattr(Workspace, "__init__", init)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "_kept", [])
    return found


def acquire(group: Any, gather: Any = lambda value: [value, value]) -> Workspace:
    return Workspace.acquire(group, DEVICE, lambda: REGIONS, gather)


def test_groups_on_the_same_processes_share_it_until_the_last_one_goes(made: list[Workspace]) -> None:
    group, other = Group(), Group()
    gathered: list[Any] = []
    first, second, third = acquire(group), acquire(group), acquire(other)
    assert first is second and third is not first and first.users == 2
    first.release(gathered.append)
    assert hasattr(first, "_memory") and not gathered  # nobody waits
    second.release(gathered.append)
    assert not hasattr(first, "_memory") and gathered == [None]  # after a barrier
    assert acquire(group) is not first and len(made) == 3


def test_it_goes_with_its_process_group(made: list[Workspace]) -> None:
    group, before = Group(), len(module._workspaces)
    acquire(group)
    assert len(module._workspaces) == before + 1
    del group
    assert len(module._workspaces) == before


def test_a_failed_one_is_kept_and_refused(made: list[Workspace]) -> None:
    group = Group()
    failed = acquire(group)
    failed._failure[:5] = torch.tensor([1, 1, 5, 77, 0])
    with pytest.raises(RuntimeError, match=r"process 1 did not come within 3 s: this process.*block 5.*launch 77"):
        failed.check(3)
    failed.release(lambda value: [value])
    assert hasattr(failed, "_memory") and failed in module._kept
    with pytest.raises(RuntimeError, match=r"has failed.*create a new process group"):
        acquire(group)
    with pytest.raises(RuntimeError, match=r"has failed.*process 1 says so"):
        acquire(Group(), lambda value: [value, "failed"])
    with pytest.raises(RuntimeError, match="out of step"):
        acquire(Group(), lambda value: [value, "good"])


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((4, 9, 5, 9), "call 4 of the group here, call 5 there"),
        ((4, 9, 4, 8), "call 4 of the group has other arg"),
        (
            (number_of(9, 7), 9, number_of(9, 8), 9),
            r"call 9 \(in a backward pass, for call 7\) of the group here, call 9 \(in a .*, for call 8\) there",
        ),
    ],
)
def test_another_call_is_named(made: list[Workspace], numbers: tuple[int, ...], message: str) -> None:
    workspace = acquire(Group())
    workspace._failure.copy_(torch.tensor([2, 1, 0, 3, 0, *numbers]))
    with pytest.raises(RuntimeError, match=f"out of step: this process found process 1 in another call.*{message}"):
        workspace.check(1)
    workspace._failure[4] = 2  # another process found out
    with pytest.raises(RuntimeError, match=r"process 2 found process 1 in another call in block 0 of launch 3\. R"):
        workspace.check(1)
