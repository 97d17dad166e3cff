"""One random stream per virtual rank: a function of seed and rank, whatever else runs in the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardsum import ShardGroup
from shardsum.training.generators import RankGenerators, rank_seed


def draw(generators: RankGenerators, v: int, count: int = 4) -> torch.Tensor:
    with generators.context(v):
        return torch.rand(count)


def test_streams_do_not_depend_on_hosting_or_order() -> None:
    together = RankGenerators([0, 1, 2, 3], seed=3)
    first = {v: draw(together, v) for v in (2, 0, 3, 1)}
    second = {v: draw(together, v) for v in (0, 1, 2, 3)}
    for v in range(4):
        alone = RankGenerators([v], seed=3)
        torch.rand(v)  # the surrounding stream is no part of it
        assert torch.equal(draw(alone, v), first[v]) and torch.equal(draw(alone, v), second[v])
    assert len({t.item() for v in range(4) for t in (*first[v], *second[v])}) == 32


def test_surrounding_state_returns_even_after_an_error() -> None:
    torch.manual_seed(5)
    expected = torch.rand(6)
    torch.manual_seed(5)
    generators = RankGenerators([0, 1])
    parts = [torch.rand(2)]
    with generators.context(0):
        torch.rand(3)
        with generators.context(1):  # contexts of different ranks nest
            torch.rand(1)
        torch.rand(1)
    parts.append(torch.rand(2))
    with pytest.raises(RuntimeError, match="inside"), generators.context(0):
        torch.rand(7)
        raise RuntimeError("inside")
    assert torch.equal(torch.cat([*parts, torch.rand(2)]), expected)


def test_dropout_draws_from_it() -> None:
    layer, x = torch.nn.Dropout(0.5), torch.ones(64)
    a, b = RankGenerators([0, 1], seed=1), RankGenerators([1], seed=1)
    with a.context(1):
        kept = layer(x)
    with a.context(0):
        other = layer(x)
    with b.context(1):
        assert torch.equal(layer(x), kept)
    assert not torch.equal(other, kept)


def test_state_moves_between_hostings() -> None:
    parts = [RankGenerators([0, 3], seed=9), RankGenerators([1, 2], seed=9)]
    for part, v in zip(parts, (3, 1)):
        draw(part, v, 5)
    state = {**parts[0].state_dict(), **parts[1].state_dict()}
    assert sorted(state) == ["0.cpu", "1.cpu", "2.cpu", "3.cpu"]
    expected = {v: draw(parts[v in (1, 2)], v) for v in range(4)}
    whole = RankGenerators(range(4), seed=0)
    whole.load_state_dict(state)
    for v in range(4):  # the state dict was a copy: drawing above did not change it
        assert torch.equal(draw(whole, v), expected[v])


def test_seeds_are_distinct_where_generators_look() -> None:
    low = {rank_seed(s, v) & 0xFFFFFFFF for s in range(20) for v in range(200)}
    assert len(low) == 20 * 200
    assert all(0 <= rank_seed(s, v) < 2**63 for s in (-1, 0, 2**64) for v in (0, 7))


def test_errors() -> None:
    generators = RankGenerators([0, 2])
    with pytest.raises(ValueError, match=r"virtual rank 1 is not hosted here; this process hosts \(0, 2\)"):
        draw(generators, 1)
    with (
        generators.context(2),
        pytest.raises(ValueError, match="context of virtual rank 2 is open already"),
        generators.context(2),
    ):
        pass
    before = draw(generators, 2)
    state = generators.state_dict()
    del state["2.cpu"]
    with pytest.raises(ValueError, match=r"no state '2\.cpu' for virtual rank 2"):
        generators.load_state_dict(state)
    assert not torch.equal(draw(generators, 2), before)


def drop_twice(group: ShardGroup, x: Tensor) -> Tensor:
    """Dropout of two virtual ranks, rank 0's twice; ``sin`` saves its input, so the backward needs the masks."""
    for v in (0, 1, 0):
        with group.rng(v):
            x = (torch.nn.functional.dropout(x, 0.5) + 0.1).sin()
    return x


def plainly(group: ShardGroup, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return f(x)


CHECKPOINTED = {
    "reentrant": lambda g, f, x: checkpoint(g.generators.replayed(f), x, use_reentrant=True),
    "not reentrant": lambda g, f, x: checkpoint(g.generators.replayed(f), x, use_reentrant=False),
    "context_fn": lambda g, f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=g.generators.checkpoint_contexts, early_stop=False
    ),
    "early stop": lambda g, f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=g.generators.checkpoint_contexts, early_stop=True
    ),
    "group": lambda g, f, x: g.checkpoint(f, x),
}


def two_layers(
    run: Callable[[ShardGroup, Callable[[Tensor], Tensor], Tensor], Tensor],
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Output and gradient of two layers, with draws between forward and backward, and what is drawn afterwards."""
    group, x = ShardGroup(2), torch.linspace(1, 2, 256, requires_grad=True)
    y = x
    for _ in range(2):
        y = run(group, lambda t: drop_twice(group, t), y)
    draw(group.generators, 1)
    y.sum().backward()
    return y.detach(), x.grad, {v: draw(group.generators, v) for v in (0, 1)}


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_recomputation_draws_the_masks_of_the_forward(kind: str) -> None:
    y, grad, after = two_layers(plainly)
    found, found_grad, found_after = two_layers(CHECKPOINTED[kind])
    assert torch.equal(found, y) and torch.equal(found_grad, grad)
    assert all(torch.equal(found_after[v], after[v]) for v in after)  # the streams stand where they stood
    assert 0 < (grad == 0).sum() < 256


@pytest.mark.parametrize("reentrant", [True, False])
def test_another_mask_in_a_recomputation_is_an_error(reentrant: bool) -> None:
    group, x = ShardGroup(2), torch.linspace(1, 2, 256, requires_grad=True)
    y = checkpoint(lambda t: drop_twice(group, t), x, use_reentrant=reentrant)
    expected = {v: s.clone() for v, s in group.generators.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"virtual rank 0 drew random numbers in a backward pass.*replayed"):
        y.sum().backward()
    assert all(torch.equal(s, expected[v]) for v, s in group.generators.state_dict().items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_context_around_a_checkpoint_or_without_draws_needs_nothing(reentrant: bool) -> None:
    group, x = ShardGroup(2), torch.linspace(1, 2, 256, requires_grad=True)

    def quiet(t: Tensor) -> Tensor:
        with group.rng(1):
            return t.sin()

    with group.rng(0):
        y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5).sin(), x, use_reentrant=reentrant)
    checkpoint(quiet, y, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad == 0, y == 0) and 0 < (y == 0).sum() < 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_streams_are_switched_too() -> None:
    a, b = RankGenerators([0, 1], "cuda", seed=4), RankGenerators([1], "cuda", seed=4)
    torch.cuda.manual_seed(2)
    outside = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(2)
    with a.context(1):
        x, y = torch.rand(5, device="cuda"), torch.rand(5)
    assert torch.equal(torch.rand(3, device="cuda"), outside)
    with b.context(1):
        assert torch.equal(torch.rand(5, device="cuda"), x) and torch.equal(torch.rand(5), y)
    assert sorted(a.state_dict()) == ["0.cpu", "0.cuda", "1.cpu", "1.cuda"]
