"""Ragged sharded reductions for sequence-parallel training: the same bits on any number of processes."""

from .core import bits
from .core.bits import first_difference
from .local.functional import masked_sum, ragged_sum
from .local.module import MaskedSum
from .training import hooks
from .training.attention import context_parallel_attention
from .training.shard_group import ShardGroup
from .training.show import show

__all__ = [
    "MaskedSum",
    "ShardGroup",
    "bits",
    "context_parallel_attention",
    "first_difference",
    "hooks",
    "masked_sum",
    "ragged_sum",
    "show",
]
__version__ = "0.1.0"
