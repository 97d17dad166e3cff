"""What a narrow wire costs: errors of sums of real gradients, for each wire_dtype of the gradient hooks.

    python benchmarks/gradient_wires.py [steps before, 50]

The model and data of ``shardsum train`` with its defaults: four virtual ranks, documents of the standard library's
sources packed in one sequence. After the given number of optimizer steps the gradients of one more are taken from each
virtual rank, sent and added as the hooks do, and compared with the float64 sum of the same gradients.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from shardsum import ShardGroup, ragged_sum
from shardsum.tools.train.config import RunConfig
from shardsum.tools.train.data import Corpus
from shardsum.tools.train.model import ByteTransformer
from shardsum.tools.train.step import Step
from shardsum.training.block_wire import DTYPE, decode, encode


def gradients(steps: int) -> dict[str, list[Tensor]]:
    """Every parameter's gradient of every virtual rank, float32 and flat."""
    config = RunConfig()
    train, ranks = config.train, config.group.num_virtual_ranks
    torch.manual_seed(train.seed)
    torch.set_num_threads(train.threads)
    group, corpus = ShardGroup(ranks), Corpus(config.data, train.document_length, train.seed)
    model = ByteTransformer(config.model)
    step = Step(group, model, train.document_length, bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay)
    for i in range(steps):
        step([corpus.packed(i, ranks, train.sequence_length)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
    found: dict[str, list[Tensor]] = {}

    def take(_: object, replicas: object, **options: object) -> None:
        names = step.replicas.trainable()
        found.update({name: [g.flatten() for g in step.replicas.gradients(name)] for name in names})

    group.reduce_gradients = take.__get__(group)  # in place of the sum
    step([corpus.packed(steps, ranks, train.sequence_length)])
    return found


def travelled(row: Tensor, wire: torch.dtype) -> Tensor:
    """What the process that sums receives."""
    return decode(encode(row[None])[0], row.numel()) if wire == DTYPE else row.to(wire)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rows = gradients(steps)
    exact = {name: sum(row.double() for row in ranks) for name, ranks in rows.items()}
    size = sum(x.numel() for x in exact.values())
    print(f"{size} gradients of 4 virtual ranks after {steps} steps; relative error of the sum")
    for wire in (torch.float32, torch.bfloat16, torch.float16, DTYPE):
        result = torch.bfloat16 if wire == DTYPE else wire
        errors = {}
        for name, ranks in rows.items():
            total = ragged_sum([travelled(row, wire) for row in ranks], out_dtype=result)
            errors[name] = (total.double() - exact[name]).square().sum().item()
        norm = sum(x.square().sum().item() for x in exact.values())
        worst = max((errors[name] / exact[name].square().sum().item()) ** 0.5 for name in rows)
        print(f"{wire!s:20} all {(sum(errors.values()) / norm) ** 0.5:.2e}   worst parameter {worst:.2e}")


if __name__ == "__main__":
    main()
