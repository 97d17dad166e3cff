"""Messages that are paired by their order alone, as NCCL's are: each has a header, which its receiver checks.

On the CPU: gloo without the tags that it has here, so that every message is taken for whatever is awaited, and the
headers are all that tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardsum import ShardGroup
from shardsum.core import reference
from shardsum.core.layout import intervals_of, split_evenly
from shardsum.group import routes
from shardsum.transports import Wire
from shardsum.transports.headers import Headers, check_headers
from shardsum.transports.stamps import Step, stamp
from tests.processes import run_processes
from tests.values import assert_same, random_values

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool)


def by_order(group: ShardGroup) -> ShardGroup:
    """The group with the wire of NCCL, on gloo's own group."""
    planner, name = group._planner, group._planner.agreement.side.name
    wire = Wire(dist.group.WORLD, group.rank, group.world_size, timedelta(seconds=20), Headers(int(name, 16), CPU))
    planner.wire = planner.agreement._wire = wire
    return group


def batched(plan: Any) -> Any:
    """The plan with point-to-point transfers in batches, as on NCCL."""
    plan.device = torch.device("cuda")
    return plan


def is_spoiled(result: Tensor | list[Tensor]) -> bool:
    return all((x.view(torch.uint8) == 255).all() for x in ([result] if isinstance(result, Tensor) else result))


def test_words_that_a_kernel_spoils_make_headers_invalid() -> None:
    headers = Headers(5, CPU)
    headers.begin(Step(1, stamp("sum", {}), 1))
    before = headers.own().tolist()
    assert [x.numel() for x in headers.words] == [2, 2]
    headers.words[1].fill_(-1)
    assert headers.own().tolist() == [255] * 16 != before
    headers.begin(Step(2, stamp("sum", {}), 2))
    assert headers.own().tolist() != [255] * 16
    headers.words[0].fill_(-1)
    headers.begin(Step(3, stamp("sum", {}), 3))
    assert headers.own().tolist() == [255] * 16


def right(rank: int, world: int, transport: str, chunk_bytes: int) -> None:
    routes.CHUNK_BYTES = chunk_bytes
    ranks, size = world + 1, 37
    lengths = [size - 5 * r % size for r in range(ranks)]
    domains = range(world) if transport == "carry" else None
    group = by_order(ShardGroup(ranks, transport=transport, domains=domains))
    splits = split_evenly(size, ranks)
    sinks = intervals_of(splits)
    for dtype in DTYPES:
        for features in ((), (3,), (0,)):
            shards = [random_values((n, *features), dtype, r) for r, n in enumerate(lengths)]
            mine = [shards[v] for v in group.virtual_ranks]
            sources = [(0, n) for n in lengths]
            out_dtype = dtype if dtype.is_floating_point else torch.int64
            want = reference.exchange(shards, sources, [(0, size), *sinks], out_dtype=out_dtype)
            for name, wanted in (
                ("all_reduce", want[:1]),
                ("reduce_scatter", [want[1 + v] for v in group.virtual_ranks]),
            ):
                options = {"splits": splits} if name == "reduce_scatter" else {}
                plan = batched(group.plan(name, lengths, size=size, row_shape=features, dtype=dtype, **options))
                results = plan(mine)
                for y, expected in zip([results] if isinstance(results, Tensor) else results, wanted):
                    assert_same(y, expected)
            assert_same(group.all_gather(mine, lengths), torch.cat(shards))
    if transport == "gather":
        x = torch.stack([random_values((size, 3), torch.bfloat16, 50 + v) for v in range(ranks)])
        given = [n - 1 for n in lengths]
        on_device = torch.tensor([given[v] for v in group.virtual_ranks], dtype=torch.int32)
        y = group.all_reduce(x[list(group.virtual_ranks)], on_device, size=size)
        rows = [x[v, :n] for v, n in enumerate(given)]
        assert_same(y, reference.ragged_sum(rows, [0] * ranks, size, out_dtype=torch.bfloat16))
    group.check()


@pytest.mark.parametrize("transport", ["gather", "all_to_all", "carry"])
@pytest.mark.parametrize("chunk_bytes", [32 << 20, 64])
def test_headers_leave_every_bit_as_it_is(transport: str, chunk_bytes: int) -> None:
    run_processes(right, 3, transport, chunk_bytes)


HALVES, SWAPPED = [(0, 4), (4, 8)], [(4, 8), (0, 4)]


class Calls:
    """Calls of two groups whose messages have equal sizes."""

    def __init__(self, rank: int, transport: str) -> None:
        self.x = torch.full((4,), 1.0 + rank)
        self.groups = [by_order(ShardGroup(2, transport=transport)) for _ in range(2)]
        self.swap_and_back(), self.sum(), self.mean(), self.named(), self.integers(), self.other()

    def sum(self) -> Any:
        return self.groups[0].all_reduce(self.x, [4, 4])

    def mean(self) -> Any:
        return self.groups[0].all_reduce(self.x, [4, 4], op="mean")

    def named(self) -> Any:
        return self.groups[0].all_reduce(self.x, [4, 4], name="another")

    def integers(self) -> Any:
        return self.groups[0].reduce_scatter(self.x.to(torch.int32), [4, 4], splits=[2, 2])

    def scattered(self) -> Any:
        return self.groups[0].reduce_scatter(self.x, [4, 4], splits=[2, 2])

    def other(self) -> Any:
        return self.groups[1].all_reduce(self.x, [4, 4])

    def swap(self) -> Any:
        return self.groups[0].exchange(self.x.clone().requires_grad_(), HALVES, SWAPPED, size=8)

    def swap_and_back(self) -> Any:
        x = self.x.clone().requires_grad_()
        self.groups[0].exchange(x, HALVES, SWAPPED, size=8).sum().backward()
        return x.grad


#: What process 0 and process 1 do, and what both must read.
DIVERGENCES: dict[str, tuple[Callable[[Calls], list], Callable[[Calls], list], tuple[str, ...]]] = {
    "sum against mean": (lambda c: [c.sum], lambda c: [c.mean], ("op=sum", "op=mean")),
    "a skipped call with a name": (lambda c: [c.sum, c.named], lambda c: [c.named, c.sum], ("name=another",)),
    "groups in another order": (lambda c: [c.sum, c.other], lambda c: [c.other, c.sum], ("another group",)),
    "a skipped backward": (
        lambda c: [c.swap, c.swap],
        lambda c: [c.swap_and_back],
        ("exchange(", "backward of exchange("),
    ),
    "another dtype": (lambda c: [c.integers], lambda c: [c.scattered], ("torch.int32", "torch.float32")),
}


def diverge(rank: int, world_size: int, transport: str) -> dict[str, str]:
    found = {}
    for name, (first, second, _) in DIVERGENCES.items():
        calls = Calls(rank, transport)
        steps = (second if rank else first)(calls)
        if name == "another dtype":
            calls.scattered()
        results = [step() for step in steps[:-1]]
        spoiled = [is_spoiled(y.detach()) for y in results]
        if name != "a skipped backward":
            assert not spoiled or all(spoiled), (name, results)
        with pytest.raises(RuntimeError) as caught:
            last = steps[-1]()
            assert is_spoiled(last.detach()), (name, last)
            for group in calls.groups:
                group.check()
        found[name] = str(caught.value)
        for group in calls.groups:
            with pytest.raises(RuntimeError):
                group.all_reduce(calls.x, [4, 4])
    return found


@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_processes_out_of_step_get_no_number_and_an_error(transport: str) -> None:
    for messages in run_processes(diverge, 2, transport):
        for name, (_, _, words) in DIVERGENCES.items():
            assert "out of step" in messages[name] and all(w in messages[name] for w in words), (name, messages[name])


def told_by_others(rank: int, world: int, transport: str) -> None:
    """Process 0 is in another call. Process 2 never hears from it, only from process 1, which does."""
    group = by_order(ShardGroup(3, transport=transport, domains=range(3)))
    # Process 2 wants what process 1 folds, or sums: position 5 alone, which ranks 0, 1 and 2 hold.
    inputs, outputs = [(5, 6), (5, 6), (0, 6)], [(0, 0), (0, 0), (5, 6)]
    plans = [
        batched(group.plan("exchange", in_intervals=inputs, out_intervals=outputs, size=6, name=name))
        for name in ("a", "b")
    ]
    x = torch.ones(6 if rank == 2 else 1)
    assert [y.tolist() for y in [plans[0](x), plans[1](x)]] == [[3.0] if rank == 2 else []] * 2
    y = plans[0 if rank else 1](x)
    if rank:
        assert is_spoiled(y), y
        sender, found = (0, "another call") if rank == 1 else (1, "found another one out of step")
        with pytest.raises(RuntimeError, match=f"out of step.*process {rank} received from process {sender}.*{found}"):
            group.check()


def test_what_was_made_of_wrong_rows_is_told_on() -> None:
    run_processes(told_by_others, 3, "carry")


def test_the_operator() -> None:
    """Headers at any address; a result is spoiled for a difference in any byte, or once one was found."""
    good = torch.full((2,), 77)
    for place in range(40):
        header, state, record = good.clone(), torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        received = torch.zeros(48, dtype=torch.uint8)
        received[3:19] = received[25:41] = good.view(torch.uint8)
        outs = [torch.ones(3), torch.ones(2, 2, dtype=torch.int16)]
        check_headers(outs, header, state, record, received, [3, 25], [4, 9])
        assert torch.equal(header, good) and not state.any() and not record.any() and outs[0].tolist() == [1.0] * 3
        received[place] += 1
        check_headers(outs, header, state, record, received, [3, 25], [4, 9])
        if not (3 <= place < 19 or 25 <= place < 41):
            assert torch.equal(header, good) and not record.any()
            continue
        assert is_spoiled(outs) and outs[0].isnan().all() and (outs[1] == -1).all()
        assert header.tolist() == state.tolist() == [-1, -1] and record[:2].tolist() == [1, 4 if place < 19 else 9]
        first, later = record.clone(), torch.ones(1)
        check_headers([later], header, state, record, received, [], [])
        assert is_spoiled(later) and torch.equal(record, first)
