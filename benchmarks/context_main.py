"""How benchmarks of context parallelism start: the device, one thread on a CPU, the process group under torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def main(args: argparse.Namespace, run: Callable[[argparse.Namespace, torch.device], Any]) -> None:
    """``run(args, device)`` on ``args.device``, "cpu" or "cuda": a GPU a process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells every start and stop otherwise
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        options = {"device_id": device} if args.device == "cuda" else {}
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **options)
    run(args, device)
    if dist.is_initialized():
        dist.destroy_process_group()
