"""Collectives that have run before, launched again with next to no Python: for peers, whose launch takes 5 us itself.

A call with host lengths whose arguments were checked, compared and launched once is remembered by all that the checks
looked at, except what can differ between two calls alike: addresses, layout, device and whether a gradient is needed.
Those are looked at again. A call that needs the long way for any reason simply takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..native import loader as native

_MAX = 1024
Results = Sequence[tuple[torch.Size, torch.dtype]]


def _never(*args: Any) -> bool:
    return False


class Known(NamedTuple):
    """``launch(outs, shards)`` runs the call; ``results`` are shape and dtype of what it fills, by hosted sink.

    ``one(out, shard, lengths)``, where given, is used instead: it looks at device, layout, addresses, shapes and
    dtypes itself, and at ``lengths``, the call's one list, unless None; it returns False for what it does not run.
    ``again`` is for :attr:`Replays.last`."""

    launch: Callable[[list[Tensor], list[Tensor]], None]
    results: Results
    one: Callable[[Tensor, Tensor, list[int] | None], bool] | None = None
    again: Callable[..., bool] = _never


class Replays:
    """The remembered calls of one process of a group, which hosts ``num_hosted`` virtual ranks on GPU ``device``.

    Attributes:
        last: ``last(shards, lengths, out, *arguments)`` runs the last all_reduce by peers again, where it is one with
            these arguments, and says whether it did (csrc/again.h).
    """

    def __init__(self, num_hosted: int, device: torch.device) -> None:
        self._num_hosted, self._device = num_hosted, -1 if device.index is None else device.index
        self._known: dict[Hashable, Known] = {}
        self.last = _never

    def __len__(self) -> int:
        return len(self._known)

    def key(self, name: str, shards: Any, lists: Sequence[Any], out: Tensor | None, others: Hashable) -> Hashable:
        """What a call is known by; None where it is not remembered.

        Args:
            lists: lists of ints or of pairs of ints.
            others: all other arguments.
        """
        parts: tuple[Any, ...] = ()
        for values in lists:
            packed = native.pack(values)  # 8.0 and True equal ints, which the long way tells apart
            if packed is None:
                packed = _pack_pairs(values)
                parts += ("pairs",)
            if not packed:
                return None
            parts += (packed,)
        if out is not None and type(out) is not Tensor:
            return None
        try:
            result = None if out is None else out.dtype  # the shape is looked at
            if type(shards) is Tensor:
                return name, shards.shape, shards.dtype, result, others, parts
            if type(shards) is not list or {*map(type, shards)} != {Tensor}:
                return None
            return name, *[(s.shape, s.dtype) for s in shards], result, others, parts
        except RuntimeError:  # a nested tensor has no shape
            return None

    def remember(self, key: Hashable, known: Known) -> None:
        if not _is_fixed(key):
            return
        if len(self._known) == _MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = known

    def clear(self) -> None:
        self._known.clear()
        self.last = _never

    def run(self, key: Hashable, shards: Any, out: Tensor | None) -> list[Tensor] | None:
        """Launch such a call again; None where it is not known, or an address, layout or gradient forbids it."""
        try:
            known = self._known.get(key)
        except TypeError:  # not hashable: an argument that no call takes
            return None
        if known is None:
            return None
        tensors = shards if type(shards) is list else [shards] if self._num_hosted == 1 else [*shards.unbind(0)]
        if known.one is not None:
            return self._run_one(known, tensors[0], out)
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any([x.requires_grad for x in tensors])):
            return None
        if out is not None and out.requires_grad:
            return None
        if not self._lie_well(tensors, out, known.results):
            return None
        outs = [out] if out is not None else _empty(tensors[0], known.results)
        known.launch(outs, tensors)
        return outs

    def _run_one(self, known: Known, shard: Tensor, out: Tensor | None) -> list[Tensor] | None:
        assert known.one is not None
        if forward_ad._current_level >= 0 or (shard.requires_grad and torch.is_grad_enabled()):
            return None  # the long way refuses tangents
        if out is not None and out.requires_grad:
            return None
        try:
            outs = [out] if out is not None else _empty(shard, known.results)
        except RuntimeError:  # of a sparse tensor, say
            return None
        if not known.one(outs[0], shard, None):
            return None
        if known.again is not _never:  # of another collective: it is no all_reduce
            self.last = known.again
        return outs

    def _lie_well(self, shards: list[Tensor], out: Tensor | None, results: Results) -> bool:
        """Contiguous on the group's device without lazy signs, and ``out`` apart, of the result's shape."""
        device = self._device
        try:
            for x in shards if out is None else (*shards, out):
                if not x.is_contiguous() or x.get_device() != device or x.is_neg() or x.is_conj():
                    return False
            if out is None:
                return True
            begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
            if any(x.data_ptr() < end and begin < x.data_ptr() + x.nbytes for x in shards):
                return False
            return [out.shape] == [shape for shape, _ in results]
        except RuntimeError:  # a sparse tensor has neither layout nor address
            return False


def _empty(like: Tensor, results: Results) -> list[Tensor]:
    """(A shape in single ints is read in a third of the time.)"""
    return [like.new_empty(*shape, dtype=dtype) for shape, dtype in results]


def _is_fixed(value: Any) -> bool:
    """Whether what a call is known by stays as it is: an array or a tensor, which may pass for a size, does not."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (Number, str, bytes, type, torch.dtype))


def _pack_pairs(values: Any) -> bytes | None:
    if type(values) is not list or {*map(type, values)} != {tuple} or {*map(len, values)} != {2}:
        return None
    return native.pack([*chain.from_iterable(values)])
