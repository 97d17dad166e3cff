"""Torchtitan models on the chunks of packed documents: what torchtitan.distributed.context_parallel does by torch.

In a model's parallelize function, and in the trainer's ``post_dataloading_process``, in place of torchtitan's functions
of the same names::

    group = ShardGroup(group=parallel_dims.get_mesh("cp"), device=device)
    apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()])

    inputs, labels, extra_kwargs = prepare_context_parallel_input(inputs, labels, extra_kwargs, group)

The batch's plan reaches the attention where torchtitan passes masks, as ``attention_masks``. Any inner attention will
do (SDPA, Flex, Varlen): its forward is replaced, its ``window_size`` is kept. The loss is torchtitan's own: a sum over
the chunk's labels, divided by the valid tokens of all ranks. Nothing here imports torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..training.documents import cu_seqlens_from_position_ids
from .chunk import Chunk, chunks_of, positions_of, rows_of

if TYPE_CHECKING:
    from ..training.shard_group import ShardGroup


def apply_cp_to_forward(attention_modules: Sequence[nn.Module]) -> None:
    """Replace the forward of inner attentions. Before activation checkpointing, torch.compile and FSDP.

    Args:
        attention_modules: take q, k, v ``(B, rows, heads, dim)`` and the keyword ``attention_masks``.
    """
    for module in attention_modules:
        module.forward = partial(_forward, module)


def _forward(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: Chunk,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
    score_mod: Callable[..., Any] | None = None,
    out_transform: Callable[..., Any] | None = None,
) -> Tensor:
    name = type(module).__name__
    for argument, given in (("score_mod", score_mod), ("out_transform", out_transform)):
        if given is not None:
            raise ValueError(f"{argument}: {name} is called with one, which context parallelism cannot follow")
    if not isinstance(attention_masks, Chunk):
        got = type(attention_masks).__name__
        raise ValueError(f"attention_masks: {name} got {got}, expected that of prepare_context_parallel_input")
    window = getattr(module, "window_size", (-1, 0 if is_causal else -1))
    return attention_masks.attention(q, k, v, window=window, scale=scale)


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    group: ShardGroup,
    lengths: Sequence[int] | None = None,
) -> Any:
    """The hosted chunks of a batch that all processes of the group have.

    Args:
        inputs, labels: ``(B, L)``; labels are shifted already, as torchtitan's are.
        extra_kwargs: of the model, with ``positions`` ``(B, L)``, which begin at 0 in every document.
        lengths: R chunk lengths of the B * L positions (None: even ones).

    Returns:
        ``(inputs, labels, extra_kwargs)`` of this process's virtual rank, a list of such where it hosts several. The B
        sequences follow one another, so their documents may differ: tensors are ``(1, rows)``. Labels of a filler row
        are -100.
    """
    positions = extra_kwargs["positions"].expand_as(inputs).reshape(1, -1)
    batch = group.context_parallel(lengths, cu_seqlens_from_position_ids(positions))
    rows = (rows_of(batch, inputs.reshape(1, -1), 0), rows_of(batch, labels.reshape(1, -1), -100))
    found = [
        (x, y, {**extra_kwargs, "positions": p, "attention_masks": chunk})
        for x, y, p, chunk in zip(*rows, positions_of(batch), chunks_of(batch))
    ]
    return found[0] if len(found) == 1 else found
