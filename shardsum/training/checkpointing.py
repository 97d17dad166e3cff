"""Activation checkpointing of several hosted virtual ranks' layers, whose recomputation makes collective calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from . import lockstep

if TYPE_CHECKING:
    from .shard_group import ShardGroup

#: Arguments of torch's checkpoint itself; the others are the function's.
_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop")


def checkpoint(
    group: ShardGroup,
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """What ``group.checkpoint(function, ...)`` returns (:meth:`shardsum.ShardGroup.checkpoint`)."""
    if use_reentrant:
        raise ValueError(
            "use_reentrant: True; only torch's checkpoint without reentrant autograd keeps the order of sums"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    now = lockstep.running(group)
    if now is None:
        if preserve_rng_state and not torch.compiler.is_compiling():
            function = group.generators.replayed(function)
        return torch_checkpoint(function, *args, **options, **kwargs)
    options |= {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    return now.meet("checkpoint", _checkpoint_all, (partial(function, **kwargs), args), (group,), **options)


def _checkpoint_all(
    functions: Sequence[Callable[..., Any]], arguments: Sequence[tuple[Any, ...]], group: ShardGroup, **options: Any
) -> Any:
    """One checkpoint for the layer of all hosted virtual ranks; a list of their results."""
    flat = [x for args in arguments for x in args]
    layers = group.generators.replayed(_Layers(group, functions, [len(args) for args in arguments]))
    return torch_checkpoint(layers, *flat, **options)


class _Layers:
    """The hosted virtual ranks' functions in a lockstep of their own, on their arguments behind one another."""

    def __init__(self, group: ShardGroup, functions: Sequence[Callable[..., Any]], counts: Sequence[int]) -> None:
        self._group, self._functions, self._counts = group, functions, counts

    def __call__(self, *flat: Any) -> list[Any]:
        rest = iter(flat)
        calls = [partial(f, *[next(rest) for _ in range(n)]) for f, n in zip(self._functions, self._counts)]
        return lockstep.run(self._group, calls)
