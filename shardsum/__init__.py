"""Ragged sharded reductions for sequence-parallel training: the same bits on any number of processes."""

from .bits import first_difference

__all__ = ["first_difference"]
__version__ = "0.1.0"
