"""shardsum inside an existing training step, on a mesh of data ranks ("dp") x sequence ranks ("sp"):

    torchrun --nproc-per-node=4 launch/train_step.py [sequence ranks, 2] [steps, 30]

The ranks of an "sp" group share one sequence in chunks of any length; "dp" ranks take different sequences. DDP covers
them all. shardsum appears at [1] to [4]; the rest is an ordinary step of a byte model that learns this file.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup
from shardsum.training.context import ContextBatch
from shardsum.training.hooks import HookState, ddp_comm_hook

DIM, HEADS, LENGTH = 64, 4, 256


class Model(nn.Module):
    """One attention layer over this rank's chunk of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, 256))

    def forward(self, tokens: Tensor, positions: Tensor, cp: ContextBatch) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        attended = cp.attention(q, k, v)  # [1]
        return self.head(x + self.out(attended.flatten(1)))


def train(sequence_ranks: int, steps: int, device: str = "cpu") -> list[float]:
    """The loss of every step on this rank's sequence: the same number on all ranks that share it."""
    shape = (dist.get_world_size() // sequence_ranks, sequence_ranks)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "sp"))
    dp_rank, dp_size = mesh["dp"].get_local_rank(), shape[0]
    world, sequence = ShardGroup(device=device), ShardGroup(group=mesh["sp"], device=device)  # [2]
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device))
    model.register_comm_hook(HookState(world, scale=1 / dp_size), ddp_comm_hook)  # [3] sum over sp, mean over dp
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    lengths = [LENGTH // sequence_ranks - 8] * (sequence_ranks - 1)
    lengths.append(LENGTH - sum(lengths))  # any lengths will do
    positions = torch.arange(LENGTH, device=device).split(lengths)[sequence.rank]
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    losses = []
    for step in range(steps):
        here = (step * dp_size + dp_rank) * LENGTH % (len(text) - LENGTH) + positions
        targets = text[here + 1].masked_fill(text[here] == ord("\n"), -100)  # unequal numbers of targets, too
        cp = sequence.context_parallel(lengths)  # this step's plan, for all layers
        loss_sum = F.cross_entropy(model(text[here], positions, cp), targets, reduction="sum")
        loss, _ = sequence.token_mean(loss_sum, (targets != -100).sum())  # [4] the exact count of the whole sequence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if on_gpu else -1)  # -1: leave it alone
    dist.init_process_group("nccl" if on_gpu else "gloo")
    sequence_ranks, steps = [int(a) for a in sys.argv[1:]] + [2, 30][len(sys.argv) - 1 :]
    losses = train(sequence_ranks, steps, "cuda" if on_gpu else "cpu")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {steps}")
    dist.destroy_process_group()
