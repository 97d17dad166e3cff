"""Attention over chunks in one call: the batch's plan (:mod:`shardsum.training.context`) is made, or found, on the way.

**Error.** With eps = 2^-24 (fp32), L the keys a query sees, D the head dimension, A = scale * max_ij sum_d |q_id k_jd|
the largest absolute score: every output is within ``2 eps ((D + 1) A + L + 8) max|v|`` of exact arithmetic, whatever R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

from torch import Tensor

from .context import ContextBatch, Hosted
from .context_checks import check_lengths, hosted_tensors
from .documents import check_borders, effective_window
from .lockstep import running

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .shard_group import ShardGroup


class CallOptions(TypedDict, total=False):
    """What :func:`context_parallel_attention` takes beside tensors and group."""

    lengths: Sequence[int] | None
    cu_seqlens: Sequence[int] | Tensor | None
    scale: float | None
    causal: bool
    window: Sequence[int] | None


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ShardGroup, **options: Unpack[CallOptions]
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], group: ShardGroup, **options: Unpack[CallOptions]
) -> list[Tensor]: ...
def context_parallel_attention(
    q: Hosted,
    k: Hosted,
    v: Hosted,
    group: ShardGroup,
    *,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: Sequence[int] | None = None,
) -> Any:
    """Attention of every hosted chunk to its documents' keys, wherever they are held. Collective.

    For a step with several layers make the plan once: :meth:`shardsum.ShardGroup.context_parallel`.

    Args:
        q, k, v, scale: see :meth:`shardsum.training.context.ContextBatch.attention`.
        group: the processes and virtual ranks that share the sequence.
        lengths: R chunk lengths, equal on all processes: nothing else travels. None: agreed through the group's side
            channel in every call (blocks the host).
        cu_seqlens: borders of the packed documents, ``[0, ..., sum(lengths)]``, equal on all processes (ints or an
            integer tensor on CPU). None: one document.
        causal: a query sees its own and earlier positions only (False: its whole document).
        window: ``(left, right)``: how far it sees, -1 for no limit.

    Returns:
        One tensor ``(length_r, heads, value_dim)`` per hosted virtual rank, in the form of ``q``. float16, bfloat16,
        float32 and float64 work.

    Raises:
        ValueError: on every process, naming argument, virtual rank and both values.

    Example:
        >>> group = ShardGroup(3)
        >>> q, k, v = ([torch.randn(n, 8, 64) for n in (5, 0, 4)] for _ in range(3))
        >>> out = context_parallel_attention(q, k, v, group, lengths=[5, 0, 4], cu_seqlens=[0, 2, 9])
    """
    now = running(group)
    if now is not None:
        options = {"lengths": lengths, "cu_seqlens": cu_seqlens, "scale": scale, "causal": causal, "window": window}
        return now.meet("context_parallel_attention", context_parallel_attention, (q, k, v), (group,), **options)
    if lengths is None:
        lengths = _count(group, q)
    batch: Any = _batch(group, lengths, cu_seqlens, causal, window)  # q, k and v are all Tensors or all lists
    return batch.attention(q, k, v, scale=scale)


def _count(group: ShardGroup, q: Hosted) -> list[int]:
    """The rows of all R chunks."""
    name = "context_parallel_attention"
    try:
        _, qs = hosted_tensors("q", q, group.virtual_ranks)
        rows = [x.shape[0] for x in qs]
    except (ValueError, AttributeError, IndexError) as error:
        raise group.refuse(name, error, counted=True) from error
    most = max(map(group.owners.count, range(group.world_size)))
    everyone = group.gather_ints(name, rows, most)
    return [everyone[owner][slot] for owner, slot in map(group.positions, range(group.num_virtual_ranks))]


def _batch(
    group: ShardGroup,
    lengths: Sequence[int],
    cu_seqlens: Sequence[int] | Tensor | None,
    causal: bool,
    window: Sequence[int] | None,
) -> ContextBatch:
    """The plan of the last call where it fits this one: the layers of a step ask for the same."""
    try:  # plain ints: an array prints shortened, and an iterator as the place where it lies
        lengths = check_lengths(lengths, group.num_virtual_ranks)
        borders = None if cu_seqlens is None else check_borders(cu_seqlens, sum(lengths))
        sides = effective_window(window, causal)
        asked = repr((lengths, borders, sides))
    except ValueError as error:
        raise group.refuse("context_parallel", error) from error
    if group.last_sequence is None or group.last_sequence[0] != asked:
        group.last_sequence = asked, group.context_parallel(lengths, borders, False, sides).plan, {}
    return ContextBatch(group, *group.last_sequence[1:])
