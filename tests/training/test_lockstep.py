"""One function a hosted virtual rank, whose collective calls meet: the bits of a rank a process, and errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardsum import ShardGroup, bits, context_parallel_attention
from shardsum.training import context_ops
from shardsum.training.context import ContextBatch
from tests.processes import run_processes

pytest.importorskip("greenlet", reason="lockstep needs the package greenlet (extra: models)")

LENGTHS, BORDERS = [5, 0, 7, 3], [0, 4, 9, 15]
R = len(LENGTHS)


class Model(nn.Module):
    """Attention by chunks of one virtual rank, dropout, a choice of checkpointing and autocast inside."""

    def __init__(self, group: ShardGroup, checkpointing: bool, autocast: bool, **options: Any) -> None:
        super().__init__()
        self.group, self.checkpointing, self.autocast, self.options = group, checkpointing, autocast, options
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.recomputed = 0

    def block(self, i: int, x: torch.Tensor, batch: ContextBatch) -> torch.Tensor:
        self.recomputed += 1
        q, k, v = self.qkv[i](x).unflatten(-1, (3, 4, 4)).unbind(1)
        y = batch.attention(q, k, v)
        return x + torch.dropout(self.out[i](y.flatten(1).tanh()), 0.3, True)

    def forward(self, x: torch.Tensor, batch: ContextBatch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for i in range(3):
                if self.checkpointing:
                    x = self.group.checkpoint(self.block, i, x, batch, **self.options)
                else:
                    x = self.block(i, x, batch)
        return x.float().square().sum()


def train(group: ShardGroup, checkpointing: bool, autocast: bool, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """The gradients of two micro-batches, and how often each replica ran its block. Backward runs in a thread of its
    own, as it does for tensors on a GPU."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Model(group, checkpointing, autocast, **options), torch.randn(2, sum(LENGTHS), 16)
    group.generators.manual_seed(3)
    replicas = group.replicas(model)
    batch = group.context_parallel(LENGTHS, BORDERS)
    for micro_batch in x:
        chunks = micro_batch.split(LENGTHS)
        losses = group.lockstep([partial(r, chunks[v], batch) for v, r in zip(group.virtual_ranks, replicas)])
        with ThreadPoolExecutor(1) as thread:
            thread.submit(sum(losses).backward).result()
    group.reduce_gradients(replicas)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), [r.recomputed for r in replicas]


def _train_all(rank: int, world_size: int) -> list[torch.Tensor]:
    return [train(ShardGroup(R), c, a)[0] for c in (False, True) for a in (False, True)]


def test_same_bits_as_one_rank_a_process_with_checkpointing_autocast_and_dropout() -> None:
    together = _train_all(0, 1)  # first, since the processes are forks: what it imports is theirs
    alone = run_processes(_train_all, R)[0]  # no lockstep there
    assert bits.equal(alone[0], alone[2]) and bits.equal(alone[1], alone[3])  # checkpointing changes nothing
    assert not torch.equal(alone[0], alone[1])
    for found in (together, *run_processes(_train_all, 2)):
        for expected, grads in zip(alone, found):
            assert bits.equal(grads, expected), bits.first_difference(grads, expected)


def test_checkpointing_recomputes_every_rank_once() -> None:
    assert train(ShardGroup(R), False, False)[1] == [6] * R
    assert train(ShardGroup(R), True, False)[1] == [12] * R


def test_a_policy_by_operator_name_saves_attention_from_being_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    once = context_ops.forward
    monkeypatch.setattr(context_ops, "forward", lambda q, *args: (chunks.append(len(q)), once(q, *args))[1])
    saved = [torch.ops.shardsum.context_attention.default]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, saved)}
    kept, again = train(ShardGroup(R), True, False, **options), train(ShardGroup(R), True, False)
    assert len(chunks) == 2 * 3 * R * (1 + 2) and kept[1] == again[1]
    assert bits.equal(kept[0], again[0])


def test_group_collectives_meet() -> None:
    group = ShardGroup(3)
    shards = [torch.arange(n, dtype=torch.float32).add(10 * n).requires_grad_() for n in (2, 0, 3)]
    lengths, wanted = [2, 0, 3], [(0, 2), (0, 3), (1, 3)]
    held = [(0, n) for n in lengths]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = group.exchange(x, held, wanted, size=3)
        return [y, group.reduce_scatter(x, lengths), group.all_gather(x), group.all_reduce(x, grad="sum")]

    found = group.lockstep([partial(function, x) for x in shards])
    everyone, total = group.all_gather(shards), group.all_reduce(shards)
    for v, parts in enumerate(zip(group.exchange(shards, held, wanted, size=3), group.reduce_scatter(shards, lengths))):
        for mine, expected in zip(found[v], (*parts, everyone, total)):
            assert bits.equal(mine, expected)
    sum(y.sum() for y, *_ in found).backward()
    assert [x.grad.tolist() for x in shards] == [[2, 3], [], [2, 3, 2]]


def test_the_one_call_form_meets_too() -> None:
    group, x = ShardGroup(R), torch.randn(3, sum(LENGTHS), 2, 4)
    shards = [[*part.split(LENGTHS)] for part in x]
    attend = partial(context_parallel_attention, group=group, lengths=LENGTHS, cu_seqlens=BORDERS)
    found = group.lockstep([partial(attend, *parts) for parts in zip(*shards)])
    assert all(map(bits.equal, found, attend(*shards)))


def meets(group: ShardGroup, wrong: str, v: int) -> Any:
    x = torch.ones(2, requires_grad=True)
    odd = v == group.virtual_ranks[-1]
    if wrong == "raises" and odd:
        raise KeyError("mine")
    if wrong == "returns" and odd:
        return None
    if wrong == "other call" and odd:
        return group.all_gather(x)
    if wrong == "other mode" and odd:
        with torch.no_grad():
            return group.reduce_scatter(x)
    if wrong == "checkpoint":
        return torch_checkpoint(group.reduce_scatter, x, use_reentrant=False)
    if wrong == "identity":
        return group.all_reduce(x)
    if wrong == "async":
        return group.all_gather(x, async_op=True)
    if wrong == "list":
        return group.all_gather([x, x])
    if wrong == "nested":
        return group.lockstep([lambda: None] * 2)
    if wrong == "bad for the call":
        return group.reduce_scatter(x, [2, 2], size=1)
    lengths = [2] * group.num_virtual_ranks
    return group.reduce_scatter(x, lengths, size=2, op="mean" if wrong == "other argument" and odd else "sum")


WRONG = {
    "raises": (KeyError, "mine"),
    "returns": (ValueError, r"virtual rank 1's function has returned, virtual rank 0's waits in reduce_scatter\("),
    "other call": (ValueError, r"virtual rank 0 calls reduce_scatter\(.*virtual rank 1 calls all_gather\("),
    "other argument": (
        ValueError,
        r"0 calls reduce_scatter\(.*op='sum'\).* 1 calls reduce_scatter\(.*op='mean'\)",
    ),
    "other mode": (ValueError, "0 calls reduce_scatter.*grad on.* 1 calls reduce_scatter.*grad off"),
    "checkpoint": (ValueError, "reduce_scatter: virtual rank 0 calls it under torch.utils.checkpoint"),
    "identity": (ValueError, "grad: all_reduce in a lockstep"),
    "async": (ValueError, "all_gather: out and async_op"),
    "list": (ValueError, "shards: virtual rank 0 passes list to all_gather"),
    "nested": (ValueError, "lockstep: called inside"),
    "bad for the call": (ValueError, "virtual rank 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_ranks_and_calls_and_leave_everything_as_it_was(wrong: str) -> None:
    group = ShardGroup(2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(WRONG[wrong][0], match=WRONG[wrong][1]):
        group.lockstep([partial(meets, group, wrong, v) for v in (0, 1)])
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), before)
    fine = group.lockstep([partial(meets, group, "", v) for v in (0, 1)])
    assert [y.tolist() for y in fine] == [[2], [2]] and isinstance(group.all_gather([torch.ones(1)] * 2), torch.Tensor)


def test_functions_must_be_one_a_hosted_rank() -> None:
    with pytest.raises(ValueError, match=r"functions: expected 2 callables, one for each of virtual ranks \[0, 1\]"):
        ShardGroup(2).lockstep([lambda: None])


def test_finally_clauses_of_waiting_functions_run() -> None:
    group, ended = ShardGroup(2), []

    def waits() -> None:
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                group.all_gather(torch.ones(1))
        finally:
            ended.append(torch.is_grad_enabled())

    with pytest.raises(KeyError):
        group.lockstep([waits, partial(meets, group, "raises", 1)])
    assert ended == [True] and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_modes_of_a_function_are_its_own() -> None:
    group = ShardGroup(2)

    def function(v: int) -> bool:
        torch.set_grad_enabled(v == 0)  # for good
        return torch.is_grad_enabled()

    assert group.lockstep([partial(function, v) for v in (0, 1)]) == [True, False] and torch.is_grad_enabled()


def _diverges_on_one(rank: int, world_size: int) -> str:
    group = ShardGroup(4, timeout=20)
    wrong = "other call" if rank == 1 else ""
    with pytest.raises(ValueError) as caught:
        group.lockstep([partial(meets, group, wrong, v) for v in group.virtual_ranks])
    return str(caught.value)


def test_a_divergence_on_one_process_is_an_error_on_all() -> None:
    for message in run_processes(_diverges_on_one, 2):
        assert "virtual rank 2 calls reduce_scatter" in message and "virtual rank 3 calls all_gather" in message


def test_one_hosted_rank_has_its_streams_too() -> None:
    group = ShardGroup(1)
    (drawn,) = group.lockstep([lambda: torch.rand(3)])
    group.generators.manual_seed(0)
    with group.rng(0):
        assert torch.equal(drawn, torch.rand(3))


class Layers(nn.Module):
    """Two layers of attention of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 64), nn.Linear(32, 16)

    def layer(self, x: torch.Tensor, cp: ContextBatch) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], 1)
        return x + self.out(cp.attention(q, k, v).flatten(1)).relu()

    def forward(self, x: torch.Tensor, cp: ContextBatch) -> torch.Tensor:
        return self.layer(self.layer(x, cp), cp)


def test_compiled_code_waits_between_its_graphs() -> None:
    """Steps of other lengths compile nothing anew, and have the bits of eager code."""
    torch._dynamo.reset()
    counter, group, module = CompileCounterWithBackend("aot_eager"), ShardGroup(3), Layers()
    replicas, compiled, counts = group.replicas(module), torch.compile(Layers.forward, backend=counter), []
    for step in range(4):
        lengths = [5 + step, 4, 7 - step]
        cp = group.context_parallel(lengths, [0, 3, 11, 16])
        xs, found = [torch.randn(n, 16) for n in lengths], []
        for run in (Layers.forward, compiled):
            ys = group.lockstep([partial(run, replica, x, cp) for replica, x in zip(replicas, xs)])
            sum(y.square().sum() for y in ys).backward()
            group.reduce_gradients(replicas)
            found.append([*(y.detach() for y in ys), *(p.grad for p in module.parameters())])
            module.zero_grad(set_to_none=True)
        assert all(map(bits.equal, *found))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1] > 0


def test_compiled_code_that_cannot_wait_is_refused() -> None:
    group, x = ShardGroup(2), torch.randn(5, 2, 8)
    cp = group.context_parallel([5, 5], [0, 4, 10])
    whole = torch.compile(lambda x: cp.attention(x, x, x) + 1, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="in a lockstep it waits for other functions"):
        group.lockstep([partial(whole, x)] * 2)
    gather = torch.compile(lambda x: cp.gather(x) + 1, backend="eager")
    with pytest.raises(Exception, match="gather: virtual rank 0 calls it in a lockstep inside code under"):
        group.lockstep([partial(gather, x)] * 2)
    assert group.lockstep([lambda: 1, lambda: 2]) == [1, 2]
