"""Chunk lengths that even out the work of attention over packed documents. Pure arithmetic, equal on all processes.

The work of a position is the number of keys that its query sees, and a constant for the rest of the layer. Borders of
chunks may lie anywhere, inside documents too, so each virtual rank gets its share to within one position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .documents import check_borders, documents_of, effective_window

#: Query-key pairs that cost what the rest of a transformer layer costs for one position: a layer has about 12 h^2
#: parameters, two operations each; a pair takes 4 h of them. So 6 h, here for a hidden size h of 4096.
POSITION_COST = 24_576


def balanced_lengths(
    owners: Sequence[int],
    cu_seqlens: Sequence[int] | Tensor,
    *,
    causal: bool = True,
    window: Sequence[int] | None = None,
    position_cost: float = POSITION_COST,
) -> list[int]:
    """R chunk lengths that give every process of ``owners`` the same work, and its virtual ranks equal parts of that.

    Args:
        owners: the process of every virtual rank.
        cu_seqlens, causal, window: see :meth:`shardsum.ShardGroup.context_parallel`.
        position_cost: what a position costs beside attention, in query-key pairs (0: attention alone is evened out).

    Raises:
        ValueError: bad borders, a bad window, or a negative cost.

    Example:
        >>> balanced_lengths([0, 1], [0, 4, 16], position_cost=0)
        [12, 4]
    """
    borders = check_borders(cu_seqlens, None)
    if not position_cost >= 0:
        raise ValueError(f"position_cost: {position_cost}, but it is at least 0")
    total = borders[-1]
    if total == 0:
        return [0] * len(owners)
    left, right = effective_window(window, causal)
    document, position = documents_of(borders, 0, total)
    last = torch.tensor(borders, dtype=torch.int64).diff()[document] - 1
    newest = last if right < 0 else torch.minimum(last, position + right)
    oldest = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    work = torch.nn.functional.pad(((newest - oldest + 1).double() + position_cost).cumsum(0), (1, 0))
    hosted = Counter(owners)
    shares = torch.tensor([1 / hosted[owner] for owner in owners], dtype=torch.float64).cumsum(0)
    wanted = shares[:-1] / shares[-1] * work[-1]
    after = torch.searchsorted(work, wanted)  # the border behind which the share is reached
    before = (after - 1).clamp(min=0)
    cuts = torch.where(wanted - work[before] < work[after] - wanted, before, after)
    borders = [0, *cuts.tolist(), total]
    return [b - a for a, b in pairwise(borders)]
