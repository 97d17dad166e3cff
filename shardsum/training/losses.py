"""Means of losses over all virtual ranks, exact in their denominator, without synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checks import describe, is_count, is_strided
from ..core.words import Grad

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup

Scalars = Tensor | Sequence[Tensor] | Sequence[int] | int


def token_mean(
    group: CollectiveGroup, loss_sum: Scalars, num_valid: Scalars, *, grad: Grad = "identity"
) -> tuple[Tensor, Tensor]:
    """What ``group.token_mean`` returns. A virtual rank with no valid tokens contributes nothing, whatever its loss."""
    try:
        losses = check_scalars("loss_sum", loss_sum, group.virtual_ranks, floating=True)
        counts = check_scalars("num_valid", num_valid, group.virtual_ranks, floating=False)
    except ValueError as error:
        raise group.refuse("token_mean", error) from error
    losses = [x.reshape(1).to(torch.float32) for x in losses]
    counts = [torch.as_tensor(n, dtype=torch.int64, device=x.device).reshape(1) for n, x in zip(counts, losses)]
    losses = [torch.where(n > 0, x, torch.zeros_like(x)) for n, x in zip(counts, losses)]  # the mean of nothing is NaN
    ones = [1] * group.num_virtual_ranks
    total = group.all_reduce(losses, ones, size=1, grad=grad)
    count = group.all_reduce(counts, ones, size=1)
    mean = torch.where(count > 0, total / count.clamp(min=1).to(torch.float32), torch.zeros_like(total))
    return mean.reshape(()), count.reshape(())


def check_scalars(name: str, values: Any, hosted: Sequence[int], floating: bool) -> list[Any]:
    """One number per hosted virtual rank: floating Tensors of one element, or integer ones and ints."""
    try:
        values = list(values) if len(hosted) > 1 or isinstance(values, (list, tuple)) else [values]
    except TypeError:
        raise ValueError(f"{name}: expected one value per hosted virtual rank, got {describe(values)}") from None
    if len(values) != len(hosted):
        raise ValueError(f"{name}: {len(values)} values, but this process hosts {len(hosted)} virtual ranks")
    for v, x in zip(hosted, values):
        if is_strided(x):
            fits = x.numel() == 1 and x.dtype != torch.bool and not x.is_complex() and x.is_floating_point() == floating
        else:
            fits = not floating and is_count(x)
        if not fits:
            what = "a floating Tensor of one element" if floating else "an integer Tensor of one element, or an int"
            raise ValueError(f"{name}: virtual rank {v} has {describe(x)}, expected {what}")
    return values
