"""Models of the transformers library on the chunks of packed documents: the attention implementation "shardsum".

    model = LlamaForCausalLM(config)                    # any model with transformers' attention interface
    model.activation_checkpointing_enable({"use_reentrant": False})   # where wanted, before apply_cp
    apply_cp(model, group)
    replicas = group.replicas(model)                    # or DDP or FSDP2, with one virtual rank a process

    batch = group.context_parallel(lengths, cu_seqlens)
    inputs = model_inputs(batch, input_ids, labels)     # of the whole sequence
    outputs = group.lockstep([partial(m, **kwargs) for m, kwargs in zip(replicas, inputs)])
    sum(out.loss for out in outputs).backward()         # this process's part of the mean over all targets

The batch's plan reaches the layers as the keyword argument ``context_batch``, which models hand on to their attention
(:mod:`shardsum.integrations.chunk`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from .chunk import Chunk, chunks_of, positions_of, rows_of

if TYPE_CHECKING:
    from ..training.context import ContextBatch
    from ..training.shard_group import ShardGroup

#: Arguments by which models change the scores, or ask for more than the output.
_REFUSED = frozenset(("attention_mask", "dropout", "softcap", "s_aux", "sinks", "position_bias", "head_mask"))
_REFUSED |= {"indices", "block_indices", "output_attentions"}


def model_inputs(batch: ContextBatch, input_ids: Tensor, labels: Tensor | None = None) -> list[dict[str, Any]]:
    """The model's keyword arguments for every hosted virtual rank.

    Args:
        batch: from ``group.context_parallel``.
        input_ids: ``(B, size)``, the whole sequences, equal on all processes. All B have the batch's documents;
            sequences that are packed differently follow one another in one sequence instead.
        labels: ``(B, size)``, not shifted: usually ``input_ids``, -100 where nothing is to be predicted.

    Returns:
        ``input_ids``, ``position_ids`` and ``context_batch``. With labels also ``labels`` and ``shift_labels`` (the
        next token of the same document) and ``num_items_in_batch``, the targets of all chunks: the model's loss is the
        chunk's part of the mean loss. With gradient accumulation put the targets of all micro-batches there.
    """
    pairs = zip(rows_of(batch, input_ids, 0), positions_of(batch), chunks_of(batch))
    inputs: list[dict[str, Any]] = [{"input_ids": x, "position_ids": p, "context_batch": c} for x, p, c in pairs]
    if labels is not None:
        targets = batch.shift(labels, dim=1, whole=True)
        for kwargs, chunk in zip(inputs, rows_of(batch, targets, -100)):
            kwargs |= {"labels": chunk, "shift_labels": chunk, "num_items_in_batch": (targets != -100).sum()}
    return inputs


def apply_cp(model: nn.Module, group: ShardGroup) -> None:
    """Make a model attend by context parallelism, with checkpoints that the hosted virtual ranks share.

    Call it on the model itself (a PEFT model will do), before replicas, DDP or FSDP2.

    Raises:
        ValueError: activation checkpointing is on in another form than torch's without reentrant autograd.
    """
    transformer: Any = model
    transformer.set_attn_implementation("shardsum")
    transformer.config.use_cache = False
    module: Any
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_check_arguments, with_kwargs=True)
        if getattr(module, "gradient_checkpointing", False):
            given = module._gradient_checkpointing_func
            options = given.keywords if isinstance(given, partial) else {}
            if checkpoint not in (given, getattr(given, "func", None)) or options.get("use_reentrant"):
                raise ValueError(f"gradient_checkpointing: {given}; needed is torch's, without reentrant autograd")
            module._gradient_checkpointing_func = partial(group.checkpoint, **options)


def _check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A model drops a mask that its attention does not know, and counts positions from its own first row."""
    if not isinstance(kwargs.get("context_batch"), Chunk):
        raise ValueError('context_batch: attention "shardsum" needs the keyword arguments of model_inputs(batch, ...)')
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask: the batch's cu_seqlens keep documents apart; pass no mask")
    if kwargs.get("position_ids") is None:
        raise ValueError("position_ids: a chunk need not begin at position 0; pass those of model_inputs(batch, ...)")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    context_batch: Chunk | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: q, k, v ``(B, heads, rows, dim)`` of one chunk -> ``(B, rows, heads, dim)``.

    ``sliding_window`` counts the keys that a query sees, its own included.

    Raises:
        ValueError: names what this attention does not have.
    """
    for name, given in {**kwargs, "attention_mask": attention_mask}.items():
        if name in _REFUSED and (isinstance(given, Tensor) or given):
            raise ValueError(f'{name}: {type(module).__name__} asks for it, which attention "shardsum" does not have')
    if context_batch is None:
        raise ValueError(f"context_batch: {type(module).__name__} got none; its model keeps keyword arguments back")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = -1 if sliding_window is None else sliding_window - 1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return context_batch.attention(q, k, v, window=(left, 0 if causal else left), scale=scaling), None


AttentionInterface.register("shardsum", attention_forward)
