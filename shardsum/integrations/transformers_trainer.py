"""Transformers' Trainer on packed documents that the processes of a group share.

    class PackedTrainer(ContextParallelMixin, Trainer): ...

    trainer = PackedTrainer(model, args, train_dataset=..., data_collator=..., shard_group=ShardGroup())

Every process of the group gets the same batches. The mixin cuts them into chunks *before* Trainer counts the labels of
an accumulation window over all processes (``num_items_in_batch``). So the loss, which the model divides by that number,
is each chunk's part of the exact mean. Gradients of DDP are added in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ..training.documents import cu_seqlens_from_position_ids
from ..training.hooks import HookState, ddp_comm_hook
from ..training.shard_group import ShardGroup
from .transformers import apply_cp, model_inputs


class ContextParallelMixin:
    """To be named before ``Trainer`` among the bases.

    Batches are dicts of ``input_ids`` and ``labels`` ``(B, S)`` and, for packed documents, ``position_ids``, as
    ``DataCollatorWithFlattening`` makes them. Training only: evaluation is not cut into chunks.

    Args:
        shard_group: one virtual rank a process. Where training has more processes, each run of consecutive
            ``shard_group.world_size`` of them is a group with batches of its own.

    Raises:
        ValueError: the group, or an argument of the Trainer, does not fit.
    """

    def __init__(self, *args: Any, shard_group: ShardGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options: Any = self.args  # type: ignore[attr-defined]
        size, hosted = shard_group.world_size, shard_group.virtual_ranks
        if len(hosted) != 1:
            raise ValueError(f"shard_group: virtual ranks {list(hosted)} are on one process, expected one a process")
        first = options.process_index // size * size
        ranks = dist.get_process_group_ranks(shard_group.group) if shard_group.group is not None else [first]
        if ranks != list(range(first, first + size)) or options.world_size % size:
            raise ValueError(f"shard_group: processes {ranks} of {options.world_size} are no run of consecutive ones")
        if not options.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices: False; the loss needs the labels of all processes")
        self._shard_group = shard_group
        self._hook: HookState | None = None
        if options.world_size > 1:
            every = shard_group if size == options.world_size else ShardGroup(device=shard_group.device)
            self._hook = HookState.for_mean_loss(every)  # Trainer multiplies the loss by the number of processes
        apply_cp(self.model, shard_group)  # type: ignore[attr-defined]

    def chunk_lengths(self, cu_seqlens: Sequence[int]) -> list[int]:
        """How many positions each virtual rank takes; override it for others than even work."""
        return self._shard_group.balanced_lengths(cu_seqlens)

    def get_train_dataloader(self) -> DataLoader:
        """Trainer's, whose batches go to groups in place of processes."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        size, sampler = self._shard_group.world_size, loader.batch_sampler
        if self.args.world_size > 1:  # type: ignore[attr-defined]
            if not hasattr(sampler, "process_index") or sampler.split_batches:
                raise ValueError(f"train_dataset: {type(sampler).__name__} cannot give several processes one batch")
            sampler.num_processes, sampler.process_index = sampler.num_processes // size, sampler.process_index // size
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """An accumulation window of chunks, and the number of their targets on all processes."""
        return super().get_batch_samples(map(self._chunk, epoch_iterator), num_batches, device)  # type: ignore[misc]

    def _chunk(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        if mask is not None and not mask.all():
            raise ValueError("attention_mask: padded batches; pack them (DataCollatorWithFlattening)")
        positions = batch.get("position_ids", torch.arange(ids.shape[1], device=ids.device)[None]).expand_as(ids)
        borders = cu_seqlens_from_position_ids(positions)
        plan = self._shard_group.context_parallel(self.chunk_lengths(borders), borders)
        (kwargs,) = model_inputs(plan, ids.reshape(1, -1), labels.reshape(1, -1))
        del kwargs["num_items_in_batch"]
        return kwargs

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's; before the first one DDP is told to add gradients in rank order."""
        if self._hook is not None and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self._hook, ddp_comm_hook)
            self._hook = None
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]
