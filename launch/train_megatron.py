"""Megatron-Core's GPT on packed documents that R virtual ranks share in chunks of any length:

    python launch/train_megatron.py --ranks 4                         # R virtual ranks in one process
    torchrun --nproc-per-node=2 launch/train_megatron.py --ranks 4    # two virtual ranks a process

Both print the same hash of the trained weights. Needs `pip install "shardsum[megatron]"`. The model is small and begins
with random weights; it learns this file, byte by byte. (Megatron keeps its rotary frequencies on the current GPU;
without one it is told that this is the CPU.)
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from shardsum import ShardGroup, bits
from shardsum.integrations.megatron import apply_cp, model_inputs

SIZE = 256  # positions of a packed sequence


def make_model() -> GPTModel:
    """A Llama in Megatron's words."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=96,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        bias_activation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=SIZE, position_embedding_type="rope")


def batch(text: torch.Tensor, generator: random.Random) -> tuple[torch.Tensor, list[int]]:
    """A packed sequence ``(1, SIZE)`` and its documents' borders."""
    borders = [0]
    while borders[-1] < SIZE:
        borders.append(min(SIZE, borders[-1] + int(generator.lognormvariate(3, 1)) + 1))
    begin = generator.randrange(len(text) - SIZE)
    return text[None, begin : begin + SIZE], borders


def train(ranks: int | None, steps: int, device: str) -> tuple[list[float], str]:
    """The loss of every step, and the hash of the trained weights: the same on every process."""
    group, model = ShardGroup(ranks, device=device), make_model().to(device).train()
    apply_cp(model)
    replicas = group.replicas(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    generator, losses = random.Random(0), []
    for _ in range(steps):
        tokens, borders = batch(text, generator)
        plan = group.context_parallel(group.balanced_lengths(borders), borders)
        inputs = model_inputs(plan, tokens, tokens)
        outputs = group.lockstep([partial(m, **kwargs) for m, kwargs in zip(replicas, inputs)])
        count = SIZE - (len(borders) - 1)  # the last token of a document predicts nothing
        parts = [(y * kwargs["loss_mask"]).sum() / count for y, kwargs in zip(outputs, inputs)]
        sum(parts).backward()
        group.reduce_gradients(replicas)
        optimizer.step()
        optimizer.zero_grad()
        shards = [part.detach().reshape(1) for part in parts]
        losses.append(group.all_reduce(shards, [1] * group.num_virtual_ranks, size=1).item())
    weights = [p.detach().flatten().float().cpu() for p in model.parameters()]
    return losses, bits.digest(torch.cat(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Megatron-Core GPT by context parallelism.")
    parser.add_argument("--ranks", type=int, help="virtual ranks; default: one a process")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.use_deterministic_algorithms(True)
    else:
        torch.cuda.current_device = lambda: "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("nccl" if on_gpu else "gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        losses, digest = train(options.ranks, options.steps, "cuda" if on_gpu else "cpu")
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}; hash {digest[:16]}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
