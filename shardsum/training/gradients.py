"""The sum of the replicas' gradients over all virtual ranks, in rank order, into the module's parameters.

Gradients travel in flat buckets. Those of float16 and bfloat16 parameters travel in the parameter's dtype where each is
of one backward pass, and in float32 where some virtual rank has added several: nothing is rounded before the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.numerics import check_op
from .replicas import LOW, M, Replicas

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup

#: Gradients travel in flat buffers of about this size. The results' bits do not depend on it.
BUCKET_BYTES = 25 * 2**20
_WORD = 62  # bits of a parameter bitmap in one signed 64-bit integer


@dataclass(frozen=True)
class _Bucket:
    """Parameters that travel in one flat buffer of ``wire`` dtype; the sum has dtype ``result``."""

    wire: torch.dtype
    result: torch.dtype
    device: torch.device
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def _buckets(parameters: dict[str, nn.Parameter], unrounded: set[str], accumulate: bool) -> Iterator[_Bucket]:
    """Fixed by values that all processes share, so every process cuts alike. A parameter is never cut."""
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.device], list[str]] = {}
    for name, p in parameters.items():
        wire = torch.float32 if name in unrounded else p.dtype
        result = torch.float32 if accumulate and p.dtype in LOW else p.dtype
        kinds.setdefault((wire, result, p.device), []).append(name)
    for kind, names in kinds.items():
        bucket, filled = _Bucket(*kind), 0
        for name in names:
            size = parameters[name].numel()
            if bucket.names and (filled + size) * bucket.wire.itemsize > BUCKET_BYTES:
                yield bucket
                bucket, filled = _Bucket(*kind), 0
            bucket.names.append(name)
            bucket.sizes.append(size)
            filled += size
        yield bucket


@torch.no_grad()
def reduce_gradients(
    group: CollectiveGroup, replicas: Replicas[M], *, scale: float | None = None, accumulate: bool = False
) -> None:
    """Sum the replicas' gradients over all R virtual ranks, in rank order, into ``replicas.module``'s ``.grad``.

    Accumulated in fp32 (fp64 for fp64 parameters), multiplied by ``scale``, rounded once to the parameter's dtype. A
    parameter that a virtual rank did not use contributes nothing; one that no virtual rank used gets ``.grad = None``.
    What ``.grad`` held before is replaced, the replicas' gradients are cleared, and the optimizer is not touched.
    Collective: every process calls it with replicas of the same module.

    Micro-batches: run several backward passes before one call (one sum over ranks, and the cheaper way), or pass
    ``accumulate``. Either way gradients of float16 and bfloat16 parameters add up in fp32.

    Args:
        scale: factor of the sum.
        accumulate: add to ``.grad``, as backward does, and leave it where no rank used the parameter. As long as
            nobody else changes ``.grad``, it is the rounded value of an fp32 sum over the calls. Where it is None
            (after ``optimizer.zero_grad()``), a new sum begins. The same on every process.

    Raises:
        ValueError: on every process, when a replica went stale on one of them, or ``accumulate`` differs.
    """
    used, unrounded = _agree_on_used(group, replicas, scale, accumulate)
    parameters = replicas.trainable()
    for name, p in parameters.items():
        if not accumulate:
            replicas.totals.pop(name, None)
            if name not in used:
                p.grad = None
    pending: tuple[_Bucket, Any] | None = None
    for bucket in _buckets({n: p for n, p in parameters.items() if n in used}, unrounded, accumulate):
        rows = _flatten(replicas, bucket)
        plan = replicas.plan(group, sum(bucket.sizes), bucket.wire, bucket.result, scale)
        handle = plan.start(rows)
        if pending is not None:  # while this bucket travels, the previous one is delivered and the next one filled
            _deliver(replicas, *pending, accumulate)
        pending = bucket, handle
    if pending is not None:
        _deliver(replicas, *pending, accumulate)


def _deliver(replicas: Replicas[M], bucket: _Bucket, handle: Any, accumulate: bool) -> None:
    parameters = replicas.trainable()
    for name, part in zip(bucket.names, handle.wait().split(bucket.sizes)):
        p, part = parameters[name], part.view(parameters[name].shape)
        if not accumulate:
            p.grad = torch.empty_like(p).copy_(part)
        elif p.dtype not in LOW:
            p.grad = torch.empty_like(p).copy_(part) if p.grad is None else p.grad.add_(part)
        else:
            total = _total(replicas, name, p)
            total = part.clone() if total is None else total.add_(part)
            p.grad = torch.empty_like(p).copy_(total)
            replicas.totals[name] = p.grad, p.grad._version, total


def _total(replicas: Replicas[M], name: str, p: nn.Parameter) -> Tensor | None:
    """The fp32 sum that ``p.grad`` is the rounded value of; of ``p.grad`` itself where somebody changed that."""
    if p.grad is None:
        return None
    grad, version, total = replicas.totals.get(name, (None, 0, None))
    return total if grad is p.grad and version == p.grad._version else p.grad.float()


def _agree_on_used(
    group: CollectiveGroup, replicas: Replicas[M], scale: float | None, accumulate: bool
) -> tuple[set[str], set[str]]:
    """The parameters that some virtual rank has a gradient for, and those of which one is a sum of several backward
    passes that the parameter's dtype cannot hold: the same sets on every process.

    Only the hosting process knows. A bit a parameter travels for each on the host's side channel: no GPU is waited for.
    """
    parameters = replicas.trainable()
    names = list(parameters)
    try:
        if replicas.virtual_ranks != group.virtual_ranks:
            ours, theirs = list(group.virtual_ranks), list(replicas.virtual_ranks)
            raise ValueError(f"replicas: of virtual ranks {theirs}, but this process hosts {ours}; another group's?")
        check_op("sum", scale, torch.float32)
        replicas.check()
    except ValueError as error:
        raise group.refuse("reduce_gradients", error, counted=True) from error
    used = _bitmap([any(g is not None for g in replicas.gradients(name)) for name in names])
    unrounded = _bitmap([replicas.is_unrounded(name) for name in names])
    same = {"trainable parameters of replicas": _fingerprint(parameters), "accumulate": accumulate}
    everyone = group.gather_ints("reduce_gradients", [*used, *unrounded], 2 * len(used), **same)
    maps = [_names(names, [row[k * len(used) : (k + 1) * len(used)] for row in everyone]) for k in (0, 1)]
    return maps[0], maps[1]


def _fingerprint(parameters: dict[str, nn.Parameter]) -> str:
    """What determines the buckets: bits would stand for other parameters, and sums mix them, where it differs."""
    said = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items()]
    digest = hashlib.blake2b("\n".join(said).encode(), digest_size=8).hexdigest()
    return f"{len(said)} (hash of names, shapes and dtypes: {digest})"


def _bitmap(flags: Sequence[bool]) -> list[int]:
    words = [0] * (len(flags) // _WORD + 1)
    for i, flag in enumerate(flags):
        words[i // _WORD] |= flag << i % _WORD
    return words


def _names(names: Sequence[str], bitmaps: Sequence[Sequence[int]]) -> set[str]:
    """The names whose bit is set in some of the bitmaps."""
    return {n for i, n in enumerate(names) if any(words[i // _WORD] >> i % _WORD & 1 for words in bitmaps)}


def _flatten(replicas: Replicas[M], bucket: _Bucket) -> list[Tensor]:
    """Move the gradients into one row a hosted rank.

    A missing one is +0.0, which leaves any sum that began at +0.0 as it is.
    """
    # One allocation a row: below 32 MB the C library reuses memory instead of mapping (and clearing) new pages.
    rows = [torch.empty(sum(bucket.sizes), dtype=bucket.wire, device=bucket.device) for _ in replicas]
    for i, row in enumerate(rows):
        for name, part in zip(bucket.names, row.split(bucket.sizes)):
            grad = replicas.gradients(name)[i]
            if grad is None:
                part.zero_()
            else:
                part.view(grad.shape).copy_(grad)
    for name in bucket.names:
        replicas.clear_gradients(name)
    return rows
