"""Gradient reduction of FSDP2 in rank order, with fp32 accumulation.

::

    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    FSDPReduceScatter(scale=1 / world_size).install(model)

HSDP (shards that are replicated): one sum over shards and replicas, in the rank order of ``over``. Replicas then hold
the same bits as long as they start with the same parameters. Either mesh will do::

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(layer, mesh=mesh)           # torch replicates
    fully_shard(layer, mesh=mesh["shard"])  # one all_reduce less
    FSDPReduceScatter(scale=1 / 8, over=dist.group.WORLD).install(model)

With the first, torch's all_reduce over the replicas still runs, since no public interface leaves it out; a hook that
FSDP calls after it replaces its result.

Micro-batches (``set_requires_gradient_sync(False)``) are added by FSDP in its reduce dtype: make that float32.
"""

# No postponed annotations: torch looks at those of collectives.
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.numerics import check_op
from . import block_wire
from .fsdp_modules import ModuleReduction, ReplicatedReduction, UnshardedReduction, allocate, own_parameters
from .shard_group import ShardGroup

_SUMMED = (torch.float16, torch.bfloat16, torch.float32)
WIRE_DTYPES = (*_SUMMED, block_wire.DTYPE)


class FSDPReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``: the sum over processes in rank order, each keeping its own part.

    One object serves all modules of a model, whatever groups they are sharded over: it makes a ShardGroup for each
    process group it meets, at the first call, which is collective (every process of the group takes part in it).
    Gradients are added in fp32 and rounded once to FSDP's reduce dtype (``MixedPrecisionPolicy.reduce_dtype``).

    Args:
        scale: factor of the sum, e.g. ``1 / world_size`` for the average. None is the plain sum.
        wire_dtype: gradients travel in this dtype: each is rounded to it once before the sum. A bfloat16 wire moves
            half the bytes of a float32 one. torch.float8_e4m3fn: a quarter, with a scale for every 128 elements
            (:mod:`shardsum.training.block_wire` has its error). None sends gradients as they are.
        over: the processes whose gradients are added, in this group's rank order: with HSDP those of all replicas.
            None: those that the module is sharded over; where torch replicates it over the rest of the world, all.
        options: passed on to ``ShardGroup(group=..., **options)`` (``transport``, ``timeout``, ...).

    Raises:
        ValueError: an unsuitable ``scale`` or ``wire_dtype``.
    """

    def __init__(
        self,
        scale: float | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        over: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.scale = check_op("sum", scale, torch.float32)
        self.wire_dtype, self.over = wire_dtype, over
        check_wire_dtype(wire_dtype)
        self._options = options
        self._groups: dict[dist.ProcessGroup, ShardGroup] = {}
        self._sums: dict[Any, Callable[..., Any]] = {}

    def install(self, model: nn.Module) -> None:
        """Reduce the gradients of all FSDP modules of ``model`` by this object; errors then name the module.

        Makes FSDP pass plain sums (``set_gradient_divide_factor(1.0)``, ``set_force_sum_reduction_for_comms(True)``),
        and sets its all-reduce hook on modules that it replicates, or shards over a single process.

        Raises:
            ValueError: there is no FSDP module, or torch replicates one and ``over`` does not fit its mesh.
        """
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        found: dict[str, Any] = {n: module for n, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not found:
            raise ValueError(f"model: {type(model).__name__} has no FSDPModule; call fully_shard first")
        reductions: dict[str, ModuleReduction] = {}
        for name in found:
            parameters = own_parameters(model, name, found)
            placed: dict[str, Any] = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
            replicated = [n for n, p in placed.items() if _is_replicated(p)]
            alone = [p.device_mesh.get_group(0) for p in placed.values() if p.device_mesh.size(0) == 1]
            if replicated:
                over = self._over_replicas(replicated[0], placed[replicated[0]].device_mesh)
                reductions[name] = ReplicatedReduction(partial(self, over=over), name, parameters)
            elif alone:
                reductions[name] = UnshardedReduction(self, name, parameters, group=alone[0])
            else:
                reductions[name] = ModuleReduction(self, name, parameters)
        for name, module in found.items():
            reductions[name].install(module)

    def _over_replicas(self, parameter: str, mesh: Any) -> dist.ProcessGroup | None:
        """The group of all processes of a mesh (replicate, shard, ...); ValueError where ``over`` is another one."""
        replicas, shards = mesh.size(0), mesh.size(1)
        what = f"model: parameter {parameter} has {replicas} replicas on its mesh {mesh}"
        if shards == 1:
            raise ValueError(
                f"{what}, of one shard each: there FSDP calls no reduce-scatter; give fully_shard the sharding "
                "dimension of the mesh alone, and FSDPReduceScatter the group of all its processes (over=...)"
            )
        over = self.over
        if over is None and mesh.ndim == 2 and mesh.size() == dist.get_world_size():
            over = dist.group.WORLD
        given = None if over is None else dist.get_world_size(over)
        if given != replicas * shards:
            raise ValueError(
                f"{what}, of {shards} shards each; FSDPReduceScatter needs the group of these {replicas * shards} "
                f"processes (over=...), and has {'none' if given is None else f'one of {given}'}"
            )
        return over

    allocate = staticmethod(allocate)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
        label: str | None = None,
        over: dist.ProcessGroup | None = None,
    ) -> None:
        """``output_tensor (n,)`` = part ``rank`` of the sum of every process's ``input_tensor (world_size * n,)``.

        The work is enqueued on the current stream (FSDP makes that its reduce-scatter stream).

        Args:
            label: calls with different ones never meet.
            over: in place of the object's.

        Raises:
            ValueError: ``op`` is not SUM, or ``async_op`` is set.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"FSDPReduceScatter adds and does not average, but FSDP asks for {_op_name(op)}: call install(model), "
                "or set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True) on every FSDPModule, "
                "and give FSDPReduceScatter the scale instead"
            )
        if async_op:
            raise ValueError("async_op: FSDPReduceScatter enqueues its work on the current stream; pass False")
        blocks = self.wire_dtype == block_wire.DTYPE
        rows, out = input_tensor, output_tensor
        if self.wire_dtype is not None and not blocks:
            rows = rows.to(self.wire_dtype)
        # A sum of narrow values has no float64 result.
        dtype = out.dtype if out.dtype in _SUMMED or self.wire_dtype is None else torch.float32
        over = self.over if over is None else over
        key = group, rows.numel(), rows.dtype, dtype, label, self.scale, self.wire_dtype, over
        if key not in self._sums:
            self._sums[key] = self._make_sum(group, over, rows, out.numel(), dtype, label, blocks)
        if blocks or dtype != out.dtype:
            found = self._sums[key](rows)
            out.copy_(found if isinstance(found, Tensor) else found[0])
        else:
            self._sums[key](rows, out=out)

    def _make_sum(
        self,
        group: dist.ProcessGroup,
        over: dist.ProcessGroup | None,
        rows: Tensor,
        part: int,
        dtype: torch.dtype,
        label: str | None,
        blocks: bool,
    ) -> Callable[..., Any]:
        shards, size = self._group(over or group, rows.device), rows.numel()
        everyone = range(shards.world_size)
        if blocks:
            owners = self._owners(shards, group, over)
            return block_wire.BlockScaledSum(shards, part, owners, scale=self.scale, out_dtype=dtype, name=label)
        common: dict[str, Any] = {"size": size, "dtype": rows.dtype, "out_dtype": dtype, "scale": self.scale}
        if over is None:
            return shards.plan("reduce_scatter", [size for _ in everyone], splits=[part for _ in everyone], name=label,
                               **common)  # fmt: skip
        outs = [(owner * part, (owner + 1) * part) for owner in self._owners(shards, group, over)]
        ins = [(0, size) for _ in everyone]
        return shards.plan("exchange", in_intervals=ins, out_intervals=outs, name=label, **common)

    def _owners(self, shards: ShardGroup, group: dist.ProcessGroup, over: dist.ProcessGroup | None) -> list[int]:
        """Which part of the sum each process keeps."""
        if over is None:
            return list(range(shards.world_size))
        return [owner for (owner,) in shards.gather_ints("reduce_scatter", [dist.get_rank(group)], 1)]

    def _group(self, group: dist.ProcessGroup, device: torch.device) -> ShardGroup:
        if group not in self._groups:
            self._groups[group] = ShardGroup(group=group, device=device, **self._options)
        return self._groups[group]


def _is_replicated(p: Any) -> bool:
    """Whether FSDP replicates a parameter: its dimensions come first, before those of tensor parallelism."""
    first, *others = p.placements
    return bool(first.is_replicate()) and not all(placement.is_replicate() for placement in others)


def check_wire_dtype(wire_dtype: torch.dtype | None) -> None:
    """ValueError for a dtype that gradients cannot travel in."""
    if wire_dtype not in (None, *WIRE_DTYPES):
        raise ValueError(f"wire_dtype: expected one of {', '.join(map(str, WIRE_DTYPES))}, got {wire_dtype}")


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]
