"""Context-parallel attention on GPUs: against float64, against itself, and the same bits on one and on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardsum import ShardGroup, context_parallel_attention
from shardsum.core import bits
from tests.processes import run_processes
from tests.training.test_attention import CASES, chunks, full_attention, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # flash adds dQ by atomics otherwise
    yield
    torch.use_deterministic_algorithms(False)


def attend(group: ShardGroup, case: str, dtype: torch.dtype, dim: int) -> list[dict[str, torch.Tensor]]:
    """Output and gradients of every hosted chunk, with a fixed cotangent, on the CPU."""
    lengths, borders = CASES[case]
    q, k, v, g = (
        [t.detach().to(group.device).requires_grad_() for t in chunks(x, lengths, group.virtual_ranks)]
        for x in make(lengths, 4, 2, dim, dtype)
    )
    outs = context_parallel_attention(q, k, v, group, lengths=lengths, cu_seqlens=borders)
    torch.autograd.backward(outs, [t.detach() for t in g])
    results = zip(outs, *([t.grad for t in x] for x in (q, k, v)))
    return [dict(zip(NAMES, (t.detach().cpu() for t in result))) for result in results]


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_float64_and_repeats_its_bits(case: str, dtype: torch.dtype, dim: int) -> None:
    lengths, borders = CASES[case]
    runs = [attend(ShardGroup(len(lengths), device="cuda"), case, dtype, dim) for _ in range(2)]
    for r, (first, again) in enumerate(zip(*runs)):
        for name in NAMES:
            assert bits.equal(first[name], again[name]), f"virtual rank {r}, {name} of two equal runs: " + str(
                bits.first_difference(first[name], again[name])
            )
    q, k, v, g = (x.double().requires_grad_() for x in make(lengths, 4, 2, dim, dtype))
    out = full_attention(q, k, v, borders or [0, sum(lengths)], True, dim**-0.5)
    out.backward(g.detach())
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 5e-5, torch.float64: 1e-13}[dtype]
    for name, exact in zip(NAMES, (out.detach(), q.grad, k.grad, v.grad)):
        found = torch.cat([chunk[name] for chunk in runs[0]])
        error = (found - exact).abs().max() / exact.abs().max()
        assert error <= tolerance, f"{name}: {error:.1e} of the largest value, at most {tolerance:.0e} is expected"


def _attend_cases(rank: int, world_size: int, cases: list[tuple[str, Any, torch.dtype]]) -> list[dict[int, dict]]:
    torch.use_deterministic_algorithms(True)
    results = []
    for case, placement, dtype in cases:
        group = ShardGroup(len(CASES[case][0]), placement=placement, device=torch.device("cuda", rank))
        results.append(dict(zip(group.virtual_ranks, attend(group, case, dtype, 64))))
    return results


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_same_bits_on_one_and_on_two_gpus() -> None:
    cases = [
        (case, placement, dtype)
        for case in CASES
        for placement, dtype in (("zigzag", torch.bfloat16), ("contiguous", torch.float32))
    ]
    alone = run_processes(_attend_cases, 1, cases, backend="nccl", timeout=120)[0]
    together = run_processes(_attend_cases, 2, cases, backend="nccl", timeout=120)
    for i, (case, placement, dtype) in enumerate(cases):
        found = {**together[0][i], **together[1][i]}
        assert sorted(found) == sorted(alone[i])
        for r, expected in alone[i].items():
            for name in NAMES:
                difference = bits.first_difference(found[r][name], expected[name])
                assert difference is None, f"{case}, {placement}, {dtype}, virtual rank {r}, {name}: {difference}"
