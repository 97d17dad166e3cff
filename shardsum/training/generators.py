"""One random stream per virtual rank, so that dropout does not depend on which process computes what.

``nn.Dropout`` and the other random operators take no generator: they draw from the default one. Around virtual rank
v's work the default generators (the CPU's, and that of the group's device) are therefore switched to v's state and
switched back afterwards. The stream of v is a function of (seed, v) and of what v has drawn, never of the process.

**Activation checkpointing.** torch.utils.checkpoint sets the default generators back for the recomputation of a layer,
but does not know these streams. A context that opens *inside* a checkpointed function needs one of

    checkpoint(function, x, use_reentrant=False, context_fn=group.generators.checkpoint_contexts)
    checkpoint(group.generators.replayed(function), x, use_reentrant=True)      # or False
    group.checkpoint(function, x)

With each the recomputation draws the numbers of the forward, and the streams stand afterwards where they stood before.
Without, a context that draws numbers in a backward pass is an error. (A context *around* the checkpoint needs nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def rank_seed(seed: int, virtual_rank: int) -> int:
    """A 63-bit seed. Ranks get consecutive values, so they differ in the 32 bits that the CPU's generator uses."""
    x = (seed + 0x9E3779B97F4A7C15) & _MASK  # the mixing of splitmix64: neighbouring seeds must not share streams
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) + virtual_rank) & (_MASK >> 1)


class RankGenerators:
    """The states of the default generators of every hosted virtual rank.

    Args:
        virtual_ranks: the hosted virtual ranks.
        device: the device whose default generator is switched beside the CPU's.
        seed: pass the same integer on every process.

    Example:
        >>> generators = RankGenerators([0, 1], torch.device("cpu"), seed=7)
        >>> with generators.context(1):
        ...     noise = torch.rand(3)  # the same numbers wherever virtual rank 1 is hosted
    """

    def __init__(self, virtual_ranks: Sequence[int], device: torch.device | str = "cpu", *, seed: int = 0) -> None:
        self._virtual_ranks = tuple(virtual_ranks)
        self._device = torch.device(device)
        self._active: set[int] = set()
        self._replaying = False
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Start the streams of all virtual ranks anew from ``seed`` (the same on every process)."""
        self._states: dict[int, dict[str, Tensor]] = {}
        for v in self._virtual_ranks:
            derived = rank_seed(seed, v)
            self._states[v] = {
                device.type: torch.Generator(device).manual_seed(derived).get_state() for device in self._devices()
            }

    @contextmanager
    def context(self, v: int) -> Iterator[None]:
        """Random operators inside draw from virtual rank ``v``'s streams; the surrounding state returns afterwards.

        Contexts of different virtual ranks nest.

        Raises:
            ValueError: ``v`` is not hosted by this process, or its context is open already.
            RuntimeError: numbers were drawn in the recomputation of a checkpointed function that does not replay the
                streams (see the module); they are not those of the forward.
        """
        if v not in self._states:
            raise ValueError(f"rng: virtual rank {v} is not hosted here; this process hosts {self._virtual_ranks}")
        if v in self._active:
            raise ValueError(f"rng: the context of virtual rank {v} is open already")
        outside = self._get()
        self._active.add(v)
        self._set(self._states[v])
        try:
            yield
        finally:
            drawn = self._get()
            self._set(outside)
            self._active.discard(v)
            if self._replaying or torch._C._current_graph_task_id() == -1:
                self._states[v] = drawn
            elif not all(torch.equal(drawn[device], state) for device, state in self._states[v].items()):
                raise RuntimeError(
                    f"rng: virtual rank {v} drew random numbers in a backward pass, where torch.utils.checkpoint "
                    "computes a function again: they differ from those of the forward; pass context_fn="
                    "group.generators.checkpoint_contexts to it, or group.generators.replayed(function), or use "
                    "group.checkpoint"
                )

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` of torch.utils.checkpoint without reentrant autograd: the recomputation replays the streams.

        Example:
            >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=group.generators.checkpoint_contexts)
        """
        return nullcontext(), _Replay(self)

    def replayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` for one call of torch.utils.checkpoint of either kind: its later calls replay the first one.

        Example:
            >>> y = checkpoint(group.generators.replayed(layer), x, use_reentrant=True)
        """
        return _Replayed(self, function)

    def state_dict(self) -> dict[str, Tensor]:
        """``{"<virtual rank>.<device type>": uint8 state}`` of the hosted virtual ranks, as copies.

        The dicts of all processes have different keys; their union is the state of all R virtual ranks.
        """
        return {f"{v}.{device}": s.clone() for v, states in self._states.items() for device, s in states.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the hosted virtual ranks' states from ``state`` (which may hold more ranks). Nothing changes on error.

        Raises:
            ValueError: a hosted virtual rank's state is missing.
        """
        loaded: dict[int, dict[str, Tensor]] = {}
        for v in self._virtual_ranks:
            for device in self._devices():
                key = f"{v}.{device.type}"
                if key not in state:
                    raise ValueError(f"load_state_dict: no state {key!r} for virtual rank {v}; found {sorted(state)}")
                loaded.setdefault(v, {})[device.type] = state[key].detach().to("cpu", torch.uint8, copy=True)
        self._states = loaded

    def _devices(self) -> list[torch.device]:
        cpu = torch.device("cpu")
        return [cpu] if self._device.type == "cpu" else [cpu, self._device]

    def _get(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            states[self._device.type] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def _set(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[self._device.type], self._device)


class _Replay:
    """Inside, the streams go on from where they are when this is made; afterwards they are where they were. May be
    entered several times. States are replaced, never written to, and no operator runs, so no mode of torch sees it."""

    def __init__(self, generators: RankGenerators) -> None:
        self._generators, self._start = generators, dict(generators._states)
        self._outside: list[tuple[dict[int, dict[str, Tensor]], bool]] = []

    def __enter__(self) -> None:
        generators = self._generators
        self._outside.append((generators._states, generators._replaying))
        generators._states, generators._replaying = dict(self._start), True

    def __exit__(self, *_: object) -> None:
        self._generators._states, self._generators._replaying = self._outside.pop()


class _Replayed:
    def __init__(self, generators: RankGenerators, function: Callable[..., Any]) -> None:
        self._generators, self._function = generators, function
        self._replay: _Replay | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._replay is None:
            self._replay = _Replay(self._generators)
            return self._function(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "rng: a replayed function was called again outside a backward pass, where it would draw the numbers of "
                "its first call; make a new one, group.generators.replayed(function), for each call of checkpoint"
            )
        with self._replay:
            return self._function(*args, **kwargs)
