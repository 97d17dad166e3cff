"""Megatron-Core's GPT on packed documents that R virtual ranks share in chunks of any length:

    python launch/train_megatron.py --ranks 4                         # R virtual ranks in one process
    torchrun --nproc-per-node=2 launch/train_megatron.py --ranks 4    # two virtual ranks a process

Both print the same hash of the trained weights. Needs `pip install "shardsum[megatron]"`. The model is small and begins
with random weights; it learns this file, byte by byte. (Megatron keeps its rotary frequencies on the current GPU;
without one it is told that this is the CPU.)
"""

from __future__ import annotations

import argparse
import random
from functools import partial

import torch
import torch.distributed as dist
from small_training import SIZE, Learned, document_borders, learn, main, parser
from torch import Tensor, nn

try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
except ModuleNotFoundError as error:
    raise SystemExit(f'train_megatron.py needs {error.name}: pip install "shardsum[megatron]"') from error

from shardsum import ShardGroup
from shardsum.integrations.megatron import apply_cp, model_inputs


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


def loss_parts(group: ShardGroup, replicas: list[nn.Module], text: Tensor, generator: random.Random) -> list[Tensor]:
    """What every hosted virtual rank adds to the mean loss of a packed sequence."""
    borders, begin = document_borders(generator), generator.randrange(len(text) - SIZE)
    plan = group.context_parallel(group.balanced_lengths(borders), borders)
    tokens = text[None, begin : begin + SIZE]
    inputs = model_inputs(plan, tokens, tokens)
    outputs = group.lockstep([partial(m, **kwargs) for m, kwargs in zip(replicas, inputs)])
    count = SIZE - (len(borders) - 1)  # the last token of a document predicts nothing
    return [(y * kwargs["loss_mask"]).sum() / count for y, kwargs in zip(outputs, inputs)]


def train(options: argparse.Namespace, device: str = "cpu") -> Learned:
    if device == "cpu":
        torch.cuda.current_device = lambda: "cpu"
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    group, model = ShardGroup(options.ranks, device=device), make_model().to(device).train()
    apply_cp(model)
    return learn(group, model, __file__, partial(loss_parts, group), steps=options.steps, lr=3e-3)


if __name__ == "__main__":
    main(train, parser("Train a small Megatron-Core GPT by context parallelism.").parse_args())
