"""Domains whose processes share one GPU and fold carried accumulators over peer memory, against the definition bit for
bit. NCCL refuses such processes: what travels between domains goes through the host here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsum import ShardGroup
from shardsum.core.layout import ExchangePlan
from shardsum.transports import Stamp, TaggedWire, Wire
from shardsum.transports.peer.transport import PeerTransport
from tests.carried import random_exchanges
from tests.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class ThroughTheHost(Wire):
    """Transfers of a step between processes that share a GPU, by way of a CPU wire."""

    def __init__(self, cpu: TaggedWire) -> None:
        super().__init__(cpu.group, cpu.rank, cpu.world_size, cpu.timeout)
        self.cpu = cpu

    def begin(self, stamp: Stamp, call: int, origin: int = 0, beside: bool = True) -> None:
        self.cpu.begin(stamp, call, origin)

    def meet(self, device: torch.device) -> None:
        """They have met."""

    def send(self, x: torch.Tensor, peer: int, chunk: int) -> Any:
        return self.cpu.send(x.cpu(), peer, chunk), None, None

    def recv(self, out: torch.Tensor, peer: int, chunk: int) -> Any:
        here = torch.empty_like(out, device="cpu")
        return self.cpu.recv(here, peer, chunk), here, out

    def flush(self) -> Any:
        """Transfers have started at once."""
        return 0, None, None

    def wait(self, transfer: Any, device: torch.device) -> None:
        work, here, out = transfer
        self.cpu.wait(work, torch.device("cpu"))
        if out is not None:
            out.copy_(here)


def on_one_gpu(ranks: int, placement: str | list[int], domains: list) -> ShardGroup:
    group = ShardGroup(ranks, transport="carry", domains=domains, placement=placement, device="cuda", timeout=60)
    planner = group._planner
    alone = domains.count(domains[group.rank]) == 1
    assert (planner.inside is None) == alone
    planner.wire = ThroughTheHost(planner.agreement.side.wire)
    return group


def inside(rank: int, world: int, ranks: int, placement: str | list[int], domains: list, calls: int) -> None:
    for again in range(2):  # the members of a domain find each other once, whatever groups there are
        group = on_one_gpu(ranks, placement, domains)
        assert random_exchanges(group, calls // 2, ranks + again) > 0
        group.close()


@pytest.mark.parametrize(
    ("ranks", "placement", "domains", "calls"),
    [
        (4, "contiguous", [0, 0, 1, 1], 30), (16, "contiguous", [0, 0, 1, 1], 15), (9, "zigzag", [0, 0, 1, 1], 15),
        (8, "contiguous", [0, 1, 1, 1], 15), (7, [3, 0, 1, 2, 2, 1, 0], ["a", "b", "b", "a"], 15),
    ],
)  # fmt: skip
def test_domains_fold_over_peer_memory(ranks: int, placement: str | list[int], domains: list, calls: int) -> None:
    run_processes(inside, 4, ranks, placement, domains, calls, backend="cpu:gloo", timeout=240)


def failed(rank: int, world: int) -> None:
    """A launch that fails marks the headers that it was given, in each way that rows travel; one that runs does not."""
    device = torch.device("cuda", torch.cuda.current_device())
    size, width = 4000, 8
    t = PeerTransport(dist.group.WORLD, (0, 1), device, timeout=2, staging_bytes=1 << 20)
    plan = ExchangePlan(((0, size),) * 2, (0, 1), ((0, size // 2), (size // 2, size)), (0, 1), 2)
    x = torch.ones(size, width, device=device)
    start = torch.full((size // 2, width), 3.0, device=device)
    first, second = (torch.full((2,), 77, dtype=torch.int64, device=device) for _ in range(2))
    out = torch.empty(size // 2, width, device=device)
    begins, goes_on = (t.prepare(plan, width, x.dtype, x.dtype, goes_on=on) for on in (False, True))
    begins([out], [x], [0, size], number=1, headers=[first, second])
    assert (out == 2).all()
    goes_on([out], [x], [0, size], number=2, accumulators=start, headers=[first, second])
    assert (out == 5).all() and first.tolist() == second.tolist() == [77, 77]
    if rank == 0:  # the other one does not come
        goes_on([out], [x], [0, size], number=3, accumulators=start, headers=[first])
        torch.cuda.synchronize()
        assert out.isnan().all() and first.tolist() == [-1, -1] and second.tolist() == [77, 77]
    dist.barrier()
    with pytest.raises(RuntimeError, match="did not come within 2 s"):
        for _ in range(3):
            goes_on([out], [x], [0, size], number=3, accumulators=start, headers=[second])
            torch.cuda.synchronize()
        t.check()
    if rank == 1:  # it is told, and launches no more
        assert second.tolist() == [-1, -1]
    t.close()


def test_a_launch_that_fails_marks_headers() -> None:
    run_processes(failed, 2, backend="cpu:gloo", timeout=120)
