"""One random stream per virtual rank, so that dropout does not depend on which process computes what.

``nn.Dropout`` and the other random operators take no generator: they draw from the default one. Around virtual rank
v's work the default generators (the CPU's, and that of the group's device) are therefore switched to v's state and
switched back afterwards. The stream of v is a function of (seed, v) and of what v has drawn, never of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
            self._states[v] = self._get()
            self._set(outside)
            self._active.discard(v)

    def mark(self) -> dict[int, dict[str, Tensor]]:
        """Where the streams are now, for :meth:`back_to`. No operator runs, so no mode of torch sees it."""
        return dict(self._states)

    def back_to(self, mark: Mapping[int, dict[str, Tensor]]) -> None:
        """Go on from where the streams were at a :meth:`mark`."""
        self._states = dict(mark)  # states are replaced, never written to

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
