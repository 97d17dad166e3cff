"""What context_gradients.py measures: a case (documents, chunks, inputs, exact gradients) and the ways to run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from context_ways import BF16, Gather, Kernels, Layer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardsum.core import bits, reference
from shardsum.core.layout import ExchangePlan, owners_of
from shardsum.tools.bench.cases import packed_borders
from shardsum.training.context_chunks import Chunk, plan_chunks

SEED = 14  # of the documents: of the draws that share_of_padded compares, one close to the mean in every case


def share_of_padded(size: int, mean: int, world_size: int, placement: str, seeds: range) -> list[float]:
    """For each draw of the documents, the rows that the adjoint sends over those of a ring; pure arithmetic."""
    ranks, shares = world_size * (2 if placement == "zigzag" else 1), []
    owners = owners_of(ranks, world_size, placement)
    for seed in seeds:
        plans = plan_chunks([size // ranks] * ranks, packed_borders(size, mean, seed))
        keys, chunks = tuple(p.needed for p in plans), tuple(p.owned for p in plans)
        plan = ExchangePlan(keys, owners, chunks, owners, world_size)
        shares.append(sum(map(plan.egress, range(world_size))) / (size * (world_size - 1)))
    return shares


class Case(Layer):
    """A layer of as many key heads as heads, and what is right for it.

    Gradients of keys and values go together, ``(rows, heads, 2 head_dim)``, as keys and values do.
    """

    def __init__(self, device: torch.device, borders: list[int], heads: int, head_dim: int, placement: str) -> None:
        super().__init__(device, borders, dist.get_world_size(), placement, heads, heads, head_dim)
        self.hosted, self.everyone, self.chunks = self.group.virtual_ranks, self.cp.plan.everyone, self.cp.chunks
        self.placement = placement
        for x in [x for xs in self.inputs for x in xs]:
            x.requires_grad_()
        self.qs, self.ks, self.vs = self.inputs
        self.kv = self.whole([torch.cat(pair, -1) for pair in zip(self.ks, self.vs)])

    def whole(self, chunks: Sequence[Tensor]) -> Tensor:
        """All rows, from the hosted chunks."""
        hosted = [x.detach() for x in chunks]
        return self.cp.gather(hosted if len(hosted) > 1 else hosted[0])

    def own(self, whole: Tensor) -> list[Tensor]:
        """The hosted chunks of a tensor of S rows."""
        return [whole[slice(*chunk.owned)] for chunk in self.chunks]

    def attend(self, kvs: Sequence[Tensor]) -> list[Tensor]:
        """Each hosted chunk against the keys and values it needs."""
        parts = zip(self.chunks, self.qs, kvs)
        return [Kernels.apply(chunk, None, q, *kv.chunk(2, -1)) for chunk, q, kv in parts]

    def gradients(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Of the hosted chunks' keys and values; those of the queries are computed, too."""
        n = len(self.hosted)
        grads = torch.autograd.grad(outs, [*self.qs, *self.ks, *self.vs], self.gs)
        return [torch.cat(pair, -1) for pair in zip(grads[n : 2 * n], grads[2 * n :])]

    def partials(self) -> list[Tensor]:
        """The gradients of what each hosted chunk needs, as its attention gives them: the input of the reduction."""
        kvs = [self.kv[slice(*chunk.needed)].clone().requires_grad_() for chunk in self.chunks]
        return list(torch.autograd.grad(self.attend(kvs), kvs, self.gs))

    # What is right

    def exact_gradients(self) -> list[Tensor]:
        """By attention in float64, each process its own queries."""
        total = torch.zeros(self.kv.shape, dtype=torch.float64, device=self.device)
        for chunk, q, g in zip(self.chunks, self.qs, self.gs):
            for rows, keys in query_blocks(chunk, 256):
                kv = self.kv[slice(*keys)].double().requires_grad_()
                out = plain_attention(q[rows].detach().double(), *kv.chunk(2, -1))
                total[slice(*keys)] += torch.autograd.grad(out, kv, g[rows].double())[0]
        dist.all_reduce(total)
        return self.own(total)

    def exact_sum(self, partials: Sequence[Tensor]) -> list[Tensor]:
        """The partial gradients added in float64."""
        total = torch.zeros(self.kv.shape, dtype=torch.float64, device=self.device)
        for chunk, part in zip(self.chunks, partials):
            total[slice(*chunk.needed)] += part.double()
        dist.all_reduce(total)
        return self.own(total)

    def reference_sum(self, partials: Sequence[Tensor]) -> list[Tensor]:
        """The partial gradients added by the definition."""
        everyone = []
        for r, chunk in enumerate(self.everyone):
            own = r in self.hosted
            row = partials[self.hosted.index(r)] if own else self.kv.new_empty(chunk.keys, *self.kv.shape[1:])
            dist.broadcast(row, self.group.owners[r])
            everyone.append(row)
        wanted = [chunk.owned for chunk in self.chunks]
        return reference.exchange(everyone, self.cp.plan.needed, wanted, out_dtype=BF16)


def query_blocks(plan: Chunk, most: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Rows of a chunk's queries and the global interval of the keys that the last of them sees, block by block."""
    row, key = 0, plan.needed[0]
    for queries, keys in plan.segments:
        for begin in range(0, queries, most):
            end = min(begin + most, queries)
            yield slice(row + begin, row + end), (key, key + keys - queries + end)
        row, key = row + queries, key + keys


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by its definition; the last query sees the last key."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(scores.shape[2] - scores.shape[1])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


class Shardsum:
    """The adjoint of the exchange that brings K and V."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def reduce(self, partials: Sequence[Tensor]) -> list[Tensor]:
        plan = self.case.cp.plan
        return self.case.group.exchange(list(partials), plan.needed, plan.owned, size=plan.size)

    def step(self) -> list[Tensor]:
        return self.case.gradients(self.case.one_call(*self.case.inputs))

    def verified(self, partials: Sequence[Tensor]) -> tuple[str, int, int]:
        """Make sure of the bits of both (attention must repeat its own for that: deterministic algorithms).

        Returns:
            The name of the transport; bytes of all processes; bytes of the busiest one.
        """
        expected = self.case.reference_sum(partials)
        reduced, stats = self.reduce(partials), self.case.group.stats()
        for found in (reduced, self.step()):
            for a, b in zip(found, expected):
                assert bits.equal(a, b), bits.first_difference(a, b)
        if stats.route.transport != "peer":  # whose kernel reads, and hands no bytes to a backend
            assert stats.sent == stats.route.egress[self.case.group.rank]
        return stats.route.transport, stats.total, stats.route.busiest


class Padded:
    """Add the hosted partial gradients into a buffer of zeros with S rows, and reduce-scatter that."""

    def __init__(self, case: Case, dtype: torch.dtype, by_hand: bool = False) -> None:
        self.case, self.reduce = case, partial(case.user.reduce_scatter, dtype=dtype, by_hand=by_hand)
        world_size = dist.get_world_size()
        #: Bytes that each process of a ring sends.
        self.sent = case.kv.numel() * dtype.itemsize * (world_size - 1) // world_size

    def step(self) -> list[Tensor]:
        case = self.case
        kvs = [torch.cat(pair, -1) for pair in zip(case.ks, case.vs)]
        return case.gradients(case.attend(Gather.apply(case.user, self.reduce, *kvs)))


class TorchContextParallel:
    """One causal sequence by torch's ring attention on the same chunks; usable inside ``with`` only, where it replaces
    scaled_dot_product_attention for everybody.

    Raises:
        NotImplementedError: at the first step, on a device whose attention it does not know.
    """

    def __init__(self, case: Case) -> None:
        from torch.distributed.tensor.experimental import _attention, context_parallel

        mesh = init_device_mesh(case.device.type, (dist.get_world_size(),))
        # The only way to ask for contiguous chunks; its "load balance" is the zigzag of two chunks a process.
        _attention._cp_options.enable_load_balance = case.placement == "zigzag"
        q = case.whole(case.qs)
        # Its buffers are whole, (1, heads, S, head_dim), and cut in place.
        self.inputs = [x.transpose(0, 1)[None].contiguous() for x in (q, *case.kv.chunk(2, -1))]
        self.grad = torch.cat(case.gs).transpose(0, 1)[None].contiguous()
        options: dict[str, Any] = {"buffer_seq_dims": [2] * 3, "no_restore_buffers": set(self.inputs)}
        self.context = context_parallel(mesh, buffers=self.inputs, **options)
        self.on_gpu = case.device.type == "cuda"

    def __enter__(self) -> TorchContextParallel:
        self.context.__enter__()
        for x in self.inputs:
            x.requires_grad_()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def step(self) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.on_gpu else nullcontext():  # the kernel of the others
            out = torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=True)
        grads = torch.autograd.grad(out, self.inputs, self.grad)[1:]
        return [torch.cat([g[0].transpose(0, 1) for g in grads], -1)]

    def sent(self) -> int:
        """Bytes of gradients that this process sends in a step."""
        with _CountSent() as counter:
            self.step()
        return counter.sent


class _CountSent(TorchDispatchMode):
    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let it become operators on plain tensors first
        if "c10d_functional.all_to_all_single" in str(func):  # its ring of gradients; K and V go by all_gather
            self.sent += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))
