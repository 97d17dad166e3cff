"""Values and comparisons that the tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardsum import ShardGroup
from shardsum.core import bits

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint32]
B0_LENGTHS, B0_SUM = [3, 6, 0, 1], [70, 32, 34, 23, 24, 25]


def b0(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The base case: R = 4, S_MAX = 6, x[r, j] = 10 (r + 1) + j."""
    return torch.tensor([[10 * (r + 1) + j for j in range(6)] for r in range(4)], dtype=dtype)


def ones(
    group: ShardGroup, rows: int = 2, dtype: torch.dtype = torch.float32, trailing: tuple = ()
) -> list[torch.Tensor]:
    """A shard of ones for each virtual rank that this process hosts."""
    return [torch.ones((rows, *trailing), dtype=dtype) for _ in group.virtual_ranks]


class RaisesOnce(TorchFunctionMode):
    """Raises an error at the ``at``-th of the steps that a mode sees; ``turn`` counts them."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.turn = at, error, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.turn += 1
        if self.turn == self.at:
            raise self.error("by a mode")
        return function(*args, **(kwargs or {}))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, or the first difference."""
    assert bits.equal(actual, expected), bits.first_difference(actual, expected)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values whose sum depends on order and precision: wide exponents, zeros of both signs, NaN and infinities."""
    with torch.device("cpu"):  # whatever the default is: the same values everywhere
        return _random_values(shape, dtype, seed)


def _random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(torch.int64 if dtype == torch.bool else dtype)
        low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, shape, generator=g).to(dtype)
    x = torch.randn(shape, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(-12, 13, shape, generator=g)
    special = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-41, 60000.0], dtype=torch.float64)
    pick = torch.randint(0, 40, shape, generator=g)
    return torch.where(pick < 7, special[pick.clamp(max=6)], x).to(dtype)
