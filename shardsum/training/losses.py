"""Means of losses over all virtual ranks, exact in their denominator, without synchronisation.

``token_mean`` divides a sum over all virtual ranks by a count over all of them. Recipes (each is tested):

Gradient accumulation, or a trainer that gives the number of items: every micro-batch's loss has the whole window's
denominator, and their gradients add up to those of the window's mean. A mean per micro-batch would weigh tokens of
short ones more::

    for batch in window:
        loss, _ = group.token_mean(loss_sum, num_valid, denominator=tokens_of_window)
        loss.backward()

Weighted tokens: ``num_valid`` is the sum of the weights, floating::

    loss, weight = group.token_mean((losses * w).sum(), w.sum())

z-loss and other losses of each token: they are part of the token's loss::

    z = logits.logsumexp(-1)
    loss, _ = group.token_mean((token_losses + 1e-4 * z.square()).sum(), num_valid)

Losses that are no sum over tokens (a router's balance): take the means that they are made of over all tokens, then
compute the loss from those, on every process alike::

    chosen, _ = group.token_mean(one_hot(expert, E).float().sum(0), num_tokens)     # (E,): fraction of the tokens
    weight, _ = group.token_mean(probabilities.sum(0), num_tokens)                  # (E,): mean probability
    loss = loss + 0.01 * E * (chosen * weight).sum()

Mean over sequences of each sequence's mean, whatever chunks they are cut into: :func:`sequence_mean`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checks import describe, is_count, is_strided
from ..core.words import Grad
from ..local.functional import ragged_sum

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup

Scalars = Tensor | Sequence[Tensor] | Sequence[int] | Sequence[float] | int | float


def token_mean(
    group: CollectiveGroup,
    loss_sum: Scalars,
    num_valid: Scalars,
    *,
    denominator: Tensor | float | None = None,
    grad: Grad = "identity",
) -> tuple[Tensor, Tensor]:
    """What ``group.token_mean`` returns. A virtual rank with no valid tokens contributes nothing, whatever its loss."""
    try:
        losses, counts = _check(loss_sum, num_valid, group.virtual_ranks)
        _check_denominator(denominator)
    except ValueError as error:
        raise group.refuse("token_mean", error) from error
    shape = losses[0].shape if losses[0].numel() != 1 else torch.Size(())
    counted = counts[0].shape if counts[0].numel() != 1 else torch.Size(())
    losses = [x.reshape(shape).to(torch.float32) for x in losses]
    kept = [torch.where(n.reshape(counted) != 0, x, torch.zeros_like(x)) for n, x in zip(counts, losses)]
    total = _total(group, kept, grad)
    count = _total(group, counts, "identity")
    divisor = count if denominator is None else torch.as_tensor(denominator, device=total.device)
    divisor = divisor.detach().reshape(counted if denominator is None else ()).to(torch.float32)
    some = divisor != 0
    mean = torch.where(some, total.reshape(shape) / torch.where(some, divisor, 1.0), 0.0)
    return mean, count.reshape(counted)


def sequence_mean(
    group: CollectiveGroup, loss_sums: Scalars, num_valid: Scalars, *, grad: Grad = "identity"
) -> tuple[Tensor, Tensor]:
    """The mean over sequences of each sequence's token mean. Collective.

    Args:
        loss_sums: floating ``(n,)`` per hosted virtual rank: for each of the batch's n sequences, the sum of the losses
            of the tokens that this rank holds; 0 where it holds none.
        num_valid: integer ``(n,)`` (or floating: weights) per hosted virtual rank: how many tokens those are.
        grad: as of ``token_mean``.

    Returns:
        ``(mean, means)``: float32, 0-dim and ``(n,)``. Sequences without valid tokens have mean 0 and are not counted.

    Raises:
        ValueError: as of ``token_mean``.
    """
    means, counts = token_mean(group, loss_sums, num_valid, grad=grad)
    means, counts = means.reshape(-1), counts.reshape(-1)
    total = ragged_sum(means.unsqueeze(1), [1] * len(means)) if len(means) else means.new_zeros(1)  # in their order
    return (total / (counts != 0).sum().clamp(min=1)).reshape(()), means


def _total(group: CollectiveGroup, values: list[Tensor], grad: Grad) -> Tensor:
    size = values[0].numel()
    return group.all_reduce([x.reshape(size) for x in values], [size] * group.num_virtual_ranks, size=size, grad=grad)


def _check(loss_sum: Any, num_valid: Any, hosted: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Float32 losses of one shape, and counts (int64, or float32 where they are weights) of that shape or one element.

    Raises:
        ValueError: names the argument, the virtual rank and what it has.
    """
    losses, given = _hosted("loss_sum", loss_sum, hosted), _hosted("num_valid", num_valid, hosted)
    for v, x in zip(hosted, losses):
        if not (is_strided(x) and x.is_floating_point()):
            raise ValueError(f"loss_sum: virtual rank {v} has {describe(x)}, expected a floating Tensor")
        if x.shape != losses[0].shape:
            first = f"virtual rank {hosted[0]} has {tuple(losses[0].shape)}"
            raise ValueError(f"loss_sum: virtual rank {v} has shape {tuple(x.shape)}, {first}")
    weights = _is_floating(given[0])
    counts: list[Tensor] = []
    for v, n, x in zip(hosted, given, losses):
        if not _is_number(n):
            expected = "a Tensor, a count of at least 0, or a finite float"
            raise ValueError(f"num_valid: virtual rank {v} has {describe(n)}, expected {expected}")
        if _is_floating(n) != weights:
            what = f"virtual rank {hosted[0]} has {describe(given[0])}"
            raise ValueError(f"num_valid: virtual rank {v} has {describe(n)}, {what}; all integers, or all floating")
        n = torch.as_tensor(n, dtype=torch.float32 if weights else torch.int64, device=x.device).detach()
        if n.numel() != 1 and n.shape != x.shape:
            expected = f"one element or loss_sum's shape {tuple(x.shape)}"
            raise ValueError(f"num_valid: virtual rank {v} has shape {tuple(n.shape)}, expected {expected}")
        if counts and n.numel() != counts[0].numel():
            first = f"virtual rank {hosted[0]} has {counts[0].numel()}"
            raise ValueError(f"num_valid: virtual rank {v} has {n.numel()} elements, {first}")
        counts.append(n)
    return losses, counts


def _hosted(name: str, values: Any, hosted: Sequence[int]) -> list[Any]:
    """One value per hosted virtual rank."""
    try:
        values = list(values) if len(hosted) > 1 or isinstance(values, (list, tuple)) else [values]
    except TypeError:
        raise ValueError(f"{name}: expected one value per hosted virtual rank, got {describe(values)}") from None
    if len(values) != len(hosted):
        raise ValueError(f"{name}: {len(values)} values, but this process hosts {len(hosted)} virtual ranks")
    return values


def _is_floating(n: Any) -> bool:
    return n.is_floating_point() if isinstance(n, Tensor) else not is_count(n)


def _is_number(n: Any) -> bool:
    if isinstance(n, Tensor):
        return is_strided(n) and n.dtype != torch.bool and not n.is_complex()
    return is_count(n) or (isinstance(n, Real) and not isinstance(n, Integral) and math.isfinite(n))


def _check_denominator(denominator: Any) -> None:
    fits = denominator is None or _is_number(denominator)
    if fits and isinstance(denominator, Tensor):
        fits = denominator.numel() == 1
    elif fits and denominator is not None:
        fits = denominator >= 0
    if not fits:
        what = "a number of at least 0, or a Tensor of one element"
        raise ValueError(f"denominator: expected {what}, got {describe(denominator)}")
