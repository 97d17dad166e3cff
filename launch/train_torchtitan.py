"""Torchtitan's Llama 3 on packed documents that R virtual ranks share in chunks of any length:

    python launch/train_torchtitan.py --ranks 4                         # R virtual ranks in one process
    torchrun --nproc-per-node=2 launch/train_torchtitan.py --ranks 4    # two virtual ranks a process

Both print the same hash of the trained weights. Needs torchtitan (0.3) and its package's requirements. The model is
torchtitan's smallest and begins with random weights; it learns this file, byte by byte.
"""

from __future__ import annotations

import argparse
import os
import random
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtitan.models.llama3 import model_registry

from shardsum import ShardGroup, bits
from shardsum.integrations.torchtitan import apply_cp_to_forward, prepare_context_parallel_input

SIZE = 256  # positions of a packed sequence


def make_model(device: str) -> torch.nn.Module:
    model = model_registry("debugmodel", attn_backend="varlen").model.build().to(device)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    model.init_states()
    apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()])
    return model


def batch(text: torch.Tensor, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A packed sequence as torchtitan's loader gives it: inputs, labels and positions, ``(1, SIZE)``."""
    begin, positions = generator.randrange(len(text) - SIZE - 1), []
    while len(positions) < SIZE:
        positions += range(int(generator.lognormvariate(3, 1)) + 1)
    rows = text[None, begin : begin + SIZE + 1]
    return rows[:, :-1], rows[:, 1:], torch.tensor([positions[:SIZE]], device=text.device)


def train(ranks: int | None, steps: int, device: str) -> tuple[list[float], str]:
    """The loss of every step, and the hash of the trained weights: the same on every process."""
    group, model = ShardGroup(ranks, device=device), make_model(device)
    replicas = group.replicas(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    generator, losses = random.Random(0), []
    for _ in range(steps):
        inputs, labels, positions = batch(text, generator)
        chunks = prepare_context_parallel_input(inputs, labels, {"positions": positions}, group)
        chunks = chunks if isinstance(chunks, list) else [chunks]
        outputs = group.lockstep([partial(m, x, **kwargs) for m, (x, _, kwargs) in zip(replicas, chunks)])
        parts = [F.cross_entropy(y[0], labels[0], reduction="sum") / SIZE for y, (_, labels, _) in zip(outputs, chunks)]
        sum(parts).backward()
        group.reduce_gradients(replicas)
        optimizer.step()
        optimizer.zero_grad()
        shards = [part.detach().reshape(1) for part in parts]
        losses.append(group.all_reduce(shards, [1] * group.num_virtual_ranks, size=1).item())
    return losses, bits.digest(torch.cat([p.detach().flatten().float().cpu() for p in model.parameters()]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train torchtitan's smallest Llama 3 by context parallelism.")
    parser.add_argument("--ranks", type=int, help="virtual ranks; default: one a process")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.use_deterministic_algorithms(True)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    losses, digest = train(options.ranks, options.steps, "cuda" if on_gpu else "cpu")
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}; hash {digest[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
