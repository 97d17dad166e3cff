"""``shardsum compare``: the same bits on every backend and transport that runs here.

Every process makes the shards of all R virtual ranks from the seed, so each computes the definition
(:mod:`shardsum.core.reference`) for itself and holds every path against it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..core import bits, layout, reference
from ..core.words import Op, TransportName
from ..local.functional import ragged_sum
from ..native import loader as native
from ..training.shard_group import ShardGroup
from .launcher import gather_texts, launched

_TIMEOUT = 60.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
_Path = Callable[[list[Tensor], Op], Tensor]  # the shards of all R virtual ranks, op -> (size, features)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """One ragged sum."""

    num_virtual_ranks: int = 4
    """How many virtual ranks there are, R."""
    size: int = 20
    """How many positions the sum has, S_MAX."""
    lengths: list[int] | None = None
    """How many positions of each virtual rank are valid: R numbers, as [3,6,0,1]. By default they are uneven, from 0 to
    size."""
    features: int = 96
    """How many features a position of the random shards has."""
    seed: int = 0
    """The seed of the random shards."""
    placement: Literal["contiguous", "zigzag"] = "contiguous"
    """Which process hosts which virtual ranks."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the sums are computed."""

    def __post_init__(self) -> None:
        for name in ("num_virtual_ranks", "features"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.size < 0:
            raise ValueError(f"size: expected 0 or more, got {self.size}")
        if self.lengths is not None and len(self.lengths) != self.num_virtual_ranks:
            raise ValueError(f"lengths: {len(self.lengths)} of them for {self.num_virtual_ranks} virtual ranks")
        for r, n in enumerate(self.lengths or ()):
            if not 0 <= n <= self.size:
                raise ValueError(f"lengths: virtual rank {r} has {n}, not in [0, size = {self.size}]")


def ragged_lengths(num_virtual_ranks: int, size: int) -> list[int]:
    """An example of R uneven lengths between 0 and ``size``, both included, in a mixed order.

    Example:
        >>> ragged_lengths(4, 20)
        [6, 20, 0, 13]
    """
    last = num_virtual_ranks - 1
    order = [*range(1, num_virtual_ranks, 2), *range(0, num_virtual_ranks, 2)]
    return [size * part // last for part in order] if last else [size]


def random_shards(
    lengths: Sequence[int], features: int, seed: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Values over many orders of magnitude, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for n in lengths:
        shape = (n, features)
        values = torch.randn(shape, generator=generator) * torch.exp(6 * torch.randn(shape, generator=generator))
        shards.append(values.to(dtype).to(device))
    return shards


def compare_paths(config: CompareConfig) -> int:
    """Print the reduced row, every path's verdict and the hash; 0 when all are the same bits. Collective."""
    with launched(config.device, _TIMEOUT) as device:
        return _Comparison(config, device).run()


class _Comparison:
    """A ragged sum and its mean, in several dtypes, by every path; the same on every process."""

    def __init__(self, config: CompareConfig, device: torch.device) -> None:
        self.config = config
        self.lengths = config.lengths or ragged_lengths(config.num_virtual_ranks, config.size)
        self.device = device
        self.group = self._group("auto")
        features, seed = config.features, config.seed
        self.inputs = [random_shards(self.lengths, features, seed, dtype, device) for dtype in _DTYPES]
        self.expected = self._results(self._reference)

    def run(self) -> int:
        numbers = [10 * (r + 1) + torch.arange(n, device=self.device) for r, n in enumerate(self.lengths)]
        row = self._all_reduce(self.group, numbers, "sum")
        self._print(f"x[r, j] = 10 (r + 1) + j, lengths {self.lengths}, summed over {len(self.lengths)} virtual ranks:")
        self._print(" ".join(str(value) for value in row.tolist()))
        same = [self._verdict(name, path) for name, path in self._paths()]
        self._print(f"hash {bits.digest(*self.expected)}" if all(same) else "the paths above differ")
        return 0 if all(same) else 1

    def _print(self, line: str) -> None:
        if self.group.rank == 0:
            print(line, flush=True)

    def _paths(self) -> Iterator[tuple[str, _Path | str]]:
        """Names, and what computes them or why it cannot."""
        yield "one process, torch", self._reference
        status = native.status()
        yield "one process, native", self._local if status.backend == "native" else status.reason
        several: tuple[TransportName, ...] = ("gather", "all_to_all", "carry", "peer")
        alone: tuple[TransportName, ...] = ("local",)
        for transport in several if self.group.world_size > 1 else alone:
            try:
                group = self._group(transport)
            except (ValueError, RuntimeError) as error:
                yield transport, str(error)
                continue
            yield f"{transport}, all_reduce", partial(self._all_reduce, group)
            yield f"{transport}, reduce_scatter", partial(self._reduce_scatter, group)

    def _verdict(self, name: str, path: _Path | str) -> bool:
        if isinstance(path, str):
            self._print(f"{name:<28} does not run here: {' '.join(path.split())}")
            return True
        found = self._results(path)
        own = bits.digest(*found)
        same = set(gather_texts(self.group, own)) == {bits.digest(*self.expected)}
        self._print(f"{name:<28} {'the same bits' if same else 'OTHER BITS'}")
        for i, (a, b) in enumerate(zip(found, self.expected)):
            difference = bits.first_difference(a, b)
            if difference is not None:
                print(f"process {self.group.rank}, {name}, result {i}: {difference}", file=sys.stderr)
        return same

    def _results(self, path: _Path) -> list[Tensor]:
        ops: tuple[Op, ...] = ("sum", "mean")
        calls = [(shards, op) for shards in self.inputs for op in ops]
        return [path(shards, op) for shards, op in calls if op == "sum" or shards[0].is_floating_point()]

    def _reference(self, shards: list[Tensor], op: Op) -> Tensor:
        starts = [0] * len(shards)
        return reference.ragged_sum(shards, starts, self.config.size, op=op, out_dtype=shards[0].dtype)

    def _local(self, shards: list[Tensor], op: Op) -> Tensor:
        return ragged_sum(shards, size=self.config.size, op=op)

    def _all_reduce(self, group: ShardGroup, shards: list[Tensor], op: Op) -> Tensor:
        hosted = [shards[v] for v in group.virtual_ranks]
        return group.all_reduce(hosted, self.lengths, size=self.config.size, op=op)

    def _reduce_scatter(self, group: ShardGroup, shards: list[Tensor], op: Op) -> Tensor:
        hosted = [shards[v] for v in group.virtual_ranks]
        parts = group.reduce_scatter(hosted, self.lengths, size=self.config.size, op=op)
        return group.all_gather(parts, layout.split_evenly(self.config.size, group.num_virtual_ranks))

    def _group(self, transport: TransportName) -> ShardGroup:
        return ShardGroup(
            self.config.num_virtual_ranks,
            placement=self.config.placement,
            transport=transport,
            device=self.device,
            timeout=timedelta(seconds=_TIMEOUT),
        )
