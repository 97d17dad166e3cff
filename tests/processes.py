"""Run a function in G processes: gloo by fork with one thread a child (twenty times faster than spawn), or NCCL by
spawn with one GPU a process ("cpu:gloo" is gloo by spawn). Neither CUDA nor the threads that autograd keeps for GPUs,
from the first backward on, survive a fork: where there is a GPU, all of it is by spawn."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.gpus import take_gpu


def _child(
    rank: int, world_size: int, folder: str, timeout: float, backend: str, fn: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)  # first of all: a forked child with several threads hangs
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend != "gloo" and torch.cuda.is_available():
        take_gpu(rank, world_size)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = fn(rank, world_size, *args)
    except BaseException:
        result = RuntimeError(traceback.format_exc())
        torch.save(str(result), f"{folder}/error-{rank}")
        os._exit(1)  # do not wait for peers in the destructors
    torch.save(result, f"{folder}/result-{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """``[fn(rank, world_size, *args) for every rank]``, each in its own process; None for those that ``may_die``.

    With "nccl", return CPU tensors.

    Raises:
        AssertionError: a process raised or died; the message holds every traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _child,
            (world_size, folder, timeout, backend, fn, args),
            nprocs=world_size,
            join=False,
            start_method="fork" if backend == "gloo" and not torch.cuda.is_available() else "spawn",
        )
        for process in context.processes:
            process.join(timeout + 30)
        stuck = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
        for rank in stuck:
            context.processes[rank].kill()
        errors = [
            f"process {rank} (exit {process.exitcode}{', killed after the limit' if rank in stuck else ''}):\n"
            + (torch.load(f"{folder}/error-{rank}") if os.path.exists(f"{folder}/error-{rank}") else "no traceback")
            for rank, process in enumerate(context.processes)
            if process.exitcode != 0 and rank not in may_die
        ]
        assert not errors, "\n".join(errors)
        return [
            None if rank in may_die else torch.load(f"{folder}/result-{rank}", weights_only=False)
            for rank in range(world_size)
        ]
