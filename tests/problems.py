"""Random problems of the local sums: shards in every dtype and layout, bounds, numerics; and their raw operators."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from shardsum.core.numerics import resolve_out_dtype
from shardsum.local import kernels
from shardsum.local.plan import SumPlan
from tests.values import FLOATS, INTEGERS, random_values


@st.composite
def problems(draw: st.DrawFn) -> dict:
    num_ranks = draw(st.integers(1, 9))
    capacity = draw(st.integers(0, 7))
    size = draw(st.integers(0, 9))
    lengths = [draw(st.integers(0, min(capacity, size))) for _ in range(num_ranks)]
    starts = [draw(st.integers(0, size - n)) for n in lengths]
    dtype = draw(st.sampled_from(FLOATS + INTEGERS))
    op = draw(st.sampled_from(["sum", "mean"])) if dtype.is_floating_point else "sum"
    scale = draw(st.sampled_from([None, 0.1, -3.0])) if dtype.is_floating_point else None
    wanted = draw(st.sampled_from([None, *FLOATS]))
    try:
        out_dtype = resolve_out_dtype(dtype, wanted)
    except ValueError:
        out_dtype = resolve_out_dtype(dtype, None)
    # Wide positions take another CPU kernel than narrow ones.
    trailing = draw(st.sampled_from([(), (1,), (3,), (8,), (33,), (2, 5), (0,), (200,)]))
    x = random_values((num_ranks, capacity, *trailing), dtype, draw(st.integers(0, 10**6)))
    return dict(
        x=x, lengths=lengths, starts=starts, size=size,
        layout=draw(st.sampled_from(["dense", "offset", "strided", "transposed"])),
        kwargs=dict(op=op, scale=scale, out_dtype=out_dtype),
    )  # fmt: skip


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other memory: shifted by one element, every second row of a larger buffer, or transposed."""
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "strided":
        return torch.stack([x, torch.zeros_like(x)], 2).flatten(1, 2)[:, ::2] if x.dim() > 1 and x.numel() else x
    if layout == "transposed" and x.dim() > 2:
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    return x


def sum_padded(
    out: torch.Tensor, x: torch.Tensor, starts: list[int], lengths: list[int], mean: bool = False,
    scale: float | None = None, accumulate: bool = False, firsts: list[int] | None = None,
) -> None:  # fmt: skip
    """The raw operator by a plan of these rows, cut to out's positions; ``starts`` and ``firsts`` empty: all 0."""
    kernels.sum_plan(out, x, _plan(out.shape[0], starts, firsts or [], lengths, mean, scale, accumulate))


def sum_rows(
    out: torch.Tensor, rows: list[torch.Tensor], starts: list[int], mean: bool = False, scale: float | None = None,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """The raw operator of collectives; where it is to add to ``out``, that of plans."""
    if accumulate:
        plan = _plan(out.shape[0], starts, [], [r.shape[0] for r in rows], mean, scale, True)
        kernels.sum_plan_list(out, rows, plan)
    else:
        kernels.sum_rows(out, None, rows, starts, 0, mean, scale)


def _plan(
    size: int, starts: list[int], firsts: list[int], lengths: list[int], mean: bool, scale: float | None,
    accumulate: bool,
) -> torch.Tensor:  # fmt: skip
    rows, zeros = [], [0] * len(lengths)
    for start, first, n in zip(starts or zeros, firsts or zeros, lengths):
        begin, end = max(start, 0), min(start + n, size)
        rows.append((begin, first + begin - start, end - begin) if begin < end else (0, 0, 0))
    return SumPlan(rows, size, None, "mean" if mean else "sum", scale, None, accumulate).words()


def sum_masked(
    out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, mean: bool = False, scale: float | None = None,
    accumulate: bool = False,
) -> None:  # fmt: skip
    plan = SumPlan((), None, None, "mean" if mean else "sum", scale, None, accumulate)
    kernels.sum_plan_masked(out, x, mask, plan.words())
