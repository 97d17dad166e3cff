"""Torchtitan's Llama 3 on packed documents that R virtual ranks share in chunks of any length:

    python launch/train_torchtitan.py --ranks 4                         # R virtual ranks in one process
    torchrun --nproc-per-node=2 launch/train_torchtitan.py --ranks 4    # two virtual ranks a process

Both print the same hash of the trained weights. Needs torchtitan (0.3), its package's requirements and triton. The
model is torchtitan's smallest and begins with random weights; it learns this file, byte by byte.
"""

from __future__ import annotations

import argparse
import random
from functools import partial

import torch
import torch.nn.functional as F
from small_training import SIZE, Learned, document_borders, learn, main, parser
from torch import Tensor, nn

try:
    from torchtitan.models.llama3 import model_registry
except ModuleNotFoundError as error:
    raise SystemExit(f"train_torchtitan.py needs {error.name}, of torchtitan 0.3 or what it requires") from error

from shardsum import ShardGroup
from shardsum.integrations.torchtitan import apply_cp_to_forward, prepare_context_parallel_input


def make_model(device: str) -> nn.Module:
    model = model_registry("debugmodel", attn_backend="varlen").model.build().to(device)
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    model.init_states()
    apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()])
    return model


def batch(text: Tensor, generator: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """A packed sequence as torchtitan's loader gives it: inputs, labels and positions, ``(1, SIZE)``."""
    borders, begin = document_borders(generator), generator.randrange(len(text) - SIZE - 1)
    positions = torch.cat([torch.arange(b - a, device=text.device) for a, b in zip(borders, borders[1:])])
    rows = text[None, begin : begin + SIZE + 1]
    return rows[:, :-1], rows[:, 1:], positions[None]


def loss_parts(group: ShardGroup, replicas: list[nn.Module], text: Tensor, generator: random.Random) -> list[Tensor]:
    """What every hosted virtual rank adds to the mean loss of a packed sequence."""
    inputs, labels, positions = batch(text, generator)
    chunks = prepare_context_parallel_input(inputs, labels, {"positions": positions}, group)
    chunks = chunks if isinstance(chunks, list) else [chunks]
    outputs = group.lockstep([partial(m, x, **kwargs) for m, (x, _, kwargs) in zip(replicas, chunks)])
    return [F.cross_entropy(y[0], labels[0], reduction="sum") / SIZE for y, (_, labels, _) in zip(outputs, chunks)]


def train(options: argparse.Namespace, device: str = "cpu") -> Learned:
    group, model = ShardGroup(options.ranks, device=device), make_model(device)
    return learn(group, model, __file__, partial(loss_parts, group), steps=options.steps, lr=1e-3)


if __name__ == "__main__":
    main(train, parser("Train torchtitan's smallest Llama 3 by context parallelism.").parse_args())
