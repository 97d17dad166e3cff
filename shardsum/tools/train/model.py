"""A byte-level transformer in plain torch: RMSNorm, rotary positions, grouped-query causal attention, tied embedding.

Tokens of one virtual rank are rows: ``x`` is ``(n, width)``, q ``(n, heads, head_dim)``, k and v
``(n, kv_heads, head_dim)``. A block is two halves around the attention, because attention is where virtual ranks
meet: all hosted ranks reach it before any goes on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import ModelConfig
from .data import VOCABULARY


class Block(nn.Module):
    """One transformer block: :meth:`before` gives q, k, v; :meth:`after` takes the attention's output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.width // config.heads
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.RMSNorm(config.width, eps=1e-6)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def before(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(self.norm_attention(x)).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return rotate(q, positions), rotate(k, positions), v.contiguous()

    def after(self, x: Tensor, attention: Tensor) -> Tensor:
        x = x + self.dropout(self.out(attention.flatten(1)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class ByteTransformer(nn.Module):
    """Embedding, blocks, logits over the vocabulary (256 bytes and the start of a document).

    Example:
        >>> model = ByteTransformer(ModelConfig(width=8, layers=1, heads=2, kv_heads=1))
        >>> model.logits(model.embedding(torch.tensor([START, 104, 105]))).shape
        torch.Size([3, 257])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.blocks.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # the residual stream starts as the embedding
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``(n, heads, head_dim)`` by its positions ``(n,)``, computed in fp32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[:, None].to(torch.float32) * frequencies)[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention inside one document that is held whole: ``(n, heads, head_dim)``."""
    backend: AbstractContextManager[None] = nullcontext()
    if q.is_cuda:  # one fixed kernel: the automatic choice may change with the length
        flash = q.dtype in (torch.float16, torch.bfloat16)
        backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.MATH)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    with backend:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
