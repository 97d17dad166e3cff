"""Megatron-Core's GPT models on the chunks of packed documents, in its "thd" format.

    model = GPTModel(config, get_gpt_layer_local_spec(), ..., position_embedding_type="rope")   # any spec
    apply_cp(model)
    replicas = group.replicas(model)                    # or one virtual rank a process

    batch = group.context_parallel(lengths, cu_seqlens)
    inputs = model_inputs(batch, tokens, labels)        # of the whole sequence
    losses = group.lockstep([partial(m, **kwargs) for m, kwargs in zip(replicas, inputs)])
    sum((x * kwargs["loss_mask"]).sum() for x, kwargs in zip(losses, inputs)).backward()

Megatron's own context parallelism cuts every document into two pieces a process, so that documents must be padded, and
sends all keys to all. Here chunks are of any length: ``context_parallel_size`` stays 1, and the group is that of the
processes that share a sequence. The plan reaches core attention in ``packed_seq_params``; rotary embeddings are those
of the rows' positions in their documents. Every transformer layer takes its chunk as one sequence otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from .chunk import Chunk, chunks_of, positions_of, rows_of

if TYPE_CHECKING:
    from ..training.context import ContextBatch


@dataclass
class ChunkParams(PackedSeqParams):
    """A chunk as Megatron's layers see it: one sequence of its rows, and what core attention needs beside it."""

    chunk: Chunk | None = None
    positions: Tensor | None = None


def model_inputs(batch: ContextBatch, tokens: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """GPTModel's keyword arguments for every hosted virtual rank.

    Args:
        batch: from ``group.context_parallel``.
        tokens: ``(1, size)``, the whole sequence, equal on all processes.
        labels: ``(1, size)``, not shifted: usually ``tokens``, -100 where nothing is to be predicted.

    Returns:
        ``input_ids``, ``position_ids``, ``attention_mask`` (None), ``labels`` (the next token of the same document, 0
        where there is none), ``loss_mask`` (which of them count) and ``packed_seq_params``.

    Raises:
        ValueError: several sequences; let them follow one another in one.
    """
    if tokens.shape != (1, batch.size) or labels.shape != tokens.shape:
        shapes = f"{tuple(tokens.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"tokens, labels: {shapes}, expected (1, {batch.size}) for both")
    targets = batch.shift(labels, dim=1, whole=True)
    longest = max(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:]))
    rows = zip(rows_of(batch, tokens, 0), rows_of(batch, targets, -100), positions_of(batch), chunks_of(batch))
    inputs = []
    for x, y, positions, chunk in rows:
        borders = torch.tensor([0, x.shape[1]], dtype=torch.int32, device=x.device)
        params = ChunkParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest)
        params.chunk, params.positions = chunk, positions[0]
        kwargs: dict[str, Any] = {"input_ids": x, "position_ids": positions, "attention_mask": None}
        kwargs |= {"labels": y.clamp(min=0), "loss_mask": (y != -100).float(), "packed_seq_params": params}
        inputs.append(kwargs)
    return inputs


def apply_cp(model: nn.Module) -> None:
    """Make a GPTModel attend by context parallelism: to be called on the model itself, before replicas or DDP.

    Raises:
        ValueError: names what of the model's configuration this attention does not have.
    """
    found: Any
    for found in [m for m in model.modules() if isinstance(m, SelfAttention)]:
        config, layer = found.config, found.layer_number
        for name, wanted in (("context_parallel_size", 1), ("attention_dropout", 0.0), ("softmax_type", "vanilla")):
            if (given := getattr(config, name, wanted)) != wanted:
                raise ValueError(f"{name}: {given}, expected {wanted} under shardsum's context parallelism")
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer)
        found.core_attention.forward = partial(_attend, tuple(config.window_size) if windowed else None, found)
    if hasattr(model, "rotary_pos_emb"):
        rotary: Any = model.rotary_pos_emb
        rotary.forward = partial(_rotary, model, type(rotary).forward, rotary)
    model.register_forward_pre_hook(_take_positions, with_kwargs=True)


def _take_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, ChunkParams):
        raise ValueError(f"packed_seq_params: {type(params).__name__}, expected that of model_inputs(batch, ...)")
    model.chunk_positions = params.positions


def _rotary(model: Any, forward: Any, rotary: Any, max_seq_len: int, *args: Any, **options: Any) -> Tensor:
    """The embeddings of the chunk's rows, which are one sequence for the layers."""
    return forward(rotary, max_seq_len, *args, **options)[model.chunk_positions]


def _attend(
    window: tuple[int, int] | None,
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: AttnMaskType | None = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: ChunkParams | None = None,
    **_: Any,
) -> Tensor:
    """Core attention: q ``(rows, heads, dim)``, k and v ``(rows, groups, dim)`` -> ``(rows, heads, value_dim)``."""
    kind = attention.attn_mask_type if attn_mask_type is None else attn_mask_type
    if attention_mask is not None or attention_bias is not None:
        raise ValueError("attention_mask, attention_bias: the batch's cu_seqlens keep documents apart; pass neither")
    if packed_seq_params is None or packed_seq_params.chunk is None:
        raise ValueError("packed_seq_params: core attention got none; pass those of model_inputs(batch, ...)")
    causal = kind in (AttnMaskType.causal, AttnMaskType.padding_causal)
    sides = (window[0], 0 if causal else window[1]) if window is not None else (-1, 0 if causal else -1)
    scale = attention.config.softmax_scale
    return packed_seq_params.chunk.attention(query[None], key[None], value[None], window=sides, scale=scale)[0]
