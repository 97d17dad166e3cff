"""torch's own all_reduce over symmetric memory (torch.ops.symm_mem), as baselines, and the rate of loads from a peer.

Both sum in bf16, rounding at every addition. One-shot reads a buffer that peers map, into another tensor, and with
"copy" it first copies the input there; two-shot works in place on such a buffer. NVLink multicast is not used.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch import Tensor

from .jobs import Variant
from .timing import Processes, sampler


class Symmetric:
    """Two buffers of ``num_bytes`` that all processes map.

    Raises:
        RuntimeError: there is no symmetric memory here.
    """

    def __init__(self, num_bytes: int, device: torch.device, processes: Processes) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        if device.type != "cuda":
            raise RuntimeError("symmetric memory needs GPUs")
        self.processes, self.device, self.num_bytes = processes, device, num_bytes
        world = dist.group.WORLD
        assert world is not None
        self.name, self.world_size = world.group_name, dist.get_world_size()
        self.shared, self.work = (
            symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).zero_() for _ in range(2)
        )
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.shared, world)
        symmetric.rendezvous(self.work, world)

    def load_rate(self) -> float:
        """GB/s that an elementwise kernel reads from the next process while that is done to this one."""
        count = self.num_bytes // 4
        peer = self.handle.get_buffer((dist.get_rank() + 1) % self.world_size, (count,), torch.int32)
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        sample = sampler(lambda: torch.bitwise_not(peer, out=out), device="cuda", processes=self.processes)
        return count * 4 / statistics.median(sample() for _ in range(7)) / 1e9

    def variants(self, padded: Tensor, want: Tensor, tolerance: Tensor) -> list[Variant]:
        """all_reduce of a padded bf16 buffer. Collective: fills the shared buffer."""
        ops, name, flat = torch.ops.symm_mem, self.name, padded.view(-1)
        shared, work, out = self.shared[: flat.numel()], self.work[: flat.numel()], torch.full_like(flat, float("nan"))
        others, num_bytes = self.world_size - 1, flat.nbytes
        self._fill(shared, flat)

        def one_shot() -> Tensor:
            return ops.one_shot_all_reduce_out(shared, "sum", name, out).view_as(want)

        def one_shot_copy() -> Tensor:
            return ops.one_shot_all_reduce_copy_out(shared, flat, "sum", name, out).view_as(want)

        def two_shot_once() -> Tensor:
            self._fill(work, flat)
            return ops.two_shot_all_reduce_(work, "sum", name).clone().view_as(want)

        def two_shot() -> Tensor:
            return ops.two_shot_all_reduce_(work, "sum", name)

        once, ring = ((n, n * self.world_size) for n in (others * num_bytes, 2 * others * num_bytes // self.world_size))
        return [
            Variant("symm one-shot", [one_shot], want, tolerance, wire_bytes=once),
            Variant("symm one-shot, copy", [one_shot_copy], want, tolerance, wire_bytes=once),
            Variant("symm two-shot, in place", [two_shot], want, tolerance, once=two_shot_once, wire_bytes=ring),
        ]

    def _fill(self, buffer: Tensor, values: Tensor) -> None:
        """While no peer reads it."""
        torch.cuda.synchronize()
        self.processes.slowest(0)
        buffer.copy_(values)
        torch.cuda.synchronize()
        self.processes.slowest(0)
