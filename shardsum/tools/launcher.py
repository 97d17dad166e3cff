"""The processes that a launcher (torchrun, srun) started: their process group, this one's device, what they know."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..training.shard_group import ShardGroup


@contextmanager
def launched(device: str, timeout: float) -> Iterator[torch.device]:
    """Join the launched processes while the block runs, if there are several; gives this process's device.

    A process group that exists already is used and left as it is.

    Args:
        device: "cpu", or "cuda": the GPU of LOCAL_RANK.
        timeout: seconds after which a silent process is an error.

    Raises:
        ValueError: there is no GPU for this process.
    """
    own = _own_device(device)
    started = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if started:
        on_gpu = own.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=own if on_gpu else None,
        )
    yield own
    if started:  # not in a finally: after an error the others may be gone, and this would wait for them
        dist.destroy_process_group()


def _own_device(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    local_rank, available = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= available:
        raise ValueError(
            f"device: LOCAL_RANK {local_rank} needs a GPU of its own, but this machine has {available}; "
            "start fewer processes: one process can host several virtual ranks"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def gather_bytes(group: ShardGroup, data: bytes) -> list[bytes]:
    """What every virtual rank's process passed, by virtual rank; equally long everywhere. Collective."""
    rows = [torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group.device) for _ in group.virtual_ranks]
    gathered = group.all_gather(rows, [len(data)] * group.num_virtual_ranks).cpu()
    return [bytes(part.tolist()) for part in gathered.unflatten(0, (group.num_virtual_ranks, -1))]
