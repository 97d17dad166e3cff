"""The processes that a launcher (torchrun, srun) started: their process group, device and agreement."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ..training.shard_group import ShardGroup

T = TypeVar("T")


def under_launcher() -> bool:
    """Whether a launcher started this process, which may start it again after a failure."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def launched(device: str, timeout: float) -> Iterator[torch.device]:
    """Join the launched processes while the block runs, if there are several; gives this process's device.

    A process group that exists already is used and left as it is.

    Args:
        device: "cpu", or "cuda": the GPU of LOCAL_RANK.
        timeout: seconds after which a silent process is an error.

    Raises:
        ValueError: there is no GPU for this process.
        RuntimeError: a process did not come.
    """
    own = _own_device(device)
    started = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if started:
        on_gpu = own.type == "cuda"
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=attempt_store(store, rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=own if on_gpu else None,
        )
    yield own
    if started:  # not in a finally: after an error the others may be gone, and this would wait for them
        dist.destroy_process_group()


def attempt_store(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """The part of a launcher's store that belongs to these processes alone, not to those before a restart.

    torchrun without a rendezvous backend keeps one store over all restarts, and what the killed processes left in it
    would be taken for the living ones' (pytorch issue 135712). TORCHELASTIC_RESTART_COUNT cannot tell attempts apart:
    launchers of several hosts count for themselves. So every process writes a name that nobody had before it, process
    0 proposes the set of names it finds, and the set in which every process finds itself is the attempt. Collective.

    Raises:
        RuntimeError: a process did not come within ``timeout`` seconds.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    store = dist.PrefixStore("shardsum", store)
    store.set_timeout(timedelta(seconds=timeout))
    store.set(f"name of {rank}", own)
    proposed = ""
    while time.monotonic() < end:
        if rank == 0:
            present = [r for r in range(world_size) if store.check([f"name of {r}"])]
            names = [store.get(f"name of {r}").decode() for r in present]
            if len(names) == world_size and " ".join(names) != proposed:
                proposed = " ".join(names)
                store.set("proposed", proposed)
        elif store.check(["proposed"]):
            proposed = store.get("proposed").decode()
        if own in proposed.split():
            attempt = uuid.uuid5(uuid.NAMESPACE_OID, proposed).hex
            if rank != 0:
                store.set(f"{attempt} joined by {rank}", "")
            elif all(store.check([f"{attempt} joined by {r}"]) for r in range(1, world_size)):
                store.set(f"{attempt} begins", "")
            if store.check([f"{attempt} begins"]):
                return dist.PrefixStore(attempt, store)
        time.sleep(0.005)
    missing = [r for r in range(world_size) if not store.check([f"name of {r}"])]
    who = f"process {', '.join(map(str, missing))} of {world_size} did not start" if missing else "one did not join"
    raise RuntimeError(f"after {timeout:g} s, {who} (the launcher's processes wait for each other)")


def launch_name() -> str | None:
    """A name of this launch on process 0 that restarts share and other launches do not; None without a launcher.

    Raises:
        ValueError: this is a restart, and the system does not say of what.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    identity = os.environ["TORCHELASTIC_RUN_ID"]
    if identity != "none" and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        return identity  # process 0 may change hosts
    launcher = os.getppid()
    try:
        with open(f"/proc/{launcher}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, StopIteration):
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            raise ValueError("folder: name the run folder (--folder FOLDER): a restart has to find it") from None
        return None
    started = booted + ticks // os.sysconf("SC_CLK_TCK")
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{launcher}"


def _own_device(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    local_rank, available = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if available == 0:
        raise ValueError("device: cuda, but torch finds no CUDA device; shardsum doctor says what torch has")
    if local_rank >= available:
        raise ValueError(
            f"device: LOCAL_RANK {local_rank} needs a GPU of its own, but this machine has {available}; "
            "start fewer processes: one process can host several virtual ranks"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def gather_texts(group: ShardGroup, text: str) -> list[str]:
    """What every virtual rank's process passed, by virtual rank. Collective."""
    line = bytearray(json.dumps(text).encode() + b"\n")
    rows = [torch.frombuffer(line, dtype=torch.uint8).to(group.device) for _ in group.virtual_ranks]
    gathered = bytes(group.all_gather(rows).cpu().tolist())
    return [json.loads(part) for part in gathered.splitlines()]


def from_first(group: ShardGroup, make: Callable[[], str]) -> str:
    """What ``make`` gives on process 0, on every process; its ValueError or OSError likewise. Collective."""
    return gather_texts(group, on_all(group, lambda: make() if group.rank == 0 else ""))[group.owners.index(0)]


def on_all(group: ShardGroup, act: Callable[[], T]) -> T:
    """Run ``act`` on every process; if it fails on any, the same error is raised on all of them. Collective.

    Raises:
        ValueError, OSError: what ``act`` raised on the process of the lowest virtual rank that failed.
    """
    done: list[T] = []
    error = ""
    try:
        done.append(act())
    except (ValueError, OSError) as e:
        error = f"{'OSError' if isinstance(e, OSError) else 'ValueError'} {e}"
    for found in gather_texts(group, error):
        if found:
            kind, _, sentence = found.partition(" ")
            raise (OSError if kind == "OSError" else ValueError)(sentence)
    return done[0]
