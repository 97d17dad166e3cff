"""Processes with unequal numbers of batches, where the forward or backward pass makes collective calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup

B = TypeVar("B")


def until_all_are_done(group: CollectiveGroup, batches: Iterable[B]) -> Iterator[B | None]:
    """This process's batches, then None as long as another process of the group still has one.

    So all processes make the same number of steps, and the collective calls in them meet. On None, run the step on an
    empty batch (tensors of 0 rows; ``num_valid`` 0): it contributes nothing to sums and token means. Collective: every
    step begins with a flag to all on the host's side channel, which no GPU waits for. Iterate to the end on every
    process; to leave early, do so on all in the same step.

    Example:
        >>> for batch in until_all_are_done(group, loader):
        ...     x, targets = empty if batch is None else batch
        ...     loss, _ = group.token_mean(loss_sum(model(x), targets), len(targets))
        ...     loss.backward()
        ...     optimizer.step()
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if not any(has for (has,) in group.gather_ints("until_all_are_done", [batch is not None], 1)):
            return
        yield batch
