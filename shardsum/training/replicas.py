"""Per-virtual-rank gradients of shared parameters.

A process that hosts several virtual ranks runs each of them through its own *replica* of the module: parameters are
aliases (own ``nn.Parameter`` and own ``.grad``, the module's storage), buffers are copies. So the optimizer's step on
the module is seen by every replica, and each virtual rank's gradient stays separate until all R are added in rank
order. This module stands below :mod:`shardsum.group.group`, whose methods call it; it uses a group's collectives only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..core.numerics import accumulator_dtype, check_op

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup
    from ..group.plan import Plan

M = TypeVar("M", bound=nn.Module)

#: Gradients travel in flat buffers of about this size. The results' bits do not depend on it.
BUCKET_BYTES = 25 * 2**20
_WORD = 62  # bits of a parameter bitmap in one signed 64-bit integer


class Replicas(Sequence[M]):
    """One module per hosted virtual rank, in increasing virtual-rank order; made by ``group.replicas(module)``.

    They are deep copies. A function that the module holds and that closes over it (a lambda, not a method) is not
    copied: it goes on using the module, and the gradients of what it uses are lost.

    Attributes:
        module: the module whose parameters are shared. Give its parameters to the optimizer.
        virtual_ranks: the hosted virtual ranks.

    Example:
        >>> replicas = group.replicas(model)
        >>> for v, replica in zip(replicas.virtual_ranks, replicas):
        ...     replica(inputs[v]).sum().backward()
        >>> group.reduce_gradients(replicas)
        >>> optimizer.step()
    """

    def __init__(self, module: M, virtual_ranks: Sequence[int]) -> None:
        self.module = module
        self.virtual_ranks = tuple(virtual_ranks)
        self._parameters = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            _check_parameter(name, parameter)
        self._plans: dict[Any, Plan] = {}
        self._aliases: list[dict[str, nn.Parameter]] = []
        self._replicas: list[M] = []
        for _ in self.virtual_ranks:
            aliases = {n: nn.Parameter(p.detach(), p.requires_grad) for n, p in self._parameters.items()}
            memo: dict[int, object] = {id(p): aliases[n] for n, p in self._parameters.items()}
            self._replicas.append(copy.deepcopy(module, memo))
            self._aliases.append(aliases)

    @overload
    def __getitem__(self, index: int) -> M: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[M]: ...
    def __getitem__(self, index: int | slice) -> M | Sequence[M]:
        return self._replicas[index]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[M]:
        return iter(self._replicas)

    def train(self, mode: bool = True) -> Replicas[M]:
        """Set training (or evaluation) mode on the module and every replica."""
        for m in (self.module, *self._replicas):
            m.train(mode)
        return self

    def zero_grad(self) -> None:
        """Forget the replicas' gradients (``reduce_gradients`` does so too)."""
        for replica in self._replicas:
            replica.zero_grad()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The module's parameters that take part in :func:`reduce_gradients`, by name; tied ones once."""
        return {n: p for n, p in self._parameters.items() if p.requires_grad}

    def gradients(self, name: str) -> list[Tensor | None]:
        """The gradient of parameter ``name`` of every hosted virtual rank; None where the rank did not use it."""
        return [aliases[name].grad for aliases in self._aliases]

    def plan(self, group: CollectiveGroup, size: int, dtype: torch.dtype, scale: float | None) -> Plan:
        """The sum of buckets of ``size`` elements over all virtual ranks. Collective where they are the first such."""
        key = group, size, dtype, scale
        if key not in self._plans:
            lengths = [size] * group.num_virtual_ranks
            self._plans[key] = group.plan("all_reduce", lengths, size=size, dtype=dtype, scale=scale)
        return self._plans[key]

    def clear_gradients(self, name: str) -> None:
        """Forget parameter ``name``'s gradients in all replicas."""
        for aliases in self._aliases:
            aliases[name].grad = None

    def check(self) -> None:
        """Make sure that every alias still shares its parameter's storage.

        Raises:
            ValueError: names a parameter that was replaced, converted, moved, added, removed, (un)frozen, or has a
                sparse gradient.
        """
        _check_same(self._parameters, dict(self.module.named_parameters()), "the module")
        for v, replica, aliases in zip(self.virtual_ranks, self._replicas, self._aliases):
            where = f"virtual rank {v}'s replica"
            _check_same(aliases, dict(replica.named_parameters()), where)
            for name, parameter in self._parameters.items():
                if _identity(parameter) != _identity(aliases[name]):
                    raise ValueError(
                        f"replicas: parameter {name} of {where} no longer shares the module's storage: "
                        f"{_describe(aliases[name])} against the module's {_describe(parameter)}; "
                        "call group.replicas(module) again"
                    )
                grad = aliases[name].grad
                if grad is not None and grad.layout != torch.strided:
                    raise ValueError(f"replicas: the gradient of {name} in {where} is {grad.layout}, not dense")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"replicas: parameter {name} is not initialised; run the module once before")
    if type(parameter.data) is not Tensor:
        raise ValueError(
            f"replicas: parameter {name} is a {type(parameter.data).__name__}, not a plain tensor; "
            "aliases of it would not share storage"
        )
    if parameter.requires_grad:
        accumulator_dtype(parameter.dtype, f"replicas: parameter {name}")


def _check_same(recorded: dict[str, nn.Parameter], found: dict[str, nn.Parameter], where: str) -> None:
    for name in {**recorded, **found}:
        if recorded.get(name) is not found.get(name):
            what = "is new in" if name not in recorded else "is gone from" if name not in found else "was replaced in"
            raise ValueError(f"replicas: parameter {name} {what} {where}; call group.replicas(module) again")


def _identity(parameter: nn.Parameter) -> tuple[object, ...]:
    return (
        parameter.data_ptr(),
        parameter.dtype,
        parameter.device,
        parameter.shape,
        parameter.stride(),
        parameter.requires_grad,
    )


def _describe(parameter: nn.Parameter) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{parameter.dtype} {tuple(parameter.shape)} on {parameter.device}{frozen} at {parameter.data_ptr():#x}"


def make_replicas(group: CollectiveGroup, module: M) -> Replicas[M]:
    """What ``group.replicas(module)`` returns. Not collective. A CollectiveGroup that the module holds is shared.

    Raises:
        ValueError: names a parameter that cannot be aliased (lazy, DTensor), has no sum (complex), or lives on another
            kind of device than the group (a lone process takes any).
    """
    for name, parameter in module.named_parameters():
        if group.world_size > 1 and parameter.device.type != group.device.type:
            raise ValueError(
                f"replicas: parameter {name} is on {parameter.device}, but the group works on {group.device}"
            )
    return Replicas(module, group.virtual_ranks)


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one dtype and device that travel in one flat buffer."""

    dtype: torch.dtype
    device: torch.device
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def _buckets(parameters: dict[str, nn.Parameter]) -> Iterator[_Bucket]:
    """Fixed by the parameters alone, so every process cuts alike. A parameter is never cut."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, p in parameters.items():
        kinds.setdefault((p.dtype, p.device), []).append(name)
    for kind, names in kinds.items():
        bucket, filled = _Bucket(*kind), 0
        for name in names:
            size = parameters[name].numel()
            if bucket.names and (filled + size) * bucket.dtype.itemsize > BUCKET_BYTES:
                yield bucket
                bucket, filled = _Bucket(*kind), 0
            bucket.names.append(name)
            bucket.sizes.append(size)
            filled += size
        yield bucket


@torch.no_grad()
def reduce_gradients(group: CollectiveGroup, replicas: Replicas[M], *, scale: float | None = None) -> None:
    """Sum the replicas' gradients over all R virtual ranks, in rank order, into ``replicas.module``'s ``.grad``.

    Accumulated in fp32 (fp64 for fp64 parameters), multiplied by ``scale``, rounded once to the parameter's dtype. A
    parameter that a virtual rank did not use contributes nothing; one that no virtual rank used gets ``.grad = None``.
    What ``.grad`` held before is replaced (accumulate micro-batches in the replicas), the replicas' gradients are
    cleared, and the optimizer is not touched. Collective: every process calls it with replicas of the same module.

    Raises:
        ValueError: on every process, when a replica went stale on one of them.
    """
    used = _agree_on_used(group, replicas, scale)
    parameters = replicas.trainable()
    for name, p in parameters.items():
        if name not in used:
            p.grad = None
    pending: tuple[_Bucket, Any] | None = None
    for bucket in _buckets({n: p for n, p in parameters.items() if n in used}):
        rows = _flatten(replicas, bucket)
        handle = replicas.plan(group, sum(bucket.sizes), bucket.dtype, scale).start(rows)
        if pending is not None:  # while this bucket travels, the previous one is delivered and the next one filled
            _deliver(parameters, *pending)
        pending = bucket, handle
    if pending is not None:
        _deliver(parameters, *pending)


def _deliver(parameters: dict[str, nn.Parameter], bucket: _Bucket, handle: Any) -> None:
    for name, part in zip(bucket.names, handle.wait().split(bucket.sizes)):
        p = parameters[name]
        p.grad = torch.empty_like(p).copy_(part.view(p.shape))


def _agree_on_used(group: CollectiveGroup, replicas: Replicas[M], scale: float | None) -> set[str]:
    """The parameters that some virtual rank has a gradient for, the same set on every process.

    Only the hosting process knows. One bit a parameter travels on the host's side channel: no GPU is waited for.
    """
    names = list(replicas.trainable())
    try:
        if replicas.virtual_ranks != group.virtual_ranks:
            ours, theirs = list(group.virtual_ranks), list(replicas.virtual_ranks)
            raise ValueError(f"replicas: of virtual ranks {theirs}, but this process hosts {ours}; another group's?")
        check_op("sum", scale, torch.float32)
        replicas.check()
    except ValueError as error:
        raise group.refuse("reduce_gradients", error, counted=True) from error
    words = [0] * (len(names) // _WORD + 1)
    for i, name in enumerate(names):
        if any(g is not None for g in replicas.gradients(name)):
            words[i // _WORD] |= 1 << i % _WORD
    everyone = group.gather_ints("reduce_gradients", words, len(words))
    return {n for i, n in enumerate(names) if any(row[i // _WORD] >> i % _WORD & 1 for row in everyone)}


def _flatten(replicas: Replicas[M], bucket: _Bucket) -> list[Tensor]:
    """Move the gradients into one row a hosted rank.

    A missing one is +0.0, which leaves any sum that began at +0.0 as it is.
    """
    # One allocation a row: below 32 MB the C library reuses memory instead of mapping (and clearing) new pages.
    rows = [torch.empty(sum(bucket.sizes), dtype=bucket.dtype, device=bucket.device) for _ in replicas]
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
