"""Ragged sharded reductions for sequence-parallel training: the same bits on any number of processes."""

from . import hooks
from .attention import context_parallel_attention
from .bits import first_difference
from .group import ShardGroup
from .nn import MaskedSum
from .ops import masked_sum, ragged_sum

__all__ = [
    "MaskedSum",
    "ShardGroup",
    "context_parallel_attention",
    "first_difference",
    "hooks",
    "masked_sum",
    "ragged_sum",
]
__version__ = "0.1.0"
