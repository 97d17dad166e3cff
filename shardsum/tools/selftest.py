"""The self-test of ``shardsum doctor``: every pair of processes, then every transport, against the definition's bits.

What went wrong is told through the launcher's store, not through the connections under test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ..core import bits, reference
from ..core.words import TransportName
from ..training.shard_group import ShardGroup
from .compare import ragged_lengths, random_shards

_SIZE, _FEATURES = 20, 96
_PATTERN = 4096  # bytes that a pair exchanges


@dataclass(frozen=True)
class Trial:
    """One thing that was tried. ``ok`` None: it does not run here, ``detail`` says why."""

    name: str
    ok: bool | None
    detail: str = ""

    def line(self) -> str:
        verdict = {True: "the same bits", False: "FAILED", None: "does not run here"}[self.ok]
        return f"{self.name:<36} {verdict}{': ' * bool(self.detail)}{' '.join(self.detail.split())}"


def alone(device: str, timeout: float) -> Iterator[Trial]:
    """One process: the transport it has, then those between two processes that are started for it."""
    yield _transport("local", torch.device(device), timeout)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "shardsum", "doctor", "--json", "--timeout", str(timeout)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout + 60)
        found = json.loads(done.stdout[done.stdout.index("{") :])["trials"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        yield Trial("two processes (gloo)", False, str(error))
        return
    for trial in found:
        yield Trial(f"two processes, {trial['name']}", trial["ok"], trial["detail"])


def together(store: dist.Store, device: torch.device, timeout: float) -> Iterator[Trial]:
    """The launched processes: all pairs, then, if all of them are right, every transport. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    broken = try_pairs(store, device, timeout)
    pairs = world_size * (world_size - 1) // 2
    if broken:
        for a, b in sorted(broken):
            yield Trial(f"processes {a} and {b}", False, broken[a, b])
        return
    yield Trial(f"{pairs} pair{'s' * (pairs > 1)} of {world_size} processes", True)
    for name in ("gather", "all_to_all", "carry", "peer"):
        own = _transport(name, device, timeout)
        reports = _share(store, f"transport {name}", [own.ok, own.detail], timeout)
        wrong = {r: detail for r, (ok, detail) in reports.items() if ok is False}
        who = ", ".join(map(str, sorted(wrong)))
        detail = f"process {who}: {wrong[min(wrong)]}" if wrong else own.detail
        yield Trial(name, False if wrong else own.ok, detail)
        if wrong and rank in reports:
            return  # connections may be in any state


def try_pairs(store: dist.Store, device: torch.device, timeout: float) -> dict[tuple[int, int], str]:
    """What went wrong between each pair of processes that failed, by their ranks. Collective.

    In every round each process has one partner (a round-robin tournament), sends it bytes that both can compute and
    compares what comes.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    failed: dict[int, str] = {}
    for partner in _partners(rank, world_size):
        try:
            failed |= _try_pair(rank, partner, device, timeout)
        except RuntimeError as error:
            failed[partner] = str(error).split(". ")[0]
    broken: dict[tuple[int, int], str] = {}
    reports = _share(store, "pairs", sorted(failed.items()), timeout)
    for r in range(world_size):
        for partner, sentence in reports.get(r, [(q, "no word from it") for q in range(world_size) if q != r]):
            broken.setdefault((min(r, partner), max(r, partner)), f"process {r}: {sentence}")
    return broken


def _partners(rank: int, world_size: int) -> Iterator[int]:
    players = world_size + world_size % 2  # an odd one pauses
    for turn in range(players - 1):
        order = [0, *((turn + i) % (players - 1) + 1 for i in range(players - 1))]
        partner = order[players - 1 - order.index(rank)]
        if partner < world_size:
            yield partner


def pattern(sender: int, receiver: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + sender * 65536 + receiver)
    return torch.randint(0, 256, (_PATTERN,), dtype=torch.uint8, generator=generator)


def _try_pair(rank: int, partner: int, device: torch.device, timeout: float) -> dict[int, str]:
    outgoing = pattern(rank, partner).to(device)
    incoming = torch.zeros(_PATTERN, dtype=torch.uint8, device=device)
    operations = [dist.P2POp(dist.isend, outgoing, partner), dist.P2POp(dist.irecv, incoming, partner)]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        if device.type == "cpu":
            work.wait(timedelta(seconds=timeout))
            continue
        end = time.monotonic() + timeout
        while not work.is_completed():  # waiting would be for ever on the GPU
            if time.monotonic() > end:
                return {partner: f"nothing came within {timeout:g} s"}
            time.sleep(0.001)
    wrong = int((incoming.cpu() != pattern(partner, rank)).sum())
    return {partner: f"{wrong} of {_PATTERN} bytes came wrong"} if wrong else {}


def _share(store: dist.Store, key: str, value: Any, timeout: float) -> dict[int, Any]:
    """What every process that came in time has to say, by rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"{key} of {rank}", json.dumps(value))
    end, found = time.monotonic() + 2 * timeout, {}
    for r in range(world_size):
        while not store.check([f"{key} of {r}"]) and time.monotonic() < end:
            time.sleep(0.005)
        if store.check([f"{key} of {r}"]):
            found[r] = json.loads(store.get(f"{key} of {r}"))
    return found


def _transport(name: str, device: torch.device, timeout: float) -> Trial:
    """One ragged sum of fp32 and one of bf16, on every process, against the definition."""
    lengths = ragged_lengths(max(4, dist.get_world_size() if dist.is_initialized() else 1), _SIZE)
    try:
        group = ShardGroup(len(lengths), transport=cast(TransportName, name), device=device, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        return Trial(name, None if isinstance(error, ValueError) else False, str(error))
    wrong = None
    try:
        for dtype in (torch.float32, torch.bfloat16):
            shards = random_shards(lengths, _FEATURES, 0, dtype, device)
            expected = reference.ragged_sum(shards, [0] * len(shards), _SIZE, out_dtype=dtype)
            found = group.all_reduce([shards[v] for v in group.virtual_ranks], lengths, size=_SIZE)
            wrong = wrong or bits.first_difference(found, expected)  # and go on: the others are in the next call
    except (ValueError, RuntimeError) as error:
        return Trial(name, False, str(error))
    return Trial(name, wrong is None, f"other bits, {wrong}" if wrong else "")
