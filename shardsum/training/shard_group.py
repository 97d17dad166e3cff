"""ShardGroup, what users construct: the collectives of a group, and what a training step needs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..core.words import Grad
from ..group.group import CollectiveGroup
from ..group.plan import Plan
from . import checkpointing, lockstep, losses
from .context import ContextBatch
from .context_balance import POSITION_COST, balanced_lengths
from .context_plan import SequencePlan
from .generators import RankGenerators
from .gradients import reduce_gradients
from .replicas import M, Replicas


class ShardGroup(CollectiveGroup):
    __doc__ = CollectiveGroup.__doc__

    _generators: RankGenerators | None = None

    #: What :func:`shardsum.context_parallel_attention` asked for last, and the plans of that (not the batch: it holds
    #: this group).
    last_sequence: tuple[str, SequencePlan, dict[Any, Plan]] | None = None

    def context_parallel(
        self,
        lengths: Sequence[int] | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = True,
        window: Sequence[int] | None = None,
        *,
        recompute_exchange: bool | None = None,
    ) -> ContextBatch:
        """The plan of one batch of packed documents whose positions are spread over the R virtual ranks. Every process
        passes the same; nothing is sent.

        Args:
            lengths: R chunk lengths, in virtual-rank order; they may be 0. None: even ones
                (:meth:`balanced_lengths` evens out the work instead).
            cu_seqlens: borders of the documents, ``[0, ..., sum(lengths)]``: ints or an integer tensor on the CPU
                (:func:`shardsum.training.documents.cu_seqlens_from_position_ids`). None: one document.
            causal: a query sees its own and earlier positions of its document only.
            window: ``(left, right)``: how many positions to each side a query sees, -1 for no limit.
            recompute_exchange: do not keep K and V of other chunks for backward but send them again. None: where they
                are more than half of what a process holds itself. (Compiled code always sends them again.)

        Raises:
            ValueError: a negative length, or bad borders or a bad window.

        Example:
            >>> cp = ShardGroup(2).context_parallel([3, 2], [0, 4, 5])
            >>> cp.split(torch.arange(5)), cp.positions
            ([tensor([0, 1, 2]), tensor([3, 4])], [tensor([0, 1, 2]), tensor([3, 0])])
            >>> y = cp.attention(*([torch.randn(n, 8, 64) for n in (3, 2)] for _ in range(3)))
        """
        try:
            plan = SequencePlan(
                self.owners, self.rank, self.device, lengths, cu_seqlens, causal, window, recompute_exchange
            )
        except ValueError as error:
            raise self.refuse("context_parallel", error) from error
        return ContextBatch(self, plan)

    def balanced_lengths(
        self,
        cu_seqlens: Sequence[int] | Tensor,
        *,
        causal: bool = True,
        window: Sequence[int] | None = None,
        position_cost: float = POSITION_COST,
    ) -> list[int]:
        """R chunk lengths with which all processes have equal work in attention and the rest of a layer
        (:func:`shardsum.training.context_balance.balanced_lengths`)."""
        return balanced_lengths(self.owners, cu_seqlens, causal=causal, window=window, position_cost=position_cost)

    def token_mean(
        self,
        loss_sum: losses.Scalars,
        num_valid: losses.Scalars,
        *,
        denominator: Tensor | float | None = None,
        grad: Grad = "identity",
    ) -> tuple[Tensor, Tensor]:
        """The mean loss over all valid tokens of all virtual ranks, without synchronisation.

        :mod:`shardsum.training.losses` has recipes: gradient accumulation, weighted tokens, auxiliary losses.

        Args:
            loss_sum: 0-dim floating Tensor per hosted virtual rank: the sum of its tokens' losses. Or sums of any one
                shape, for the mean of each.
            num_valid: 0-dim integer Tensor (or int) per hosted virtual rank: how many tokens that was. Floating where
                tokens are weighted: the sum of weights. Or of loss_sum's shape. Where it is 0, loss_sum is ignored.
            denominator: divide by this number (int, float, or Tensor of one element; the same on every process) and
                not by the sum of num_valid.
            grad: as of :meth:`all_reduce`; each token's gradient is 1 / (all valid tokens) with "identity".

        Returns:
            ``(mean, count)``: float32, and the sum of num_valid (int64; float32 of weights), both 0-dim (or of the
            given shapes); mean 0 where the divisor is 0.

        Raises:
            ValueError: an argument has another type or shape; names the virtual rank.
        """
        return losses.token_mean(self, loss_sum, num_valid, denominator=denominator, grad=grad)

    def replicas(self, module: M) -> Replicas[M]:
        """Per hosted virtual rank, ``module`` with parameters of its own gradient and shared storage
        (:class:`shardsum.training.replicas.Replicas`)."""
        return Replicas(self, module)

    def reduce_gradients(self, replicas: Replicas[M], *, scale: float | None = None, accumulate: bool = False) -> None:
        """Sum the replicas' gradients over all virtual ranks in rank order into the module's parameters, or add that
        to what they hold (:func:`shardsum.training.gradients.reduce_gradients`)."""
        reduce_gradients(self, replicas, scale=scale, accumulate=accumulate)

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
            >>> group = ShardGroup(2)
            >>> replicas = group.replicas(torch.nn.Linear(4, 1))
            >>> chunks = [torch.ones(3, 4), torch.ones(5, 4)]
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
