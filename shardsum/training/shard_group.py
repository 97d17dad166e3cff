"""ShardGroup, what users construct: the collectives of a group, and what a training step needs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..group.group import CollectiveGroup
from . import checkpointing, lockstep
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

    def lockstep(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function a hosted virtual rank side by side, so that the collective calls inside them meet.

        For forwards of models that call attention with one virtual rank's tensors (:mod:`shardsum.training.lockstep`
        says what meets). Where a process hosts one virtual rank, its function is simply called.

        Args:
            functions: a callable without arguments for every hosted virtual rank, in increasing order. It runs with the
                rank's random streams (:meth:`rng`; do not open that inside).

        Returns:
            The functions' results, in order. Run the backward afterwards, from all of them together.

        Raises:
            ValueError: a function returned, or made another call, while others wait; names virtual ranks and calls.
            ImportError: several virtual ranks are hosted here, and the package greenlet is missing.

        Example:
            >>> replicas = group.replicas(model)
            >>> outs = group.lockstep([partial(replica, x) for replica, x in zip(replicas, chunks)])
        """
        return lockstep.run(self, functions)

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """``torch.utils.checkpoint.checkpoint`` for layers that make collective calls; the same arguments.

        In a lockstep the hosted virtual ranks' layers share one checkpoint and are recomputed together; outside it is
        torch's own. ``use_reentrant=True`` is a ValueError.
        """
        return checkpointing.checkpoint(self, function, *args, use_reentrant=use_reentrant, **kwargs)

    @property
    def generators(self) -> RankGenerators:
        """The random streams of the hosted virtual ranks, from seed 0 until ``generators.manual_seed(seed)``."""
        if self._generators is None:
            self._generators = RankGenerators(self.virtual_ranks, self.device)
        return self._generators

    def rng(self, virtual_rank: int) -> AbstractContextManager[None]:
        """A context in which the default generators (the CPU's and that of ``device``) have a virtual rank's state."""
        return self.generators.context(virtual_rank)
