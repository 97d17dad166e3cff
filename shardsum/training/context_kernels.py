"""Attention of one chunk to the keys and values it needs, forward and backward, nothing sent.

Which kernel runs follows from dtype, device, head dimensions and window alone, since bits must not depend on what torch
finds fastest:

    flash      fp16, bf16 on a GPU, equal head dimensions up to 256: one variable-length call for all documents
    efficient  fp32 on a GPU, and what flash lacks: one variable-length call of the memory-efficient kernel
    cpu        SDPA's flash kernel on a CPU, documents of equal shape in one call
    math       the rest (fp64 on a GPU, a window with "efficient", unequal head dimensions on a CPU), likewise

They call torch's operators below ``torch.nn.attention.varlen`` and ``scaled_dot_product_attention``, since forward and
backward stand apart here: backward may run on keys and values that were sent anew. Grouped-query heads need no copy of
K and V in "flash" and "cpu". The backward of "flash" and "efficient" is deterministic where torch is told to be.

All take q ``(rows, heads, dim)``, k ``(keys, key_heads, dim)``, v ``(keys, key_heads, value_dim)``, with any strides,
and give out ``(rows, heads, value_dim)`` and the log-sum-exp of the scores ``(heads, rows)``. "math" has none (zeros):
its backward computes the forward again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .context_chunks import Call, Chunk, Shape
from .documents import CAUSAL, UNLIMITED, Window

_aten = torch.ops.aten


def kernel_of(q: Tensor, v: Tensor, window: Window) -> str:
    """The name of the kernel that runs."""
    same = q.shape[-1] == v.shape[-1]
    if not q.is_cuda:
        return "cpu" if same and q.shape[-1] > 0 else "math"
    if q.dtype in (torch.float16, torch.bfloat16) and same and q.shape[-1] <= 256 and _has_flash(q.device):
        return "flash"
    return "efficient" if q.dtype != torch.float64 and window in (CAUSAL, UNLIMITED) else "math"


def has_lse(kernel: str) -> bool:
    return kernel != "math"


@lru_cache(maxsize=64)
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Results of :func:`forward` to fill."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1])), q.new_zeros((q.shape[1], q.shape[0]), dtype=kind)


def forward(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scale: float | None) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, contiguous."""
    kernel = kernel_of(q, v, chunk.window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    run = _flash_forward if kernel == "flash" else _efficient_forward
    if kernel in ("flash", "efficient") and len(chunk.calls) == 1:
        return run(q, k, v, chunk.calls[0], scale)
    out, lse = empty_results(q, v)
    if q.shape[0] == 0:
        return out, lse
    if kernel in ("flash", "efficient"):
        for call in chunk.calls:
            rows, keys = call.queries, call.keys
            out[rows], lse[:, rows] = run(q[rows], k[keys], v[keys], call, scale)
        return out, lse
    q, k, v = map(_rows_in_one_piece, (q, k, v))
    for shape, places in chunk.shapes:
        query, key, value = _batch(q, k, v, shape, places)
        if kernel == "cpu":
            mask, causal = _mask(shape, chunk.window, q)
            some, log = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=mask, scale=scale
            )
            for i, (row, _) in enumerate(places):
                lse[:, row : row + shape.queries] = log[i]
        else:
            some = _math(query, key, value, shape, chunk.window, scale)
        for i, (row, _) in enumerate(places):
            out[row : row + shape.queries] = some[i].transpose(0, 1)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chunk: Chunk,
    scale: float | None,
    lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, contiguous, of the inputs' dtypes. ``lse_grad``: ``(heads, rows)``; None is zero."""
    kernel = kernel_of(q, v, chunk.window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if lse_grad is not None:
        return _backward_of_both(grad, q, k, v, out, lse, chunk, scale, lse_grad)
    run = _flash_backward if kernel == "flash" else _efficient_backward
    if kernel in ("flash", "efficient") and len(chunk.calls) == 1:
        grads = run(grad, q, k, v, out, lse, chunk.calls[0], scale)
        return tuple(g.contiguous() for g in grads)  # type: ignore[return-value]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0:
        return dq, dk.zero_(), dv.zero_()
    if kernel in ("flash", "efficient"):
        for call in chunk.calls:
            rows, keys = call.queries, call.keys
            part = lse[:, rows].contiguous()
            dq[rows], dk[keys], dv[keys] = run(grad[rows], q[rows], k[keys], v[keys], out[rows], part, call, scale)
        return dq, dk, dv
    q, k, v = map(_rows_in_one_piece, (q, k, v))
    for shape, places in chunk.shapes:
        query, key, value = _batch(q, k, v, shape, places)
        (cotangent,) = _pieces([row for row, _ in places], shape.queries, grad)
        if kernel == "cpu":
            mask, causal = _mask(shape, chunk.window, q)
            (some,) = _pieces([row for row, _ in places], shape.queries, out)
            log = torch.stack([lse[:, row : row + shape.queries] for row, _ in places])
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                cotangent, query, key, value, some, log, 0.0, causal, attn_mask=mask, scale=scale
            )
        else:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (query, key, value)]
                again = _math(inputs[0], inputs[1], inputs[2], shape, chunk.window, scale)
                parts = torch.autograd.grad(again, inputs, cotangent)
        for i, (row, at) in enumerate(places):
            dq[row : row + shape.queries] = parts[0][i].transpose(0, 1)
            dk[at : at + shape.keys], dv[at : at + shape.keys] = (p[i].transpose(0, 1) for p in parts[1:])
    return dq, dk, dv


def _backward_of_both(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chunk: Chunk, scale: float, of_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernels know no gradient of the log-sum-exp, but all take ``sum(grad * out)`` of a row from the gradient of its
    scores, and that of the log-sum-exp is to be added there. So heads get more columns: zeros in q, k, v, which change
    nothing, ones in ``grad``, and in ``out`` minus that gradient, in as many parts as hold all of its digits."""
    (dim, value_dim), parts, rest = (q.shape[-1], v.shape[-1]), [], -of_lse.t()
    for _ in range(3 if q.dtype in (torch.float16, torch.bfloat16) else 1):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1]
    more = -(-len(parts) // 8) * 8
    wide = [F.pad(x, (0, more)) for x in (grad, q, k, v, out)]
    if not has_lse(kernel_of(wide[1], wide[3], chunk.window)):
        raise ValueError(f"return_lse: no gradient of it for head dim {dim} in {q.dtype} with window {chunk.window}")
    columns = slice(value_dim, value_dim + len(parts))
    wide[0][..., columns], wide[4][..., columns] = 1, torch.stack(parts, -1)
    dq, dk, dv = backward(wide[0], wide[1], wide[2], wide[3], wide[4], lse, chunk, scale)
    return _first(dq, dim), _first(dk, dim), _first(dv, value_dim)


# One variable-length call


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    b, dim = call.borders(q.device), v.shape[-1]
    out, lse, *_ = _aten._flash_attention_forward(
        *map(_whole_vectors, (q, k, v)), *b[:4], 0.0, b.window == CAUSAL, False, scale=scale, **_sides(b.window)
    )
    return _first(out, dim), lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> Iterator[Tensor]:
    b, dim = call.borders(q.device), q.shape[-1]
    inputs = map(_whole_vectors, (grad, q, k, v, out))
    seed, unused = _no_dropout(q.device)
    grads = _aten._flash_attention_backward(
        *inputs, lse, *b[:4], 0.0, b.window == CAUSAL, seed, unused, scale=scale, **_sides(b.window)
    )
    return (_first(g, dim) for g in grads)


def _sides(window: Window) -> dict[str, int]:
    return {"window_size_left": window[0], "window_size_right": window[1]}


@lru_cache(maxsize=64)
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _efficient_inputs(*xs: Tensor, heads: int) -> list[Tensor]:
    """A batch of one, heads of whole vectors, and a key head for every query head."""
    return [_whole_vectors(x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x)[None] for x in xs]


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    b = call.borders(q.device)
    inputs = _efficient_inputs(q, k, v, heads=q.shape[1])
    out, padded, *_ = _aten._efficient_attention_forward(
        *inputs, None, *b[:4], 0.0, 2 if b.window == CAUSAL else 0, True, scale=scale
    )
    document, position = call.rows(q.device)
    return out[0, ..., : v.shape[-1]].contiguous(), padded[document, :, position].t().contiguous()


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> tuple[Tensor, ...]:
    b, heads = call.borders(q.device), q.shape[1]
    document, position = call.rows(q.device)
    padded = lse.new_full((len(call.segments), heads, -(-call.max_q // 32) * 32), math.inf)
    padded[document, :, position] = lse.t()
    inputs = _efficient_inputs(grad, q, k, v, heads=heads)
    (given,) = _efficient_inputs(out, heads=heads)
    seed = offset = torch.empty((), dtype=torch.int64, device=q.device)
    grads = _aten._efficient_attention_backward(
        *inputs, None, given, *b[:4], padded, 0.0, seed, offset, 2 if b.window == CAUSAL else 0, False,
        scale=scale, num_splits_key=1 if torch.are_deterministic_algorithms_enabled() else None,
    )  # fmt: skip
    dq, dk, dv = (g[0, ..., : x.shape[-1]] for g, x in zip(grads, (q, k, v)))
    groups = heads // k.shape[1]
    return dq, *(g.unflatten(1, (-1, groups)).sum(2) if groups > 1 else g for g in (dk, dv))


def _first(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` of each head, contiguous."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()


def _whole_vectors(x: Tensor) -> Tensor:
    """Zeros that fill a head up to a multiple of 8 change no score and no value."""
    x = _rows_in_one_piece(x)
    return x if x.shape[-1] % 8 == 0 else F.pad(x, (0, -x.shape[-1] % 8))


# Documents of one shape


def _rows_in_one_piece(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pieces(starts: Sequence[int], rows: int, *xs: Tensor) -> list[Tensor]:
    """``(documents, heads, rows, dim)``: views where there is one document."""
    pieces = []
    for x in xs:
        if len(starts) == 1:
            some = x[starts[0] : starts[0] + rows][None]
        else:
            some = torch.stack([x[start : start + rows] for start in starts])
        pieces.append(some.transpose(1, 2))
    return pieces


def _batch(q: Tensor, k: Tensor, v: Tensor, shape: Shape, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    queries = _pieces([row for row, _ in places], shape.queries, q)
    return queries + _pieces([key for _, key in places], shape.keys, k, v)


def _additive(shape: Shape, window: Window, like: Tensor) -> Tensor:
    """``(queries, keys)``: 0 where a query sees a key, else -inf."""
    n, m, ahead = shape
    left, right = window
    own = m - ahead - n  # the key at which the first query stands
    masks = []
    if right >= 0:
        masks.append(like.new_full((n, m), -math.inf).triu_(own + right + 1))
    if left >= 0:
        masks.append(like.new_full((n, m), -math.inf).tril_(own - left - 1))
    return masks[0] if len(masks) == 1 else masks[0].add_(masks[1])


def _is_plain(shape: Shape, window: Window) -> bool | None:
    """Whether a kernel's own flag says all: False for no mask, True for a causal one; None where a mask is needed."""
    n, m, ahead = shape
    left, right = window
    free = (left < 0 or left >= m - ahead - 1, right < 0 or right >= m - (m - ahead - n) - 1)
    if all(free):
        return False
    return True if free[0] and right == 0 and n == m else None


def _mask(shape: Shape, window: Window, like: Tensor) -> tuple[Tensor | None, bool]:
    """``(mask, causal)`` for SDPA's kernels. The mask is not kept: backward makes it again."""
    plain = _is_plain(shape, window)
    return (_additive(shape, window, like), False) if plain is None else (None, plain)


def _math(q: Tensor, k: Tensor, v: Tensor, shape: Shape, window: Window, scale: float) -> Tensor:
    groups, (mask, causal) = q.shape[1] // k.shape[1], _mask(shape, window, q)
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
