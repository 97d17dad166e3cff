"""What a narrow wire costs: errors of sums of real gradients, for each wire_dtype of the gradient hooks, and time.

    python benchmarks/gradient_wires.py [steps before, 50]                  # errors
    torchrun --nproc-per-node=2 benchmarks/gradient_wires.py                # times, on CPUs
    torchrun --nproc-per-node=2 benchmarks/gradient_wires.py cuda           # ... a GPU a process

The model and data of ``shardsum train`` with its defaults: four virtual ranks, documents of the standard library's
sources packed in one sequence. After the given number of optimizer steps the gradients of one more are taken from each
virtual rank, sent and added as the hooks do, and compared with the float64 sum of the same gradients.

Times are of forward and backward passes under DDP, eight linear layers of 2048 (134 MB of float32 gradients) with 2048
rows a process on a GPU, of 512 with 64 rows on a CPU. The baselines are DDP without a hook (float32) and, on GPUs, with
torch's ``bf16_compress_hook``, which also adds in bfloat16. Before they are timed, gradients are compared with DDP's.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from common import Meter, ms
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup, ragged_sum
from shardsum.tools.launcher import launched
from shardsum.tools.train.config import RunConfig
from shardsum.tools.train.data import Corpus
from shardsum.tools.train.model import ByteTransformer
from shardsum.tools.train.step import Step
from shardsum.training.block_wire import DTYPE, decode, encode
from shardsum.training.hooks import HookState, ddp_comm_hook


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


def times(device: torch.device) -> None:
    """Prints what a forward and backward pass takes with each wire."""
    width, rows, samples = (2048, 2048, 15) if device.type == "cuda" else (512, 64, 9)
    group, meter = ShardGroup(device=device), Meter(device, samples)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(group.rank)).to(device)

    def model(wire: str) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)]).to(device)
        ddp = DistributedDataParallel(layers, device_ids=[device.index] if device.type == "cuda" else None)
        if wire == "torch, bf16":
            ddp.register_comm_hook(None, bf16_compress_hook)
        elif wire != "torch, fp32":
            dtype = {"fp32": None, "bf16": torch.bfloat16, "fp8 blocks": DTYPE}[wire]
            ddp.register_comm_hook(HookState.for_mean_loss(group, wire_dtype=dtype), ddp_comm_hook)
        return ddp

    def step(ddp: DistributedDataParallel) -> None:
        ddp.zero_grad(set_to_none=True)
        ddp(x).square().mean().backward()

    wires = ["torch, fp32", "torch, bf16", "fp32", "bf16", "fp8 blocks"]
    if device.type == "cpu":
        wires.remove("torch, bf16")  # its hook is for GPUs
    models = {wire: model(wire) for wire in wires}
    found = {}
    for wire, ddp in models.items():
        for _ in range(3):  # DDP builds its buckets anew after the first step
            step(ddp)
        found[wire] = torch.cat([p.grad.flatten() for p in ddp.parameters()])
    exact = found["torch, fp32"]
    errors = {wire: ((grads - exact).norm() / exact.norm()).item() for wire, grads in found.items()}
    assert max(errors.values()) < 0.1, errors
    measured = meter.times({wire: partial(step, ddp) for wire, ddp in models.items()})
    if group.rank == 0:
        print(f"{exact.numel() * 4 / 1e6:.0f} MB of gradients, {group.world_size} processes, {device}; ms, error")
        for wire, t in measured.items():
            print(f"{wire:12} {ms(t)}  {errors[wire]:.1e}")


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        with launched("cuda" if sys.argv[1:] == ["cuda"] else "cpu", 120) as device:
            times(device)
        return
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
