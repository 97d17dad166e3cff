"""Unchanged models of the transformers library on packed documents that R ranks share in chunks of any length:

    python launch/train_llama.py --ranks 4                         # R virtual ranks in one process
    torchrun --nproc-per-node=2 launch/train_llama.py --ranks 4    # two virtual ranks a process
    torchrun --nproc-per-node=4 launch/train_llama.py              # one rank a process, DDP
    torchrun --nproc-per-node=4 launch/train_llama.py --fsdp       # one rank a process, FSDP2

All four print the same hash of the trained weights. --model qwen2, --checkpointing, --autocast (bf16) and --lora change
what is trained, not that. The models are small and begin with random weights; they learn this file, byte by byte.
"""

from __future__ import annotations

import argparse
import random
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from small_training import SIZE, Learned, digest, document_borders, main, parser, repeat_bits, text_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
except ModuleNotFoundError as error:
    raise SystemExit(f'train_llama.py needs {error.name}: pip install "shardsum[models]"') from error

from shardsum import ShardGroup
from shardsum.integrations.transformers import apply_cp, model_inputs
from shardsum.training.hooks import FSDPReduceScatter, HookState, ddp_comm_hook

ACCUMULATE = 2  # packed sequences a step
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    words = parser("Train a small transformers model by context parallelism.")
    words.add_argument("--model", choices=sorted(MODELS), default="llama")
    for flag in ("fsdp", "checkpointing", "autocast", "lora"):
        words.add_argument(f"--{flag}", action="store_true")
    return words.parse_args(arguments)


def make_model(options: argparse.Namespace, group: ShardGroup) -> nn.Module:
    torch.manual_seed(0)
    config, kind = MODELS[options.model]
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = kind(config(**sizes, **heads, tie_word_embeddings=True))
    if options.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    apply_cp(model, group)  # attention "shardsum"
    return model.to(group.device).train()


class Ranks:
    """The modules that this process's virtual ranks run, and how their gradients are summed in rank order."""

    def __init__(self, model: nn.Module, group: ShardGroup, fsdp: bool) -> None:
        self.model, self.group, self.replicas = model, group, None
        if group.world_size < group.num_virtual_ranks or group.world_size == 1:
            self.replicas = self.modules = group.replicas(model)
        elif fsdp:
            layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
            for module in (*layers, model):
                fully_shard(module)
            FSDPReduceScatter().install(model)
            self.modules = [model]
        else:
            self.modules = [DistributedDataParallel(model)]
            self.modules[0].register_comm_hook(HookState.for_sum_loss(group), ddp_comm_hook)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around a forward and backward; gradients are summed over ranks in the last one of a step."""
        (module,) = self.modules if self.replicas is None else (None,)
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()

    def finish(self) -> None:
        if self.replicas is not None:
            self.group.reduce_gradients(self.replicas)


def batches(text: Tensor, generator: random.Random) -> list[tuple[Tensor, list[int]]]:
    """A step's packed sequences ``(1, SIZE)`` and their documents' borders."""
    found = []
    for _ in range(ACCUMULATE):
        borders, begin = document_borders(generator), generator.randrange(len(text) - SIZE)
        found.append((text[None, begin : begin + SIZE], borders))
    return found


def train(options: argparse.Namespace, device: str = "cpu") -> Learned:
    """The loss of every step, and the hash of the trained weights: the same on every process."""
    group = ShardGroup(options.ranks, device=device)
    repeat_bits(group.device)
    model = make_model(options, group)
    ranks = Ranks(model, group, options.fsdp)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    text, generator, losses = text_of(__file__, group.device), random.Random(0), []
    for _ in range(options.steps):
        inputs = []
        for tokens, borders in batches(text, generator):
            batch = group.context_parallel(group.balanced_lengths(borders), borders)
            inputs.append(model_inputs(batch, tokens, tokens))
        targets = sum(chunks[0]["num_items_in_batch"] for chunks in inputs)  # of all ranks and micro-batches
        parts = []
        for i, chunks in enumerate(inputs):
            with ranks.accumulate(last=i == len(inputs) - 1):
                calls = [partial(m, **{**c, "num_items_in_batch": targets}) for m, c in zip(ranks.modules, chunks)]
                with torch.autocast(device, torch.bfloat16, enabled=options.autocast):
                    outputs = group.lockstep(calls)
                sum(out.loss for out in outputs).backward()
            parts.append([out.loss.detach().reshape(1) for out in outputs])
        ranks.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(group.all_reduce(p, [1] * group.num_virtual_ranks, size=1).item() for p in parts))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    return losses, digest(weights)


if __name__ == "__main__":
    main(train, parse())
