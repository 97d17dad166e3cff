"""Gradient reduction of DistributedDataParallel and FSDP2 in rank order, with fp32 accumulation.

Torch's own reductions leave the order of additions to NCCL or gloo, which depends on the number of processes, the
message size and the algorithm, and they add in the dtype on the wire. These hooks give the bits of
:mod:`shardsum.core.reference` instead: those that R virtual ranks in one process give. Here every process is one
virtual rank (R = G).

DDP::

    model = DistributedDataParallel(module)
    model.register_comm_hook(HookState(ShardGroup(), wire_dtype=torch.bfloat16), ddp_comm_hook)

FSDP2 (the two set_ calls make it pass plain sums; the average is ``scale``)::

    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
            m.set_custom_reduce_scatter(reduce_scatter)      # one FSDPReduceScatter(scale=1 / world_size) for all
"""

# No postponed annotations here: DDP looks at those of a hook.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.numerics import check_op
from ..core.words import Op
from ..group.plan import Plan
from .shard_group import ShardGroup

_WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class HookState:
    """What :func:`ddp_comm_hook` needs.

    Args:
        group: the processes that DDP averages over, each hosting one virtual rank.
        wire_dtype: gradients travel in this dtype but are added in fp32: each is rounded to it once before, and the
            result once after. A bfloat16 wire moves half the bytes of a float32 one. None sends gradients as they are.
        scale: the sum is multiplied by this number. None averages: the sum is divided by R.

    Raises:
        ValueError: a process hosts several virtual ranks; an unsuitable ``wire_dtype`` or ``scale``.
    """

    group: ShardGroup
    wire_dtype: torch.dtype | None = None
    scale: float | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[tuple[int, torch.dtype], Plan] = field(default_factory=dict, init=False, repr=False)

    def plan(self, size: int, dtype: torch.dtype) -> Plan:
        """The reduction of buckets of ``size`` elements. Collective where they are the first of their size."""
        if (size, dtype) not in self._plans:
            lengths = [size] * self.group.num_virtual_ranks
            op: Op = "mean" if self.scale is None else "sum"
            self._plans[size, dtype] = self.group.plan(
                "all_reduce", lengths, size=size, dtype=dtype, op=op, scale=self.scale
            )
        return self._plans[size, dtype]

    def __post_init__(self) -> None:
        _check_one_rank_per_process(self.group)
        check_op("sum", self.scale, torch.float32)
        if self.wire_dtype not in (None, *_WIRE_DTYPES):
            raise ValueError(f"wire_dtype: {self.wire_dtype} is none of {', '.join(map(str, _WIRE_DTYPES))}")


def ddp_comm_hook(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``: the average (or scaled sum) of a bucket in rank order.

    Processes that have joined (``model.join()``) contribute zeros, and the average still divides by all R. On a GPU
    the work is enqueued on a stream of its own, beside the rest of the backward pass.
    """
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        future: Future[Tensor] = Future()
        future.set_result(_reduce(state, buffer))
        return future
    if buffer.device not in state._streams:
        state._streams[buffer.device] = torch.cuda.Stream(buffer.device)
    stream = state._streams[buffer.device]
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        buffer.record_stream(stream)
        future = Future(devices=[buffer.device])
        future.set_result(_reduce(state, buffer))  # records an event on this stream; DDP waits for it
    return future


def _reduce(state: HookState, buffer: Tensor) -> Tensor:
    wire = buffer if state.wire_dtype is None else buffer.to(state.wire_dtype)
    return state.plan(wire.numel(), wire.dtype)(wire).to(buffer.dtype)


class FSDPReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``: the sum over processes in rank order, each keeping its own part.

    One object serves all modules of a model, whatever groups they are sharded over: it makes a ShardGroup for each
    process group it meets, at the first call, which is collective (every process of the group takes part in it).
    Gradients are added in fp32 and rounded once to FSDP's reduce dtype (``MixedPrecisionPolicy.reduce_dtype``). With
    HSDP the all-reduce over the replicating axis stays torch's own.

    Args:
        scale: factor of the sum, e.g. ``1 / world_size`` for the average. None is the plain sum.
        options: passed on to ``ShardGroup(group=..., **options)`` (``transport``, ``timeout``, ...).
    """

    def __init__(self, scale: float | None = None, **options: Any) -> None:
        self.scale = check_op("sum", scale, torch.float32)
        self._options = options
        self._groups: dict[dist.ProcessGroup, ShardGroup] = {}
        self._plans: dict[Any, Plan] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffers that FSDP fills and reads: plain tensors."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """``output_tensor (n,)`` = part ``rank`` of the sum of every process's ``input_tensor (world_size * n,)``.

        The work is enqueued on the current stream (FSDP makes that its reduce-scatter stream).

        Raises:
            ValueError: ``op`` is not SUM, or ``async_op`` is set.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"FSDPReduceScatter adds and does not average, but FSDP asks for {_op_name(op)}: call "
                "set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True) on every FSDPModule, "
                "and give FSDPReduceScatter the scale instead"
            )
        if async_op:
            raise ValueError("async_op: FSDPReduceScatter enqueues its work on the current stream; pass False")
        key = group, input_tensor.numel(), input_tensor.dtype, output_tensor.dtype
        if key not in self._plans:
            self._plans[key] = self._make_plan(group, input_tensor, output_tensor)
        self._plans[key](input_tensor, out=output_tensor)

    def _make_plan(self, group: dist.ProcessGroup, source: Tensor, part: Tensor) -> Plan:
        shards, size = self._group(group, source.device), source.numel()
        ranks = shards.world_size
        return shards.plan(
            "reduce_scatter", [size] * ranks, size=size, splits=[part.numel()] * ranks, dtype=source.dtype,
            out_dtype=part.dtype, scale=self.scale,
        )  # fmt: skip

    def _group(self, group: dist.ProcessGroup, device: torch.device) -> ShardGroup:
        if group not in self._groups:
            self._groups[group] = ShardGroup(group=group, device=device, **self._options)
        return self._groups[group]


def _check_one_rank_per_process(group: ShardGroup) -> None:
    if group.num_virtual_ranks != group.world_size:
        raise ValueError(
            f"group: {group.num_virtual_ranks} virtual ranks on {group.world_size} processes; a gradient hook needs "
            "one for each process (ShardGroup(group=...) without num_virtual_ranks)"
        )


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]
