"""Losses of all virtual ranks against the same losses in one process, for several numbers of processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardsum import ShardGroup
from shardsum.training.losses import sequence_mean
from tests.processes import run_processes

CHUNKS, TOKENS = [5, 0, 4, 3], [5, 0, 3, 4]  # of virtual ranks


def on_processes(fn, world_size: int) -> None:
    if world_size == 1:
        fn(0, 1)
    else:
        run_processes(fn, world_size)


def _scalar_losses(rank: int, world_size: int) -> None:
    group = ShardGroup(2)

    def of(values: list) -> list:
        return [values[v] for v in group.virtual_ranks]

    # Token weights [[0.5], [1, 0.25]] of losses [[4], [1, 2]]: mean 2.0, gradients w / 1.75.
    weights = [torch.tensor([0.5]), torch.tensor([1.0, 0.25])]
    token_losses = [torch.tensor(x, requires_grad=True) for x in ([4.0], [1.0, 2.0])]
    sums = of([(x * w).sum() for x, w in zip(token_losses, weights)])
    mean, weight = group.token_mean(sums, of([w.sum() for w in weights]))
    mean.backward()
    assert (mean.item(), weight.item(), weight.dtype) == (2.0, 1.75, torch.float32)
    for v in group.virtual_ranks:
        assert torch.equal(token_losses[v].grad, weights[v] / 1.75)
    # Sums of weights may be numbers, and below 1; a rank of weight 0 does not count, even where its loss is NaN.
    mean, weight = group.token_mean(of([torch.tensor(1.0), torch.tensor(float("nan"))]), of([0.25, 0.0]))
    assert (mean.item(), weight.item()) == (4.0, 0.25)
    mean, _ = group.token_mean(of([torch.tensor(1.0)] * 2), of([0.0, 0.0]))
    assert mean.item() == 0.0

    # Accumulation: counts [[3, 1], [0, 2]], the window's mean has dw = 3.5; the mean of means would have 4.0.
    for denominator in (6, 6.0, torch.tensor(6), torch.tensor([6.0], dtype=torch.float64)):
        w, tokens = torch.tensor(1.0, requires_grad=True), [[[1.0, 2, 3], [4]], [[], [5, 6]]]
        for micro_batch in tokens:
            sums = [torch.tensor(x).mul(w).sum() if x else w * 0 for x in micro_batch]
            mean, count = group.token_mean(of(sums), of([len(x) for x in micro_batch]), denominator=denominator)
            assert count.item() == sum(map(len, micro_batch))
            mean.backward()
        total = group.all_reduce([w.grad.reshape(1)] + [torch.zeros(1)] * (len(group.virtual_ranks) - 1), [1, 1])
        assert total.item() == 3.5
    mean, _ = group.token_mean(of([torch.tensor(1.0)] * 2), of([1, 1]), denominator=0)
    assert mean.item() == 0.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_and_denominators(world_size: int) -> None:
    on_processes(_scalar_losses, world_size)


def _sequences(rank: int, world_size: int) -> None:
    """Three sequences of 6, 4 and 2 tokens, cut into chunks of 5, 0, 4 and 3; a fourth one has no valid token."""
    group, lengths = ShardGroup(4), [6, 4, 2]
    losses = torch.arange(12.0, requires_grad=True)
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    sums, counts = [], []
    for x, s in zip(losses.split(CHUNKS), sequence.split(CHUNKS)):
        sums.append(torch.zeros(4).index_add(0, s, x))
        counts.append(torch.bincount(s, minlength=4))
    hosted = group.virtual_ranks
    mean, means = sequence_mean(group, [sums[v] for v in hosted], [counts[v] for v in hosted])
    mean.backward()
    assert means.tolist() == [2.5, 7.5, 10.5, 0.0]
    assert mean.item() == torch.tensor(20.5).div(3).item()
    expected = torch.tensor([1 / 3]).div(torch.tensor(lengths)[sequence])
    held = torch.cat([torch.full((n,), v in hosted) for v, n in enumerate(CHUNKS)])
    torch.testing.assert_close(losses.grad, expected * held, rtol=1e-6, atol=0)  # 1 / (3 length)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mean_of_sequences_that_are_cut_into_chunks(world_size: int) -> None:
    on_processes(_sequences, world_size)


def router_model() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return (torch.randn(12, 6, generator=g), torch.randn(6, 4, generator=g), torch.randint(0, 4, (12,), generator=g))


def _router(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Token loss, z-loss and a router's balance on tokens 5, 0, 3, 4: loss and summed gradient of the weights."""
    group = ShardGroup(4)
    x, weight, targets = router_model()
    grads, token_sums, chosen_sums, probability_sums, counts = [], [], [], [], []
    for v in group.virtual_ranks:
        w = weight.clone().requires_grad_()
        logits = x.split(TOKENS)[v] @ w
        losses = F.cross_entropy(logits, targets.split(TOKENS)[v], reduction="none")
        token_sums.append((losses + 0.1 * logits.logsumexp(-1).square()).sum())
        chosen_sums.append(F.one_hot(logits.argmax(-1), 4).float().sum(0))
        probability_sums.append(logits.softmax(-1).sum(0))
        counts.append(len(losses))
        grads.append(w)
    loss, _ = group.token_mean(token_sums, counts)
    chosen, _ = group.token_mean(chosen_sums, counts)
    weights, _ = group.token_mean(probability_sums, counts)
    loss = loss + 0.5 * 4 * (chosen * weights).sum()
    loss.backward()
    return loss.detach(), group.all_reduce([w.grad for w in grads], [6] * 4)


def test_auxiliary_losses_as_in_one_process() -> None:
    x, weight, targets = router_model()
    weight.requires_grad_()
    logits = x @ weight
    expected = F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()
    chosen = F.one_hot(logits.argmax(-1), 4).float().mean(0)
    expected = expected + 0.5 * 4 * (chosen * logits.softmax(-1).mean(0)).sum()
    expected.backward()
    alone = _router(0, 1)
    torch.testing.assert_close(alone, (expected.detach(), weight.grad), rtol=1e-5, atol=1e-6)
    for world_size in (2, 4):
        for loss, grad in run_processes(_router, world_size):
            assert torch.equal(loss, alone[0]) and torch.equal(grad, alone[1])


ones = [torch.ones(())] * 2
BAD = [
    (lambda g: g.token_mean(ones, [1, 1], denominator=-1), "denominator: expected a number of at least 0.*-1"),
    (lambda g: g.token_mean(ones, [1, 1], denominator=float("nan")), "denominator: .*nan"),
    (lambda g: g.token_mean(ones, [1, 1], denominator=True), "denominator: .*True"),
    (lambda g: g.token_mean(ones, [1, 1], denominator=torch.ones(2)), "denominator: .*one element"),
    (lambda g: g.token_mean(ones, [1, 0.5]), "num_valid: virtual rank 1 has .*0.5.*all integers, or all floating"),
    (lambda g: g.token_mean(ones, [1, -3]), "num_valid: virtual rank 1 has -3, expected .* a count of at least 0"),
    (lambda g: g.token_mean(ones, [math.nan, 1.0]), "num_valid: virtual rank 0 has nan, expected .* or a finite float"),
    (lambda g: g.token_mean(ones, [1, 1], denominator=2**70), "denominator: expected a number of at least 0"),
    (lambda g: g.token_mean(ones, [1, torch.tensor([1, 2, 3])]), r"num_valid: virtual rank 1 has shape \(3,\)"),
    (lambda g: g.token_mean([torch.ones(3), torch.ones(2)], [1, 1]), r"loss_sum: virtual rank 1 has shape \(2,\)"),
    (lambda g: g.token_mean([1, 2], [1, 1]), "loss_sum: virtual rank 0 has 1, expected a floating Tensor"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ShardGroup(2))
