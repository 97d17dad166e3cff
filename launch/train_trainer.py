"""Transformers' Trainer on packed documents that all processes share in chunks of even work:

    torchrun --nproc-per-node=2 launch/train_trainer.py

The Trainer is transformers' own but for a mixin; its model, collator, accumulation and optimizer are what they are. A
small Qwen2 with random weights learns this file, whose lines are the documents. Each process is one virtual rank here,
so another number of processes is another sum, and another hash.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from small_training import Learned, digest, main, parser

try:
    from transformers import DataCollatorWithFlattening, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
except ModuleNotFoundError as error:
    raise SystemExit(f'train_trainer.py needs {error.name}: pip install "shardsum[models]"') from error

from shardsum import ShardGroup
from shardsum.integrations.transformers_trainer import ContextParallelMixin


class PackedTrainer(ContextParallelMixin, Trainer):
    pass


def train(folder: str, steps: int, on_gpu: bool = False) -> Learned:
    """The loss of every step and the hash of the weights, the same on every process."""
    documents = [{"input_ids": [*line]} for line in Path(__file__).read_bytes().splitlines(keepends=True)]
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    arguments = TrainingArguments(
        folder,
        use_cpu=not on_gpu,
        max_steps=steps,
        per_device_train_batch_size=8,  # documents in a packed sequence
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        bf16=True,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    group = ShardGroup(arguments.world_size, device="cuda" if on_gpu else "cpu")
    collator = DataCollatorWithFlattening()
    trainer = PackedTrainer(model, arguments, train_dataset=documents, data_collator=collator, shard_group=group)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, digest([*model.parameters()])


def learn(options: argparse.Namespace, device: str) -> Learned:
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, options.steps, device == "cuda")


if __name__ == "__main__":
    main(learn, parser("Train a small Qwen2 by transformers' Trainer.").parse_args())
