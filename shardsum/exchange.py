"""The registered communicating operators and their autograd.

    shardsum::exchange         host-known intervals: sources (I_r) -> sinks (O_q), by sum, mean or copy
    shardsum::exchange_padded  padded shards whose lengths are only known on the device (form c)

The adjoint of an exchange is the exchange with sources and sinks swapped; a mean divides by the forward's count of
contributions, in the accumulator's dtype, before the one rounding. Only tensors, ints and strings cross the boundary:
intervals as flat ``SymInt[]`` (begin, end, begin, end, ...), the group by name.

``kinds`` says what sources and sinks are, one letter each: "v" virtual ranks, "p" processes (a result that every
process gets). ``grad`` says what the gradient of a replicated result means: "sum" adds the processes' cotangents,
"identity" takes this process's own as the whole one. "adjoint" marks an exchange of cotangents: what the forward agreed
on covers it.

Shards may have more rows than their interval (the rest is not read), and ``rows`` asks for results with zeros behind
theirs: so compiled code neither slices nor makes tensors whose size is a length, which would compile anew for 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import kernels, native, operators
from .engine import LOCAL_ROUTE, Engine, Reduce, Route
from .layout import Interval
from .numerics import accumulator_dtype
from .operators import define, finish_gradient, readable
from .reference import contributions

if TYPE_CHECKING:
    from .calls import Runner

#: Groups by name: an operator's schema carries no objects. Entries go with their groups.
groups: WeakValueDictionary[str, Runner] = WeakValueDictionary()


def flatten(intervals: Sequence[Interval]) -> list[int]:
    return [bound for interval in intervals for bound in interval]


def intervals(flat: Sequence[int]) -> tuple[Interval, ...]:
    return tuple(zip(flat[::2], flat[1::2]))


# exchange


def _exchange(
    shards: list[Tensor],
    sources: list[int],
    sinks: list[int],
    rows: list[int] | None,
    kinds: str,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
    grad: str,
    group: str,
) -> list[Tensor]:
    owner, reduce = groups[group], Reduce(op, scale, dtype)
    if grad != "adjoint":
        owner.agree_compiled("exchange", shards[0], reduce, grad, [kinds, sources, sinks])
    held = owner.hosted(intervals(sources), kinds[0])
    narrowed = [s if s.shape[0] == e - b else s[: e - b] for s, (b, e) in zip(shards, held)]
    outs = owner.run(narrowed, intervals(sources), intervals(sinks), kinds, reduce).result()
    return _with_rows(outs, rows or [o.shape[0] for o in outs])


def _with_rows(tensors: list[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The tensors with zeros behind their rows, up to ``rows`` each."""
    return [
        t if t.shape[0] == n else torch.cat([t, t.new_zeros((n - t.shape[0], *t.shape[1:]))])
        for t, n in zip(tensors, rows)
    ]


def _exchange_fake(
    shards: list[Tensor],
    sources: list[int],
    sinks: list[int],
    rows: list[int] | None,
    kinds: str,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
    grad: str,
    group: str,
) -> list[Tensor]:
    trailing = shards[0].shape[1:]
    sizes = rows or [e - b for b, e in groups[group].hosted(intervals(sinks), kinds[1])]
    return [shards[0].new_empty((n, *trailing), dtype=dtype) for n in sizes]


exchange = define(
    "exchange(Tensor[] shards, SymInt[] sources, SymInt[] sinks, SymInt[]? rows, str kinds, str op, float? scale, "
    "ScalarType dtype, str grad, str group) -> Tensor[]",
    _exchange,
    _exchange_fake,
)


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    shards, ctx.sources, ctx.sinks, _, ctx.kinds, ctx.op, ctx.scale, _, ctx.grad, ctx.group = inputs
    ctx.rows, ctx.dtype = [s.shape[0] for s in shards], shards[0].dtype
    ctx.owner = groups[ctx.group]  # the group lives until its last backward


def _backward(ctx: Any, grads: list[Tensor]) -> tuple:
    grads = [g.contiguous() for g in grads]
    shards = _local_adjoint(ctx, grads[0]) if ctx.grad == "identity" else _exchange_adjoint(ctx, grads)
    return shards, *[None] * 9


def _local_adjoint(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The replicated result's cotangent is the same everywhere: each hosted shard takes its part, nothing travels."""
    begin = ctx.sinks[0]
    bounds = [x - begin for x in ctx.sources]
    if ctx.op == "mean":
        grad = grad.to(accumulator_dtype(ctx.dtype))
        grad = finish_gradient(grad, coverage(grad, bounds, grad.shape[0]), None, grad.dtype)
    hosted = flatten(ctx.owner.hosted(intervals(bounds), ctx.kinds[0]))
    return local_adjoint(grad, hosted, ctx.rows, ctx.scale, ctx.dtype)


def _exchange_adjoint(ctx: Any, grads: list[Tensor]) -> list[Tensor]:
    acc = accumulator_dtype(ctx.dtype)
    if acc == torch.float64:  # a float32 result of float64 shards: their gradient is added in float64
        grads = [g.to(acc) for g in grads]
    mean = ctx.op == "mean"
    fused = (None, acc) if mean else (ctx.scale, ctx.dtype)
    kinds = ctx.kinds[::-1]
    shards = exchange(grads, ctx.sinks, ctx.sources, ctx.rows, kinds, "sum", *fused, "adjoint", ctx.group)
    if not mean:
        return shards
    hosted = ctx.owner.hosted(intervals(ctx.sources), ctx.kinds[0])
    counts = [coverage(s, [x - b for x in ctx.sources], s.shape[0]) for s, (b, _) in zip(shards, hosted)]
    return [finish_gradient(s, count, ctx.scale, ctx.dtype) for s, count in zip(shards, counts)]


torch.library.register_autograd("shardsum::exchange", _backward, setup_context=_setup, lib=operators.library)


# Parts of its adjoint, as operators: symbolic bounds need not be traced through slices


def _coverage(like: Tensor, flat: list[int], size: int) -> Tensor:
    return contributions([(max(b, 0), min(e, size)) for b, e in intervals(flat)], size, like.device)


#: ``(size,)`` int64 on the device of ``like``: how many of the flat intervals cover each position.
coverage = define(
    "coverage(Tensor like, SymInt[] intervals, SymInt size) -> Tensor",
    _coverage,
    lambda like, flat, size: like.new_empty((size,), dtype=torch.int64),
)


def _take(grad: Tensor, hosted: list[int], rows: list[int], scale: float | None, dtype: torch.dtype) -> list[Tensor]:
    pairs = intervals(hosted)
    starts, lengths = [b for b, _ in pairs], [e - b for b, e in pairs]
    return _with_rows(operators.ragged_sum_adjoint(grad, starts, lengths, "sum", scale, dtype), rows)


#: The parts ``hosted`` (flat intervals) of a cotangent, scaled, with zeros behind them up to ``rows``.
local_adjoint = define(
    "local_adjoint(Tensor grad, SymInt[] hosted, SymInt[] rows, float? scale, ScalarType dtype) -> Tensor[]",
    _take,
    lambda grad, hosted, rows, scale, dtype: [grad.new_empty((n, *grad.shape[1:]), dtype=dtype) for n in rows],
)


def _take_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    grad, ctx.hosted, _, ctx.scale, _ = inputs
    ctx.size, ctx.dtype = grad.shape[0], grad.dtype


def _take_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    pairs = intervals(ctx.hosted)
    parts = [g[: e - b].contiguous() for g, (b, e) in zip(grads, pairs)]
    total = operators.ragged_sum(parts, [b for b, _ in pairs], ctx.size, "sum", ctx.scale, ctx.dtype)
    return total, None, None, None, None


torch.library.register_autograd(
    "shardsum::local_adjoint", _take_backward, setup_context=_take_setup, lib=operators.library
)


# exchange_padded


def _exchange_padded(
    x: Tensor,
    lengths: Tensor,
    sinks: list[int],
    kinds: str,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
    grad: str,
    group: str,
) -> list[Tensor]:
    owner = groups[group]
    reduce = Reduce(op, scale, dtype)
    owner.agree_compiled("exchange_padded", x, reduce, grad, [kinds, x.shape[1], sinks])
    if owner.engine.peers is not None and owner.engine.transport != "gather":
        plan = owner.engine.plan(((0, x.shape[1]),) * owner.num_virtual_ranks, intervals(sinks), kinds)
        return owner.engine.padded_by_peers(plan, x, lengths, reduce)
    rows, all_lengths = gather_padded(owner.engine, x, lengths)
    wanted = owner.hosted(intervals(sinks), kinds[1])
    outs = [sum_padded_part(rows, all_lengths, interval, reduce) for interval in wanted]
    return [*outs, all_lengths]


def gather_padded(engine: Engine, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Padded rows ``(R', S_MAX, *F)`` and lengths ``(R',)`` of all virtual ranks, in their order, unread by the host.

    Each row travels with its length behind it. A process that hosts fewer than the most sends empty rows, so R' >= R;
    rows of length 0 add nothing.
    """
    native.load()
    if engine.wire is None:
        engine.last = LOCAL_ROUTE
        return operators.row_contiguous(x), lengths.clone()
    counts = [engine.owners.count(p) for p in range(engine.world_size)]
    slots, row_bytes = max(counts), x[0].numel() * x.element_size()
    stride = -(-row_bytes // 16) * 16 + 16  # rows stay 16-byte aligned
    sent = (slots * stride * (engine.world_size - 1),) * engine.world_size
    engine.begin(Route("gather", False, 1, sent, sent, "lengths on the device travel with the padded rows"))
    mine = torch.zeros((slots, stride), dtype=torch.uint8, device=x.device)
    mine[: x.shape[0], :row_bytes] = x.contiguous().view(x.shape[0], -1).view(torch.uint8)
    mine[: x.shape[0], stride - 8 :].view(torch.int64)[:, 0] = lengths
    everyone = torch.empty((engine.world_size * slots, stride), dtype=torch.uint8, device=x.device)
    engine.wire.wait(engine.wire.all_gather(everyone, mine), x.device)
    order = _row_order(engine.owners, slots)
    if order is not None:
        everyone = everyone[torch.tensor(order, device=x.device)]
    item = x.element_size()
    strides = (stride // item, *x.stride()[1:]) if x.is_contiguous() else (stride // item, *x[0].contiguous().stride())
    rows = everyone.view(x.dtype).as_strided((everyone.shape[0], *x.shape[1:]), strides)
    return rows, everyone[:, stride - 8 :].contiguous().view(torch.int64)[:, 0].contiguous()


def _row_order(owners: Sequence[int], slots: int) -> list[int] | None:
    """Gathered row of each virtual rank; None when rows already lie in virtual-rank order (empty ones between them)."""
    used = [0] * (max(owners) + 1)
    order = []
    for owner in owners:
        order.append(owner * slots + used[owner])
        used[owner] += 1
    return None if order == sorted(order) else order


def sum_padded_part(rows: Tensor, lengths: Tensor, wanted: Interval, reduce: Reduce) -> Tensor:
    """Positions ``wanted`` of the sum of padded rows with device lengths."""
    begin, end = wanted
    out = rows.new_empty((end - begin, *rows.shape[2:]), dtype=reduce.dtype)
    part = rows[:, begin : max(begin, min(end, rows.shape[1]))]
    if out.numel() == 0 or part.shape[1] == 0:
        return out.zero_()
    lengths = lengths - begin if begin else lengths
    kernels.sum_padded_device(out, readable(part), None, lengths, reduce.op == "mean", reduce.scale, False)
    return out


def _exchange_padded_fake(
    x: Tensor,
    lengths: Tensor,
    sinks: list[int],
    kinds: str,
    op: str,
    scale: float | None,
    dtype: torch.dtype,
    grad: str,
    group: str,
) -> list[Tensor]:
    owner = groups[group]
    wanted = owner.hosted(intervals(sinks), kinds[1])
    outs = [x.new_empty((e - b, *x.shape[2:]), dtype=dtype) for b, e in wanted]
    return [*outs, x.new_empty((gathered_rows(owner.engine),), dtype=torch.int64)]


def gathered_rows(engine: Engine) -> int:
    """R' of :func:`gather_padded`; R by peers."""
    if engine.peers is not None and engine.transport != "gather":
        return len(engine.owners)
    slots = max(engine.owners.count(p) for p in range(engine.world_size))
    ordered = engine.wire is None or _row_order(engine.owners, slots) is not None
    return len(engine.owners) if ordered else engine.world_size * slots


exchange_padded = define(
    "exchange_padded(Tensor x, Tensor lengths, SymInt[] sinks, str kinds, str op, float? scale, ScalarType dtype, "
    "str grad, str group) -> Tensor[]",
    _exchange_padded,
    _exchange_padded_fake,
)


def _padded_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, lengths, ctx.sinks, ctx.kinds, ctx.op, ctx.scale, _, ctx.grad, ctx.group = inputs
    ctx.save_for_backward(lengths.clone(), output[-1])
    ctx.capacity, ctx.dtype, ctx.device, ctx.owner = x.shape[1], x.dtype, x.device, groups[ctx.group]


def _padded_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    """Cotangents come to every source whole (its length is not known on the host), then the length selects."""
    lengths, all_lengths = ctx.saved_tensors
    owner = ctx.owner
    outs = [g.contiguous() for g in grads[:-1]]
    acc = accumulator_dtype(ctx.dtype)
    end = max(ctx.sinks[1::2])
    if ctx.grad == "identity":
        whole = [outs[0]] * len(owner.virtual_ranks)
    else:
        held = [0, end] * owner.num_virtual_ranks
        outs = [g.to(acc) for g in outs] if acc == torch.float64 else outs
        whole = exchange(outs, ctx.sinks, held, None, ctx.kinds[::-1], "sum", None, acc, "adjoint", ctx.group)
    count = None
    if ctx.op == "mean":
        count = (torch.arange(end, device=ctx.device) < all_lengths.clamp(0, ctx.capacity)[:, None]).sum(0)
    if count is not None or ctx.scale is not None:
        whole = [finish_gradient(w.to(acc), count, ctx.scale, ctx.dtype) for w in whole]
    rows = torch.stack([w.to(ctx.dtype) for w in whole])
    if end < ctx.capacity:
        rows = torch.cat([rows, rows.new_zeros((rows.shape[0], ctx.capacity - end, *rows.shape[2:]))], 1)
    valid = torch.arange(ctx.capacity, device=ctx.device) < lengths[:, None]
    return operators.select(valid, rows[:, : ctx.capacity]), *[None] * 8


torch.library.register_autograd(
    "shardsum::exchange_padded", _padded_backward, setup_context=_padded_setup, lib=operators.library
)
