"""GPUs for tests of several processes: one each, or shared.

``SHARDSUM_TEST_GPUS=4 pytest -n 2 -m "gpu or multi_gpu"`` runs the tests of two and of four GPUs on a machine that has
fewer: processes share them and take turns. torch's symmetric memory has a mode for that. NCCL refuses two ranks on one
GPU of one host, so there every rank says that it is a host of its own, and they talk over sockets. The library runs the
same code as on GPUs of their own. What is not seen this way is speed, and the order in which NVLink shows writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

_ASKED = int(os.environ.get("SHARDSUM_TEST_GPUS", 0)) if torch.cuda.is_available() else 0
Test = TypeVar("Test", bound=Callable[..., object])


def marks(count: int) -> list[pytest.MarkDecorator]:
    """Of a test of ``count`` processes, each on a GPU; skipped where there are fewer and nobody said to share."""
    few = max(torch.cuda.device_count(), _ASKED) < count
    return [pytest.mark.multi_gpu, pytest.mark.skipif(few, reason=f"needs {count} GPUs")]


def needs_gpus(count: int) -> Callable[[Test], Test]:
    """A decorator that puts these marks on a test."""

    def mark(test: Test) -> Test:
        for one in marks(count):
            test = one(test)
        return test

    return mark


def share_gpus() -> None:
    """Let this process share its GPU with others. NCCL and symmetric memory read this from the environment."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # to load a kernel waits for the kernels that run


def take_gpu(rank: int, world_size: int) -> torch.device:
    """The GPU of a process, made the current one."""
    here = torch.cuda.device_count()
    if world_size > here:
        share_gpus()
        os.environ.update(NCCL_HOSTID=f"process {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    device = torch.device("cuda", rank % here)
    torch.cuda.set_device(device)
    return device
