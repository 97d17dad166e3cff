"""Gradients as 8-bit blocks with scales: the code, the sum in rank order, and both hooks."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # DDP imports it; here once, not in every forked child
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.training.block_wire import decode, encode, num_words
from shardsum.training.hooks import FSDPReduceScatter, HookState, ddp_comm_hook
from tests.processes import run_processes

FP8 = torch.float8_e4m3fn


def row(rank: int, size: int) -> Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=g) * 2.0 ** torch.randint(-9, 9, (size,), generator=g)


def travelled(x: Tensor) -> Tensor:
    """What a row is after its way, block by block in plain arithmetic."""
    done = []
    for block in x.float().split(128):
        scale = block.abs().max() / 448
        done.append((block / scale).to(FP8).float() * scale)
    return torch.cat(done)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_blocks_hold_scaled_values(size: int) -> None:
    x = row(0, size)
    words = encode(torch.stack([x, -x]))
    assert words.shape == (2, num_words(size)) and words.dtype == torch.int32
    assert words.nbytes == 2 * 132 * -(-size // 128)
    found = decode(words[0], size)
    assert bits.equal(found, travelled(x)) and bits.equal(decode(words[1], size), -found)
    largest = torch.cat([b.abs().max().expand(len(b)) for b in x.split(128)])
    assert ((found - x).abs() <= torch.maximum(x.abs() / 16, largest / 448 * 2**-10) * (1 + 1e-6)).all()


def test_unusual_blocks() -> None:
    x = torch.zeros(5 * 128)
    x[128], x[256], x[384:512], x[512] = float("inf"), float("nan"), 1e-44, 3e38
    found = decode(encode(x[None])[0], 5 * 128).view(5, 128)
    assert (found[0] == 0).all() and found[1].isnan().all() and found[2].isnan().all()
    assert not found[3:].isnan().any() and (found[3] <= 1e-44).all()
    torch.testing.assert_close(found[4, 0], torch.tensor(3e38), rtol=1e-6, atol=0)


SIZE = 1500


def _ddp(rank: int, world_size: int, transport: str) -> Tensor:
    layer = nn.Linear(SIZE, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    group = ShardGroup(transport=transport)
    ddp.register_comm_hook(HookState.for_mean_loss(group, wire_dtype=FP8), ddp_comm_hook)
    ddp(row(rank, SIZE)[None]).sum().backward()
    return layer.weight.grad[0]


@pytest.mark.parametrize("transport", ["auto", "gather"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp(world_size: int, transport: str) -> None:
    rows = [travelled(row(rank, SIZE)) for rank in range(world_size)]
    expected = reference.ragged_sum(rows, [0] * world_size, SIZE, op="mean", out_dtype=torch.bfloat16).float()
    for found in run_processes(_ddp, world_size, transport):
        assert bits.equal(found, expected), bits.first_difference(found, expected)


def _fsdp(rank: int, world_size: int, dtype: torch.dtype, part: int, hsdp: bool) -> Tensor:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2] if hsdp else dist.group.WORLD
    reduce_scatter = FSDPReduceScatter(0.5, wire_dtype=FP8, over=dist.group.WORLD if hsdp else None)
    out = torch.empty(part, dtype=dtype)
    parts = dist.get_world_size(group)
    reduce_scatter(out, row(rank, parts * part).to(dtype), group, dist.ReduceOp.SUM)
    return out


@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 300), (torch.bfloat16, 128), (torch.float64, 5)])
def test_fsdp(dtype: torch.dtype, part: int, hsdp: bool) -> None:
    parts = 2 if hsdp else 4
    results = run_processes(_fsdp, 4, dtype, part, hsdp)
    for rank, found in enumerate(results):
        mine = rank % parts
        rows = [travelled(row(r, parts * part).to(dtype)[mine * part : (mine + 1) * part]) for r in range(4)]
        expected = reference.ragged_sum(
            rows, [0] * 4, part, scale=0.5, out_dtype=dtype if dtype != torch.float64 else torch.float32
        )
        assert bits.equal(found, expected.to(dtype))
