"""What the examples share: devices and processes, and how a small model with random weights learns its own source."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsum import ShardGroup, bits

SIZE = 256  # positions of a packed sequence
Learned = tuple[list[float], str]


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, help="virtual ranks; default: one a process")
    parser.add_argument("--steps", type=int, default=5)
    return parser


def main(train: Callable[[argparse.Namespace, str], Learned], options: argparse.Namespace) -> None:
    """``train(options, device)`` on this process, one of torchrun's or alone; process 0 prints what came out."""
    rank, local, here = (
        int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    on_gpu = torch.cuda.device_count() >= here
    if on_gpu:
        torch.cuda.set_device(local)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    losses, digest = train(options, "cuda" if on_gpu else "cpu")
    if rank == 0:
        print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}; hash {digest[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()


def text_of(path: str, device: torch.device) -> Tensor:
    """The bytes of a file, int64."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long().to(device)


def document_borders(generator: random.Random) -> list[int]:
    """Borders of documents of log-normal lengths that fill a packed sequence."""
    borders = [0]
    while borders[-1] < SIZE:
        borders.append(min(SIZE, borders[-1] + int(generator.lognormvariate(3, 1)) + 1))
    return borders


def repeat_bits(device: torch.device) -> None:
    """Flash attention and cuBLAS repeat their bits only when told to."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def digest(weights: list[Tensor]) -> str:
    return bits.digest(torch.cat([w.detach().flatten().float().cpu() for w in weights]))


def learn(
    group: ShardGroup,
    model: nn.Module,
    path: str,
    parts_of: Callable[[list[nn.Module], Tensor, random.Random], list[Tensor]],
    *,
    steps: int,
    lr: float,
) -> Learned:
    """The loss of every step, and the hash of the trained weights: the same on every process.

    Args:
        path: the file whose bytes the model learns.
        parts_of: ``parts_of(replicas, text, generator)`` draws a batch and returns what every hosted virtual rank adds
            to its mean loss.
    """
    repeat_bits(group.device)
    replicas, optimizer = group.replicas(model), torch.optim.AdamW(model.parameters(), lr=lr)
    text, generator, losses = text_of(path, group.device), random.Random(0), []
    for _ in range(steps):
        parts = parts_of(replicas, text, generator)
        sum(parts).backward()
        group.reduce_gradients(replicas)
        optimizer.step()
        optimizer.zero_grad()
        shards = [part.detach().reshape(1) for part in parts]
        losses.append(group.all_reduce(shards, [1] * group.num_virtual_ranks, size=1).item())
    return losses, digest([*model.parameters()])
