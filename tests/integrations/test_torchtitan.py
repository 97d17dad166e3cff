"""What torchtitan calls: a block with its inner attention's signature, on chunks and on the whole sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardsum import ShardGroup
from shardsum.integrations.torchtitan import apply_cp_to_forward, prepare_context_parallel_input

POSITIONS = torch.tensor([[*range(7), *range(5)], [*range(12)]])  # rows that are packed differently
IDS = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """As torchtitan's ScaledDotProductAttention: q, k, v (B, rows, heads, dim)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_masks: Any, **_: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, enable_gqa=True).transpose(1, 2)


class Model(nn.Module):
    """A decoder with torchtitan's arguments, grouped queries and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(31, 16), nn.Linear(16, 32), nn.Linear(16, 31)
        self.inner_attention = Inner()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention_masks: Any) -> torch.Tensor:
        x = self.embedding(tokens) + positions[..., None].sin()
        q, k, v = self.qkv(x).unflatten(-1, (8, 4)).split([4, 2, 2], dim=2)
        y = self.inner_attention(q, k, v, attention_masks=attention_masks, scale=None, enable_gqa=True)
        return self.out(y.flatten(2))


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("lengths", [None, [5, 0, 16, 3]])
def test_loss_and_gradients_of_the_whole_batch(lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    model, inputs, labels = Model(), IDS[:, :-1], IDS[:, 1:]
    document = (POSITIONS == 0).cumsum(1)
    mask = (document[:, :, None] == document[:, None]).tril()[:, None]
    loss = loss_sum(model(inputs, POSITIONS, mask), labels)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    pytest.importorskip("greenlet", reason="needs the extra models")
    group = ShardGroup(4)
    apply_cp_to_forward([model.inner_attention])
    replicas = group.replicas(model)
    chunks = prepare_context_parallel_input(inputs, labels, {"positions": POSITIONS}, group, lengths)
    outs = group.lockstep([partial(m, x, **kwargs) for m, (x, _, kwargs) in zip(replicas, chunks)])
    mine = sum(loss_sum(y, labels) for y, (_, labels, _) in zip(outs, chunks))
    mine.backward()
    group.reduce_gradients(replicas)
    assert mine.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-6)


def test_a_lone_virtual_rank_gets_tensors_and_errors_are_named() -> None:
    group, inner = ShardGroup(1), Inner()
    apply_cp_to_forward([inner])
    x, y, kwargs = prepare_context_parallel_input(IDS[:, :-1], IDS[:, 1:], {"positions": POSITIONS}, group)
    assert x.shape == y.shape == kwargs["positions"].shape == (1, 24)
    q = torch.zeros(1, 24, 2, 4)
    assert inner(q, q, q, **{"attention_masks": kwargs["attention_masks"]}).shape == q.shape
    with pytest.raises(ValueError, match="score_mod: Inner is called with one"):
        inner(q, q, q, attention_masks=kwargs["attention_masks"], score_mod=max)
    with pytest.raises(ValueError, match="attention_masks: Inner got NoneType"):
        inner(q, q, q, attention_masks=None)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_a_llama_of_torchtitan() -> None:
    """Where torchtitan is installed: its smallest Llama 3 on chunks, against the documents one by one."""
    llama3 = pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed")
    pytest.importorskip("greenlet", reason="needs the extra models")
    model = llama3.model_registry("debugmodel", attn_backend="varlen").model.build()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    model.init_states()
    attentions = [block.attention.inner_attention for block in model.layers.values()]
    for inner in attentions:
        inner.forward = _causal
    inputs, labels = IDS[:, :-1], IDS[:, 1:]
    cuts = [(0, 0, 7), (0, 7, 12), (1, 0, 12)]
    loss = sum(loss_sum(model(inputs[b : b + 1, i:j]), labels[b, i:j]) for b, i, j in cuts)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    group = ShardGroup(4)
    apply_cp_to_forward(attentions)
    replicas = group.replicas(model)
    chunks = prepare_context_parallel_input(inputs, labels, {"positions": POSITIONS}, group, [5, 0, 16, 3])
    outs = group.lockstep([partial(m, x, **kwargs) for m, (x, _, kwargs) in zip(replicas, chunks)])
    sum(loss_sum(y, labels) for y, (_, labels, _) in zip(outs, chunks)).backward()
    group.reduce_gradients(replicas)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)
