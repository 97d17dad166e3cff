"""The CUDA kernels against the reference loops, bit for bit, on the same device.

Every raw operator of :mod:`shardsum.local.kernels`, in every dtype pair, with the shapes that take different paths:
whole vectors and odd addresses, few and many rows, one thread and two thousand million elements, bounds from the
host and from the device. Data holds NaN, infinities, -0.0, subnormals and values of very different size, so that any
other order of the adds, an early rounding or a read outside a row's bounds changes bits.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from shardsum import MaskedSum, masked_sum, ragged_sum
from shardsum.core import bits, reference
from shardsum.core.numerics import NATIVE_DTYPES, accumulator_dtype
from shardsum.local import kernels
from shardsum.local.plan import SumPlan
from shardsum.native import loader as native
from tests.problems import sum_masked, sum_padded, sum_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PAIRS = [(i, o) for i in FLOATS for o in FLOATS] + [
    (torch.float64, torch.float64),
    (torch.float64, torch.float32),
    *((i, torch.int64) for i in NATIVE_DTYPES if accumulator_dtype(i) == torch.int64),
]


@pytest.fixture(scope="module", autouse=True)
def cuda_library() -> None:
    assert native.status().has_cuda, native.status().reason


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose sum depends on order and precision; 1 in 50 floats is special."""
    g = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, device="cuda", generator=g) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, device="cuda", generator=g, dtype=dtype)
    scale = torch.exp2(torch.randint(-12, 13, shape, device="cuda", generator=g).float())
    x = (torch.randn(shape, device="cuda", generator=g) * scale).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-7, 6e-8], device="cuda").to(dtype)
    pick = torch.randint(0, len(special) * 50, shape, device="cuda", generator=g)
    return torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x)


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, device="cuda", dtype=dtype)


def assert_bits(got: Tensor, want: Tensor) -> None:
    difference = None if bits.equal(got, want) else bits.first_difference(want, got)
    assert difference is None, f"reference against kernel: {difference}"


def offset_view(x: Tensor, elements: int) -> Tensor:
    """A copy of x whose first element lies ``elements`` past a 512-byte boundary."""
    storage = x.new_empty(x.numel() + elements)
    view = storage[elements:].view(x.shape)
    view.copy_(x)
    return view


def check_rows(
    rows: list[Tensor],
    starts: list[int],
    size: int,
    out_dtype: torch.dtype,
    *,
    op: str = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    out_offset: int = 0,
) -> None:
    shape = (size, *rows[0].shape[1:])
    out = offset_view(poison(shape, out_dtype), out_offset)
    previous = None
    if accumulate:
        out.copy_(make(shape, out_dtype, 99))
        previous = out.clone()
    want = reference.ragged_sum(rows, starts, size, op=op, scale=scale, out_dtype=out_dtype, previous=previous)
    sum_rows(out, rows, starts, op == "mean", scale, accumulate)
    assert_bits(out, want)


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("features", [(), (1,), (3,), (64,), (250,)], ids=str)
def test_sum_rows_every_dtype(dtype: torch.dtype, out_dtype: torch.dtype, features: tuple[int, ...]) -> None:
    rng = random.Random(f"{dtype}{features}")
    for num_ranks, size in ((1, 5), (4, 20), (5, 700), (8, 333), (33, 129), (70, 61)):
        lengths = [rng.randint(0, size) for _ in range(num_ranks)]
        starts = [rng.randint(-size // 3, size) for _ in range(num_ranks)]
        rows = [make((n, *features), dtype, r) for r, n in enumerate(lengths)]
        finishes = [{}, {"accumulate": True}]
        if dtype.is_floating_point:
            finishes += [{"op": "mean"}, {"op": "mean", "scale": -0.37, "accumulate": True}, {"scale": 3.1}]
        for finish in finishes:
            check_rows(rows, starts, size, out_dtype, **finish)


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("features", [(), (3,), (64,), (250,)], ids=str)
def test_carried_sums_equal_the_whole(dtype: torch.dtype, out_dtype: torch.dtype, features: tuple[int, ...]) -> None:
    rng = random.Random(f"{dtype}{features}")
    acc = accumulator_dtype(dtype)
    for num_ranks, size, offset in ((4, 20, 0), (8, 333, 0), (12, 3000, 1), (70, 61, 3), (600, 90, 0)):
        for op, scale in (("sum", None), ("mean", -0.37)) if dtype.is_floating_point else (("sum", None),):
            cut = rng.randint(1, num_ranks - 1)
            lengths = [size if op == "mean" and r < cut else rng.randint(0, size) for r in range(num_ranks)]
            starts = [rng.randint(0, size - n) for n in lengths]
            rows = [make((n, *features), dtype, r) for r, n in enumerate(lengths)]
            want = reference.ragged_sum(rows, starts, size, op=op, scale=scale, out_dtype=out_dtype)
            carry = offset_view(poison((size, *features), acc), offset)
            kernels.sum_rows(carry, None, rows[:cut], starts[:cut], 0, False, None)
            for out in (offset_view(poison((size, *features), out_dtype), offset), carry):
                if out.dtype == out_dtype:
                    kernels.sum_rows(out, carry, rows[cut:], starts[cut:], cut, op == "mean", scale)
                    assert_bits(out, want)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("width", [1, 8, 24])
def test_sum_rows_at_any_address(dtype: torch.dtype, width: int) -> None:
    rng = random.Random(width)
    out_dtype = torch.int64 if accumulator_dtype(dtype) == torch.int64 else dtype
    for size in (40, 3000, 70_000):
        for offsets in ((0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 3), (8, 4, 2, 16)):
            lengths = [rng.randint(0, size) for _ in offsets]
            rows = [offset_view(make((n, width), dtype, n), k) for n, k in zip(lengths, offsets)]
            check_rows(rows, [rng.randint(0, size - n) for n in lengths], size, out_dtype, out_offset=rng.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("num_ranks", [256, 257, 600])
def test_sum_rows_of_many_ranks(dtype: torch.dtype, num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    out_dtype = torch.int64 if dtype == torch.int32 else dtype
    for features in ((), (16,)):
        rows = [make((rng.randint(0, 90), *features), dtype, r) for r in range(num_ranks)]
        starts = [rng.randint(-5, 40) for _ in rows]
        check_rows(rows, starts, 100, out_dtype)
        if dtype.is_floating_point:
            check_rows(rows, starts, 100, out_dtype, op="mean", scale=0.3, accumulate=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths_of", ["random", "causal", "full", "skewed", "empty"])
def test_sum_padded_large(dtype: torch.dtype, lengths_of: str) -> None:
    rng = random.Random(lengths_of)
    for num_ranks in (2, 3, 4, 7, 16, 64):
        size, width = 3001, 512
        lengths = {
            "random": [rng.randint(0, size) for _ in range(num_ranks)],
            "causal": [(r + 1) * size // num_ranks for r in range(num_ranks)],
            "full": [size] * num_ranks,
            "skewed": [size if r == num_ranks // 2 else 64 for r in range(num_ranks)],
            "empty": [0] * num_ranks,
        }[lengths_of]
        x = make((num_ranks, size, width), dtype, num_ranks)
        want = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * num_ranks, size, out_dtype=dtype)
        out = poison((size, width), dtype)
        sum_padded(out, x, [], lengths, False, None, False)
        assert_bits(out, want)
        out = poison((size, width), dtype)
        kernels.sum_padded_device(out, x, None, torch.tensor(lengths, device="cuda"), False, None)
        assert_bits(out, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_ranks", [9, 16, 17, 40, 64, 65])
def test_sum_padded_small_of_many_ranks(dtype: torch.dtype, num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    for size, width in ((20, 1), (77, 3), (130, 8), (100, 300)):
        whole = make((num_ranks, size + 3, width), dtype, size)
        lengths = [rng.choice((0, size, rng.randint(0, size + 3))) for _ in range(num_ranks)]
        for x in (whole, whole[:, 1:], whole.flip(0)):  # (the first row may be the empty one)
            ends = [min(n, x.shape[1]) for n in lengths]
            for starts in ([0] * num_ranks, [r % 3 - 1 for r in range(num_ranks)]):
                rows = [x[r, :n] for r, n in enumerate(ends)]
                want = reference.ragged_sum(rows, starts, size, out_dtype=dtype)
                out = poison((size, width), dtype)
                sum_padded(out, x, starts, ends, False, None, False)
                assert_bits(out, want)
                out = poison((size, width), dtype)
                sum_rows(out, rows[::-1], starts[::-1], False, None)
                assert_bits(out, reference.ragged_sum(rows[::-1], starts[::-1], size, out_dtype=dtype))


@pytest.mark.parametrize("width", [4096, 4097])
@pytest.mark.parametrize(("num_ranks", "size"), [(4, 2711), (16, 1111), (16, 2711), (40, 1111)])
def test_sum_padded_in_wide_and_narrow_tiles(num_ranks: int, size: int, width: int) -> None:
    rng = random.Random(size)
    x = make((num_ranks, size, width), torch.bfloat16, size)
    lengths = [rng.randint(0, size) for _ in range(num_ranks)]
    want = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * num_ranks, size, out_dtype=x.dtype)
    out = poison((size, width), x.dtype)
    sum_padded(out, x, [], lengths, False, None, False)
    assert_bits(out, want)
    out = poison((size, width), x.dtype)
    kernels.sum_padded_device(out, x, None, torch.tensor(lengths, device="cuda"), False, None)
    assert_bits(out, want)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 1000])
def test_device_bounds_are_clamped(index_dtype: torch.dtype, width: int) -> None:
    rng = random.Random(width)
    for num_ranks, capacity, size in ((4, 20, 20), (9, 300, 401), (300, 40, 60)):
        x = make((num_ranks, capacity, width), torch.bfloat16, num_ranks)
        raw_lengths = [rng.randint(-5, capacity + 50) for _ in range(num_ranks)]
        raw_starts = [rng.randint(-30, size + 30) for _ in range(num_ranks)]
        lengths = torch.tensor(raw_lengths, dtype=index_dtype, device="cuda")
        starts = torch.tensor(raw_starts, dtype=index_dtype, device="cuda")
        rows = [x[r, : min(max(n, 0), capacity)] for r, n in enumerate(raw_lengths)]
        begins = [min(max(s, 0), size) for s in raw_starts]
        want = reference.ragged_sum(rows, begins, size, op="mean", out_dtype=torch.float32)
        out = poison((size, width), torch.float32)
        kernels.sum_padded_device(out, x, starts, lengths, True, None)
        assert_bits(out, want)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("width", [1, 3, 8, 16, 200, 320, 512])
def test_sum_masked(dtype: torch.dtype, width: int) -> None:
    out_dtype = torch.int64 if accumulator_dtype(dtype) == torch.int64 else dtype
    for num_ranks, size, density in ((1, 7, 0.5), (4, 20, 0.5), (6, 801, 0.2), (33, 130, 0.8), (70, 65, 0.05)):
        x = make((num_ranks, size, width), dtype, size)
        mask = torch.rand(num_ranks, size, device="cuda") < density
        mask[:, size // 2] = False
        for op, scale in (("sum", None), ("mean", 1.7)) if dtype.is_floating_point else (("sum", None),):
            want = reference.masked_sum(x, mask, op=op, scale=scale, out_dtype=out_dtype)
            for m in (mask, pack(mask)):
                out = poison((size, width), out_dtype)
                sum_masked(out, x, m, op == "mean", scale, False)
                assert_bits(out, want)


def test_sum_masked_large_and_offset() -> None:
    for width, offset in ((256, 0), (1, 0), (256, 1), (1, 3)):
        size = (1 << 22) // width
        x = offset_view(make((8, size, width), torch.bfloat16, width), offset)
        mask = torch.rand(8, size, device="cuda") < 0.4
        out = poison((size, width), torch.bfloat16)
        sum_masked(out, x, mask, False, None, False)
        assert_bits(out, reference.masked_sum(x, mask, out_dtype=torch.bfloat16))


def pack(mask: Tensor) -> Tensor:
    """bool ``(R, size)`` to int32 words ``(R, ceil(size / 32))``."""
    words = (mask.shape[1] + 31) // 32
    padded = torch.zeros(mask.shape[0], words * 32, dtype=torch.int64, device=mask.device)
    padded[:, : mask.shape[1]] = mask
    value = (padded.view(mask.shape[0], words, 32) << torch.arange(32, device=mask.device)).sum(2)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32)


def test_more_than_two_thousand_million_elements() -> None:
    size, width = 1 << 20, 1100
    x = torch.empty((2, size, width), device="cuda", dtype=torch.bfloat16)
    for r in range(2):
        for begin in range(0, size, 1 << 17):
            x[r, begin : begin + (1 << 17)] = make((1 << 17, width), torch.bfloat16, r + begin)
    lengths = [size, size - 12_345]
    out = torch.full((size, width), 77.0, device="cuda", dtype=torch.bfloat16)
    sum_padded(out, x, [], lengths, False, None, False)
    for begin in range(0, size, 1 << 17):
        end = begin + (1 << 17)
        rows = [x[r, begin : max(begin, min(end, n))] for r, n in enumerate(lengths)]
        assert_bits(out[begin:end], reference.ragged_sum(rows, [0, 0], end - begin, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(4, 20), (6, 333, 5), (300, 40, 64), (3, 700, 512)])
def test_plans(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Looked up by ragged_sum, and held by MaskedSum: lengths, intervals and a mask with gaps."""
    x, lengths = make(shape, dtype, 11), [(r * 7 + shape[1]) % (shape[1] + 1) for r in range(shape[0])]
    out_dtype = torch.int64 if accumulator_dtype(dtype) == torch.int64 else dtype
    rows = [x[r, :n] for r, n in enumerate(lengths)]
    want = reference.ragged_sum(rows, [0] * len(lengths), shape[1], out_dtype=out_dtype)
    held = MaskedSum.from_lengths(lengths, shape[1])
    vector = torch.tensor(lengths)  # on the host: read there, without synchronisation
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    for got in (ragged_sum(x, lengths), ragged_sum(x, vector), ragged_sum(rows, size=shape[1]), held(x)):
        assert_bits(got, want)
    assert_bits(ragged_sum(transposed, lengths), want)
    for call in (lambda out: ragged_sum(x, lengths, out=out), lambda out: held(x, out=out)):
        out = poison(shape[1:], out_dtype)
        version = out._version
        assert call(out) is out and out._version == version + 1
        assert_bits(out, want)
    gaps = torch.rand(shape[:2], generator=torch.Generator().manual_seed(1)) < 0.6
    for mask in (gaps, torch.arange(shape[1])[None] >= torch.tensor(lengths)[:, None]):  # gaps; intervals to the end
        want = reference.masked_sum(x, mask.cuda(), out_dtype=out_dtype)
        assert_bits(MaskedSum(mask).cuda()(x), want)
        assert_bits(masked_sum(x, mask.cuda()), want)


@pytest.mark.parametrize("viewed", [2, 128, 255])
def test_bools_count_once_whatever_their_byte_is(viewed: int) -> None:
    x = torch.full((5, 300, 3), viewed, dtype=torch.uint8, device="cuda").view(torch.bool)
    assert (ragged_sum(x, [300] * 4 + [0]) == 4).all()
    assert (ragged_sum(list(x)) == 5).all()
    assert (ragged_sum(x, torch.tensor([300] * 4 + [0], device="cuda")) == 4).all()


def test_plans_are_checked() -> None:
    x, out, lengths = make((4, 20), torch.float32, 12), poison((20,), torch.float32), [8, 12, 10, 18]
    plan = SumPlan([(0, 0, n) for n in lengths]).words()
    bad = [(out.cpu(), x), (out, x.cpu()), (x[1], x), (out[:19], x), (out.half()[::2], x[:, :10].half())]
    if torch.cuda.device_count() > 1:
        bad += [(out.to("cuda:1"), x.to("cuda:0")), (out.to("cuda:0"), x.to("cuda:1"))]
    for target, shards in bad:
        with pytest.raises(RuntimeError, match=r"shardsum: |sum_plan: "):
            kernels.sum_plan(target, shards, plan)
        with pytest.raises(ValueError, match=r"out: |lengths: "):
            ragged_sum(shards, lengths, out=target[:0])
    assert (out == 77).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_on_a_gpu_that_is_not_current(current: int) -> None:
    """Also in a thread that has not met CUDA: every launch goes where its tensors are."""
    lengths = [8, 12, 10, 18]
    x = make((4, 20), torch.float32, 13).to(f"cuda:{1 - current}")
    want = reference.ragged_sum([x[r, :n].cpu() for r, n in enumerate(lengths)], [0] * 4, 20, out_dtype=torch.float32)
    got: list[Tensor] = []

    def sums() -> None:
        with torch.cuda.device(current):
            for _ in range(3):
                got.append(ragged_sum(x, lengths))
                got.append(ragged_sum(x, lengths, out=torch.full_like(got[-1], 77)))
            assert torch.cuda.current_device() == current

    sums()
    thread = threading.Thread(target=sums)
    thread.start()
    thread.join()
    assert len(got) == 12
    for result in got:
        assert_bits(result.cpu(), want)


@pytest.mark.parametrize(("size", "width"), [(20, 1), (600, 64), (4000, 512)])
def test_graph_replays_with_other_lengths(size: int, width: int) -> None:
    num_ranks = 6
    x = make((num_ranks, size, width), torch.bfloat16, 5)
    lengths = torch.zeros(num_ranks, dtype=torch.int64, device="cuda")
    out = poison((size, width), torch.bfloat16)
    kernels.sum_padded_device(out, x, None, lengths, False, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sum_padded_device(out, x, None, lengths, False, None)
    rng = random.Random(size)
    for _ in range(100):
        now = [rng.randint(0, size) for _ in range(num_ranks)]
        lengths.copy_(torch.tensor(now))
        out.fill_(77)
        graph.replay()
        rows = [x[r, :n] for r, n in enumerate(now)]
        assert_bits(out, reference.ragged_sum(rows, [0] * num_ranks, size, out_dtype=torch.bfloat16))


def test_the_current_stream_is_used() -> None:
    x = make((4, 2000, 256), torch.float32, 1)
    stream = torch.cuda.Stream()
    out = poison((2000, 256), torch.float32)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = x * 2
        sum_padded(out, y, [], [2000, 10, 0, 1500], False, None, False)
    stream.synchronize()
    want = reference.ragged_sum([y[0], y[1, :10], y[2, :0], y[3, :1500]], [0] * 4, 2000, out_dtype=torch.float32)
    assert_bits(out, want)


def test_cpu_and_cuda_give_the_same_bits() -> None:
    rows = [make((n, 33), torch.bfloat16, n) for n in (100, 0, 77, 100, 1)]
    out = poison((100, 33), torch.bfloat16)
    sum_rows(out, rows, [0] * 5, True, 0.1)
    host = torch.empty((100, 33), dtype=torch.bfloat16)
    sum_rows(host, [r.cpu() for r in rows], [0] * 5, True, 0.1)
    assert bits.equal(out, host)
