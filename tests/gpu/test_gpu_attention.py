"""Context-parallel attention on GPUs: against float64, against itself, and the same bits on one and on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardsum import ShardGroup, context_parallel_attention
from shardsum.core import bits
from tests.gpus import needs_gpus
from tests.processes import run_processes
from tests.training.test_attention import CASES, chunks, full_attention, make
from tests.training.test_context import BORDERS, LENGTHS, windowed
from tests.training.test_context_training import changed_rows

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
        group = ShardGroup(len(CASES[case][0]), placement=placement, device="cuda")
        results.append(dict(zip(group.virtual_ranks, attend(group, case, dtype, 64))))
    return results


@needs_gpus(2)
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


def on_gpu(lengths: list[int], dtype: torch.dtype, dim: int = 64) -> list[list[torch.Tensor]]:
    """q, k, v and a cotangent of every chunk."""
    parts = [chunks(x, lengths, range(len(lengths))) for x in make(lengths, 4, 2, dim, dtype)]
    return [[t.detach().cuda().requires_grad_() for t in xs] for xs in parts]


@pytest.mark.parametrize(("window", "causal"), [((3, 0), True), ((2, 1), False), ((-1, 4), False), (None, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_windows_against_the_definition(dtype: torch.dtype, window: Any, causal: bool) -> None:
    cp = ShardGroup(5, device="cuda").context_parallel(LENGTHS, BORDERS, causal, window)
    q, k, v, g = on_gpu(LENGTHS, dtype)
    outs = cp.attention(q, k, v)
    torch.autograd.backward(outs, [x.detach() for x in g])
    left, right = window or (-1, -1)
    inputs = [torch.cat(xs).detach().cpu().double().requires_grad_() for xs in (q, k, v)]
    expected, lse = windowed(*inputs, (left, 0 if causal else right))
    expected.backward(torch.cat(g).detach().cpu().double(), retain_graph=True)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 5e-5}[dtype]
    found = [outs, *([x.grad for x in xs] for xs in (q, k, v))]
    for mine, exact in zip(found, (expected.detach(), *(x.grad for x in inputs))):
        assert (torch.cat(mine).cpu() - exact).abs().max() <= tolerance * exact.abs().max()
    if dtype != torch.float32 or window is None:
        _, lses = cp.attention(q, k, v, return_lse=True)
        assert (torch.cat(lses).cpu() - lse).abs().max() <= 1e-2
        h = torch.randn(lse.shape, generator=torch.Generator().manual_seed(5))
        of_lse = torch.autograd.grad(lse, inputs, h.double(), materialize_grads=True)
        mine = torch.autograd.grad(lses, [*q, *k, *v], [x.cuda() for x in h.split(LENGTHS)])
        for i, exact in enumerate(of_lse):
            error = (torch.cat(mine[5 * i : 5 * (i + 1)]).cpu() - exact).abs().max()
            assert error <= tolerance * max(exact.abs().max().item(), 1e-3)


@pytest.mark.parametrize("again", [False, True])
def test_a_layer_waits_for_nothing_and_copies_nothing_to_the_gpu(again: bool) -> None:
    cp = ShardGroup(5, device="cuda").context_parallel(LENGTHS, BORDERS, recompute_exchange=again)
    q, k, v, g = on_gpu(LENGTHS, torch.bfloat16)
    grads = [x.detach() for x in g]

    def layer() -> None:
        torch.autograd.backward(cp.attention(q, k, v), grads)

    layer()  # the first makes what all share
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    copies = [e.name for e in run.events() if "memcpy" in e.name.lower() and "htod" in e.name.lower()]
    # The tables of rows of exchanges with several virtual ranks a process are not this test's.
    assert all("Pageable" not in name for name in copies), copies


def test_keys_and_values_that_are_views_of_one_tensor() -> None:
    cp = ShardGroup(5, device="cuda").context_parallel(LENGTHS, BORDERS)
    q, k, v, _ = ([x.detach() for x in xs] for xs in on_gpu(LENGTHS, torch.bfloat16))
    both = [torch.stack(pair, 1) for pair in zip(k, v)]
    views = [x.unbind(1) for x in both]
    for a, b in zip(cp.attention(q, [x[0] for x in views], [x[1] for x in views]), cp.attention(q, k, v)):
        assert bits.equal(a, b)


def test_compiled_blocks_give_the_same_bits() -> None:
    group = ShardGroup(5, device="cuda")
    cp = group.context_parallel(LENGTHS, BORDERS, recompute_exchange=True)
    compiled = torch.compile(lambda *xs: cp.attention(*xs), fullgraph=True, backend="aot_eager")
    results = []
    for run in (cp.attention, compiled):
        q, k, v, g = on_gpu(LENGTHS, torch.bfloat16)
        outs = run(q, k, v)
        torch.autograd.backward(outs, [x.detach() for x in g])
        results.append([*outs, *(x.grad for xs in (q, k, v) for x in xs)])
    assert all(map(bits.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_changes_only_later_outputs_of_its_document(dtype: torch.dtype) -> None:
    cp = ShardGroup(5, device="cuda").context_parallel(LENGTHS, BORDERS)
    q, k, v, _ = (torch.cat(xs).detach() for xs in on_gpu(LENGTHS, dtype))
    before = torch.cat(cp.attention(*map(cp.split, (q, k, v))))
    for token in (0, 6, 7, 20, 27):
        others = [x.clone() for x in (q, k, v)]
        for x in others:
            x[token] += 1
        changed = changed_rows(torch.cat(cp.attention(*map(cp.split, others))), before)
        assert changed == list(range(token, next(border for border in BORDERS if border > token)))
