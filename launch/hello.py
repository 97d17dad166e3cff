import os

import torch
import torch.distributed as dist

from shardsum import ShardGroup, bits

if "WORLD_SIZE" in os.environ:  # under torchrun
    dist.init_process_group("gloo")

x = torch.tensor([[10.0 * (r + 1) + j for j in range(6)] for r in range(4)])  # 4 virtual ranks, 6 positions
lengths = [3, 6, 0, 1]  # how many of its positions each of them holds

group = ShardGroup(4)  # R = 4, on one process or on four
mine = [x[r, : lengths[r]] for r in group.virtual_ranks]  # the shards that live here
total = group.all_reduce(mine, lengths)  # ranks 0, 1, 2, 3 in this order, in fp32

if group.rank == 0:
    print([int(v) for v in total], f"hash {bits.digest(total)[:16]}, {group.world_size} process(es)")
