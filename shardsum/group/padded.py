"""The registered exchange of padded shards whose lengths only the device knows (form c of :mod:`shardsum.group.group`).

    shardsum::exchange_padded  x (k, S_MAX, *F), lengths (k,) -> one tensor per hosted sink, then all lengths (R',)

Lengths travel with the rows (behind them in the gathered buffer, or with the peers' flags) and are never read by the
host. Every source starts at position 0. The adjoint brings each source the whole cotangent; its length then selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Interval
from ..core.numerics import accumulator_dtype
from ..local import kernels
from ..local import ops as operators
from ..local.ops import finish_gradient, readable
from ..local.registry import define
from ..native import loader as native
from ..transports import stamp
from .exchange import Terms, exchange, intervals
from .executor import LOCAL_ROUTE, Engine, Reduce, Route


def _exchange_padded(x: Tensor, lengths: Tensor, sinks: list[int], *tail: Any) -> list[Tensor]:
    terms = Terms(*tail)
    owner, reduce = terms.owner, terms.reduce
    owner.agree_compiled(terms, x, [x.shape[1], sinks])
    if owner.engine.peers is not None and owner.engine.transport != "gather":
        plan = owner.engine.plan(((0, x.shape[1]),) * owner.num_virtual_ranks, intervals(sinks), terms.kinds)
        return owner.engine.padded_by_peers(plan, x, lengths, reduce)
    try:
        rows, all_lengths = gather_padded(owner.engine, x, lengths, terms)
    except RuntimeError as error:
        raise owner.failure(terms.name, error) from error
    wanted = owner.hosted(intervals(sinks), terms.kinds[1])
    outs = [sum_padded_part(rows, all_lengths, interval, reduce) for interval in wanted]
    return [*outs, all_lengths]


def gather_padded(engine: Engine, x: Tensor, lengths: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
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
    said = {"dtype": str(x.dtype), "S_MAX": x.shape[1], "trailing shape": tuple(x.shape[2:]), "op": terms.op}
    said |= {"scale": repr(terms.scale), "out_dtype": str(terms.dtype)}
    engine.wire.begin(stamp(terms.name, said), engine.call())
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
        return out.fill_(reduce.empty)
    lengths = lengths - begin if begin else lengths
    kernels.sum_padded_device(out, readable(part), None, lengths, reduce.op == "mean", reduce.scale, False)
    return out


def _exchange_padded_fake(x: Tensor, lengths: Tensor, sinks: list[int], *tail: Any) -> list[Tensor]:
    terms = Terms(*tail)
    wanted = terms.owner.hosted(intervals(sinks), terms.kinds[1])
    outs = [x.new_empty((e - b, *x.shape[2:]), dtype=terms.dtype) for b, e in wanted]
    return [*outs, x.new_empty((gathered_rows(terms.owner.engine),), dtype=torch.int64)]


def gathered_rows(engine: Engine) -> int:
    """R' of :func:`gather_padded`; R by peers."""
    if engine.peers is not None and engine.transport != "gather":
        return len(engine.owners)
    slots = max(engine.owners.count(p) for p in range(engine.world_size))
    ordered = engine.wire is None or _row_order(engine.owners, slots) is not None
    return len(engine.owners) if ordered else engine.world_size * slots


exchange_padded = define(
    f"exchange_padded(Tensor x, Tensor lengths, SymInt[] sinks, {Terms.SCHEMA}",
    _exchange_padded,
    _exchange_padded_fake,
)


def _padded_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, lengths, ctx.sinks, *tail = inputs
    ctx.save_for_backward(lengths.clone(), output[-1])
    ctx.capacity, ctx.dtype, ctx.device, ctx.terms = x.shape[1], x.dtype, x.device, Terms(*tail)
    ctx.owner = ctx.terms.owner  # the group lives until its last backward


def _padded_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    """Cotangents come to every source whole (its length is not known on the host), then the length selects."""
    lengths, all_lengths = ctx.saved_tensors
    owner, terms = ctx.owner, ctx.terms
    outs = [g.contiguous() for g in grads[:-1]]
    acc = accumulator_dtype(ctx.dtype)
    end = max(ctx.sinks[1::2])
    if terms.grad == "identity":
        whole = [outs[0]] * len(owner.virtual_ranks)
    else:
        held = [0, end] * owner.num_virtual_ranks
        outs = [g.to(acc) for g in outs] if acc == torch.float64 else outs
        whole = exchange(outs, ctx.sinks, held, None, end, *terms.adjoint("sum", None, acc))
    count = None
    if terms.op == "mean":
        count = (torch.arange(end, device=ctx.device) < all_lengths.clamp(0, ctx.capacity)[:, None]).sum(0)
    if count is not None or terms.scale is not None:
        whole = [finish_gradient(w.to(acc), count, terms.scale, ctx.dtype) for w in whole]
    rows = torch.stack([w.to(ctx.dtype) for w in whole])
    if end < ctx.capacity:
        rows = torch.cat([rows, rows.new_zeros((rows.shape[0], ctx.capacity - end, *rows.shape[2:]))], 1)
    valid = torch.arange(ctx.capacity, device=ctx.device) < lengths[:, None]
    return operators.select(valid, rows[:, : ctx.capacity]), *[None] * 9


exchange_padded.differentiate(_padded_setup, _padded_backward)
