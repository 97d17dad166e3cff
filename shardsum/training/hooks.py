"""Gradient reduction of DistributedDataParallel and FSDP2 in rank order, with fp32 accumulation.

Torch's own reductions leave the order of additions to NCCL or gloo, which depends on the number of processes, the
message size and the algorithm, and they add in the dtype on the wire. These hooks give the bits of
:mod:`shardsum.core.reference` instead: those that R virtual ranks in one process give. Here every process is one
virtual rank (R = G). FSDP2's is :class:`shardsum.training.fsdp.FSDPReduceScatter`. DDP::

    model = DistributedDataParallel(module)
    model.register_comm_hook(HookState.for_sum_loss(ShardGroup(), wire_dtype=torch.bfloat16), ddp_comm_hook)
    loss, _ = group.token_mean(loss_sum, num_valid)
    loss.backward()

Which state goes with which loss, where each process calls ``backward()`` on its own copy:

=======================================================  ==============================
loss                                                     state
=======================================================  ==============================
``group.token_mean(...)`` (grad="identity", the          ``HookState.for_sum_loss``
default), with or without ``denominator``
``loss_sum / n``, n being the same on all processes      ``HookState.for_sum_loss``
``group.token_mean(..., grad="sum")``                    ``HookState.for_mean_loss``
mean over the process's own batch: the mean of means     ``HookState.for_mean_loss``
``token_mean`` over ranks that share a sequence, and D   ``HookState(scale=1 / D)``
such groups whose means are averaged
=======================================================  ==============================

For ``FSDPReduceScatter`` the same: ``scale=None`` adds (for_sum_loss), ``scale=1 / world_size`` averages.

Loss scaling (fp16): an overflow on one process is inf or NaN in the sum that all get, so all of them skip the step and
keep equal scales. A norm is computed from the reduced gradients, which are the same bits everywhere.
"""

# No postponed annotations here: DDP looks at those of a hook.
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..core.numerics import check_op
from ..core.words import Op
from . import block_wire
from .block_wire import BlockScaledAllReduce
from .fsdp import FSDPReduceScatter, check_wire_dtype
from .replicas import LOW
from .shard_group import ShardGroup

__all__ = ["FSDPReduceScatter", "HookState", "ddp_comm_hook"]

_Reduction = Callable[[Tensor], Tensor]


@dataclass
class HookState:
    """What :func:`ddp_comm_hook` needs. Made by :meth:`for_sum_loss` or :meth:`for_mean_loss`.

    Args:
        group: the processes that DDP reduces over, each hosting one virtual rank.
        wire_dtype: gradients travel in this dtype but are added in fp32: each is rounded to it once before, and the
            result once after. A bfloat16 wire moves half the bytes of a float32 one. torch.float8_e4m3fn has a scale
            for every 128 elements, and a bfloat16 result (:mod:`shardsum.training.block_wire` has its error). None
            sends gradients as they are.
        scale: the sum is multiplied by this number. None averages: the sum is divided by R. It must fit the loss (the
            module has the table), so it has no default.

    Raises:
        ValueError: a process hosts several virtual ranks; an unsuitable ``wire_dtype`` or ``scale``.
    """

    group: ShardGroup
    wire_dtype: torch.dtype | None = None
    scale: float | None = field(kw_only=True)
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = field(default_factory=dict, init=False, repr=False)
    #: Gradients of micro-batches, fp32, until the next reduction.
    _totals: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _accumulating: bool = field(default=False, init=False, repr=False)

    @classmethod
    def for_sum_loss(cls, group: ShardGroup, *, wire_dtype: torch.dtype | None = None) -> "HookState":
        """Gradients are added: each process's backward gives its part of the gradient of one common loss."""
        return cls(group, wire_dtype, scale=1.0)

    @classmethod
    def for_mean_loss(cls, group: ShardGroup, *, wire_dtype: torch.dtype | None = None) -> "HookState":
        """Gradients are averaged, as DDP does: each process has a loss of its own, and their mean is minimised."""
        return cls(group, wire_dtype, scale=None)

    def __post_init__(self) -> None:
        ranks, processes = self.group.num_virtual_ranks, self.group.world_size
        if ranks != processes:
            raise ValueError(
                f"group: {ranks} virtual ranks on {processes} processes; a gradient hook needs one for each process "
                "(ShardGroup(group=...) without num_virtual_ranks)"
            )
        check_op("sum", self.scale, torch.float32)
        check_wire_dtype(self.wire_dtype)

    @contextmanager
    def accumulate(self, model: DistributedDataParallel) -> Iterator[None]:
        """``model.no_sync()`` around forward and backward of a micro-batch, with sums of micro-batches in fp32.

        Gradients of float16 and bfloat16 parameters are taken out of ``.grad``, and enter the reduction of the next
        backward pass outside, unrounded. Every process has the same number of micro-batches.

        Example:
            >>> for batch in window[:-1]:
            ...     with state.accumulate(model):
            ...         loss_of(model, batch).backward()
            >>> loss_of(model, window[-1]).backward()
        """
        with model.no_sync():
            yield
        self._accumulating = True
        for p in model.module.parameters():
            if p.grad is not None and p.dtype in LOW:
                total = self._totals.get(p)
                self._totals[p] = p.grad.float() if total is None else total.add_(p.grad)
                p.grad = None

    def plan(self, size: int, dtype: torch.dtype) -> _Reduction:
        """The reduction of buckets of ``size`` elements. Collective where they are the first of their size."""
        key = size, dtype, self.scale, self.wire_dtype  # they may be set anew between steps
        if key not in self._plans:
            lengths = [size] * self.group.num_virtual_ranks
            op: Op = "mean" if self.scale is None else "sum"
            if self.wire_dtype == block_wire.DTYPE:
                self._plans[key] = BlockScaledAllReduce(self.group, size, op=op, scale=self.scale)
            else:
                self._plans[key] = self.group.plan(
                    "all_reduce", lengths, size=size, dtype=dtype, op=op, scale=self.scale
                )
        return self._plans[key]

    def reduce(self, bucket: dist.GradBucket) -> Tensor:
        """The reduced bucket, with the gradients of micro-batches before."""
        buffer = rows = bucket.buffer()
        if self._accumulating and buffer.dtype in LOW:
            rows = buffer.float()
            for p, grad in zip(bucket.parameters(), bucket.gradients()):
                total = self._totals.pop(p, None)
                if total is not None:
                    offset = grad.storage_offset() - buffer.storage_offset()
                    rows.as_strided(grad.shape, grad.stride(), offset).add_(total)
                    if total.is_cuda:  # made on another stream
                        total.record_stream(torch.cuda.current_stream(total.device))
        if bucket.is_last():
            self._accumulating = False
        as_they_are = self.wire_dtype in (None, block_wire.DTYPE)
        wire = rows if as_they_are else rows.to(self.wire_dtype)
        return self.plan(wire.numel(), wire.dtype)(wire).to(buffer.dtype)


def ddp_comm_hook(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``: the average (or scaled sum) of a bucket in rank order.

    Processes that have joined (``model.join()``) contribute zeros, and the average still divides by all R. On a GPU
    the work is enqueued on a stream of its own, beside the rest of the backward pass.
    """
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        future: Future[Tensor] = Future()
        future.set_result(state.reduce(bucket))
        return future
    if buffer.device not in state._streams:
        state._streams[buffer.device] = torch.cuda.Stream(buffer.device)
    stream = state._streams[buffer.device]
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        buffer.record_stream(stream)
        future = Future(devices=[buffer.device])
        future.set_result(state.reduce(bucket))  # records an event on this stream; DDP waits for it
    return future
