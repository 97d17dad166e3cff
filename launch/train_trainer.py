"""Transformers' Trainer on packed documents that all processes share in chunks of even work:

    torchrun --nproc-per-node=2 launch/train_trainer.py

The Trainer is transformers' own but for a mixin; its model, collator, accumulation and optimizer are what they are. A
small Qwen2 with random weights learns this file, whose lines are the documents. Each process is one virtual rank here,
so another number of processes is another sum, and another hash.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

try:
    from transformers import DataCollatorWithFlattening, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
except ModuleNotFoundError as error:
    raise SystemExit(f'train_trainer.py needs {error.name}: pip install "shardsum[models]"') from error

from shardsum import ShardGroup, bits
from shardsum.integrations.transformers_trainer import ContextParallelMixin


class PackedTrainer(ContextParallelMixin, Trainer):
    pass


def train(folder: str, steps: int, on_gpu: bool = False) -> tuple[list[float], str]:
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
    return losses, bits.digest(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))


if __name__ == "__main__":
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        losses, digest = train(folder, *map(int, sys.argv[1:] or [20]), on_gpu=on_gpu)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"loss {losses[0]} at step 1, {losses[-1]} at step {len(losses)}; hash {digest[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()
