"""ShardGroup, what users construct: the collectives of a group, and what a training step needs beside them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..group.group import CollectiveGroup
from .generators import RankGenerators
from .replicas import M, Replicas, make_replicas, reduce_gradients


class ShardGroup(CollectiveGroup):
    __doc__ = CollectiveGroup.__doc__

    _generators: RankGenerators | None = None

    def replicas(self, module: M) -> Replicas[M]:
        """Per hosted virtual rank, ``module`` with parameters of its own gradient and shared storage
        (:func:`shardsum.training.replicas.make_replicas`)."""
        return make_replicas(self, module)

    def reduce_gradients(self, replicas: Replicas[M], *, scale: float | None = None) -> None:
        """Sum the replicas' gradients over all virtual ranks in rank order into the module's parameters
        (:func:`shardsum.training.replicas.reduce_gradients`)."""
        reduce_gradients(self, replicas, scale=scale)

    @property
    def generators(self) -> RankGenerators:
        """The random streams of the hosted virtual ranks, from seed 0 until ``generators.manual_seed(seed)``."""
        if self._generators is None:
            self._generators = RankGenerators(self.virtual_ranks, self.device)
        return self._generators

    def rng(self, virtual_rank: int) -> AbstractContextManager[None]:
        """A context in which the default generators (the CPU's and that of ``device``) have a virtual rank's state."""
        return self.generators.context(virtual_rank)
