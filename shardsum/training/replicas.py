"""Per-virtual-rank gradients of shared parameters.

A process that hosts several virtual ranks runs each of them through its own *replica* of the module: parameters are
aliases (own ``nn.Parameter`` and own ``.grad``, the module's storage), buffers are copies. So the optimizer's step on
the module is seen by every replica, and each virtual rank's gradient stays separate until all R are added in rank
order (:mod:`shardsum.training.gradients`). Gradients of float16 and bfloat16 parameters are float32 in the replicas, so
that those of several backward passes (micro-batches) add up without rounding to 8 bits each time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.numerics import accumulator_dtype

if TYPE_CHECKING:
    from ..group.group import CollectiveGroup
    from ..group.plan import Plan

M = TypeVar("M", bound=nn.Module)
#: Dtypes of parameters whose gradients of several backward passes are added in float32.
LOW = (torch.float16, torch.bfloat16)


class Replicas(Sequence[M]):
    """One module per hosted virtual rank, in increasing virtual-rank order; made by ``group.replicas(module)``.

    They are deep copies. A function that the module holds and that closes over it (a lambda, not a method) is not
    copied: it goes on using the module, and the gradients of what it uses are lost. A CollectiveGroup that the module
    holds is shared. Not collective.

    Attributes:
        module: the module whose parameters are shared. Give its parameters to the optimizer.
        virtual_ranks: the hosted virtual ranks.

    Raises:
        ValueError: names a parameter that cannot be aliased (lazy, DTensor), has no sum (complex), or lives on another
            kind of device than the group (a lone process takes any).

    Example:
        >>> replicas = group.replicas(model)
        >>> for v, replica in zip(replicas.virtual_ranks, replicas):
        ...     replica(inputs[v]).sum().backward()
        >>> group.reduce_gradients(replicas)
        >>> optimizer.step()
    """

    def __init__(self, group: CollectiveGroup, module: M) -> None:
        self.module = module
        self.virtual_ranks = tuple(group.virtual_ranks)
        self._parameters = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            if group.world_size > 1 and parameter.device.type != group.device.type:
                where = f"on {parameter.device}, but the group works on {group.device}"
                raise ValueError(f"replicas: parameter {name} is {where}")
            _check_parameter(name, parameter)
        self._plans: dict[Any, Plan] = {}
        #: How many backward passes a float16 or bfloat16 parameter's gradient of a hosted virtual rank is the sum of.
        self._passes: dict[tuple[int, str], int] = {}
        #: Unrounded sums beside the module's ``.grad``, for reduce_gradients(accumulate=True).
        self.totals: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._aliases: list[dict[str, nn.Parameter]] = []
        self._replicas: list[M] = []
        for i in range(len(self.virtual_ranks)):
            aliases = {n: nn.Parameter(p.detach(), p.requires_grad) for n, p in self._parameters.items()}
            memo: dict[int, object] = {id(p): aliases[n] for n, p in self._parameters.items()}
            if dist.is_initialized():  # process groups that modules hold cannot be copied, and need not be
                memo |= {id(group): group for group in dist.distributed_c10d._world.pg_map}
            self._replicas.append(copy.deepcopy(module, memo))
            self._aliases.append(aliases)
            for name, alias in aliases.items():
                if alias.dtype in LOW and alias.requires_grad:
                    alias.grad_dtype = torch.float32
                    alias.register_post_accumulate_grad_hook(partial(_count_pass, self._passes, (i, name)))

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
        self._passes.clear()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The module's parameters that take part in :func:`.gradients.reduce_gradients`, by name; tied ones once."""
        return {n: p for n, p in self._parameters.items() if p.requires_grad}

    def gradients(self, name: str) -> list[Tensor | None]:
        """The gradient of parameter ``name`` of every hosted virtual rank; None where the rank did not use it.

        Float32 of float16 and bfloat16 parameters.
        """
        return [aliases[name].grad for aliases in self._aliases]

    def is_unrounded(self, name: str) -> bool:
        """Whether some gradient of a float16 or bfloat16 parameter is a sum that its dtype cannot hold."""
        return any(self._passes.get((i, name), 0) > 1 for i in range(len(self._aliases)))

    def plan(
        self, group: CollectiveGroup, size: int, dtype: torch.dtype, out_dtype: torch.dtype, scale: float | None
    ) -> Plan:
        """The sum of buckets of ``size`` elements over all virtual ranks. Collective where they are the first such."""
        key = group, size, dtype, out_dtype, scale
        if key not in self._plans:
            lengths = [size] * group.num_virtual_ranks
            self._plans[key] = group.plan(
                "all_reduce", lengths, size=size, dtype=dtype, out_dtype=out_dtype, scale=scale
            )
        return self._plans[key]

    def clear_gradients(self, name: str) -> None:
        """Forget parameter ``name``'s gradients in all replicas."""
        for i, aliases in enumerate(self._aliases):
            aliases[name].grad = None
            self._passes.pop((i, name), None)

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
                if parameter.requires_grad != aliases[name].requires_grad:
                    now, then = ("is not", "is") if aliases[name].requires_grad else ("is", "is not")
                    raise ValueError(
                        f"replicas: parameter {name} {then} frozen in the module, but {now} in {where} "
                        "(requires_grad was changed); call group.replicas(module) again"
                    )
                if _identity(parameter) != _identity(aliases[name]):
                    raise ValueError(
                        f"replicas: parameter {name} of {where} no longer shares the module's storage: "
                        f"{_describe(aliases[name])} against the module's {_describe(parameter)}; "
                        "call group.replicas(module) again"
                    )
                grad = aliases[name].grad
                if grad is not None and grad.layout != torch.strided:
                    raise ValueError(f"replicas: the gradient of {name} in {where} is {grad.layout}, not dense")


def _count_pass(passes: dict[tuple[int, str], int], key: tuple[int, str], _: Tensor) -> None:
    """A hook of a parameter. (It knows no replicas: they would hold each other alive.)"""
    passes[key] = passes.get(key, 0) + 1


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
    return parameter.data_ptr(), parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _describe(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)} on {parameter.device} at {parameter.data_ptr():#x}"
