"""Sums of R padded, masked or ragged shards inside one process: shardsum against what one would write without it.

Variants (all write into a given output, except in "allocating" cases):

shardsum         ragged_sum or masked_sum with out=
device lengths   ragged_sum with out= and lengths in a device tensor (GPU)
MaskedSum        the module with the mask packed to bits; allocates
copy             dst.copy_(src), half the useful bytes read and half written: the ceiling
copy kernel      torch.neg(src, out=dst) (GPU): a copy in a CUDA graph is at times slower, the faster counts
eager            (x * m).sum(0) with a bool mask (R, S, 1)
compile          the same through torch.compile, with static shapes
loop             out[:length_r].add_(x[r, :length_r]) for every rank, out in fp32, after out.zero_()
sum fp32         torch.sum(x.view(R, -1), 0, dtype=fp32), which needs padding of zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import reference
from ...local.functional import masked_sum, ragged_sum
from ...local.module import MaskedSum
from .cases import DTYPES, Case, lengths_of
from .jobs import Job, Variant, rounding
from .timing import rotation

BASELINES = ("compile", "eager", "loop", "sum fp32")
_MOST_COPIES = 32
_MEMORY = {"cpu": 1.6e9, "cuda": 24e9}  # bytes of all shards together


@dataclass
class Buffers:
    """What one call of a local sum reads and writes.

    Attributes:
        x: ``(R, S, H)``, zeros where it is not valid.
        out, wide: ``(S, H)`` of x's dtype and in fp32.
        source, target: the two ends of a copy that moves as many bytes.
    """

    x: Tensor
    out: Tensor
    wide: Tensor
    source: Tensor
    target: Tensor


BufferCall = Callable[[Buffers], Tensor]


def make_buffers(x: Tensor, useful_bytes: int) -> tuple[list[Buffers], bool]:
    """Copies of ``x`` and what belongs to them, as many as :func:`rotation` says, and whether they are cold."""
    most = min(_MOST_COPIES, int(_MEMORY[x.device.type] / max(1, x.nbytes)))
    count, cold = rotation(x.device.type, useful_bytes, most)
    half = max(4, useful_bytes // 8)  # fp32 elements
    buffers = [
        Buffers(
            x if i == 0 else x.clone(),
            torch.empty_like(x[0]),
            torch.empty_like(x[0], dtype=torch.float32),
            torch.rand(half, device=x.device),
            torch.rand(half, device=x.device),  # not empty: first touches of memory are not a copy's
        )
        for i in range(count)
    ]
    return buffers, cold


class Baselines:
    """Those of ``BASELINES`` that are asked for, by name, for one case after another.

    Cases of one shape share what torch.compile made; it is forgotten when the shape changes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._shape: object = None

    def __call__(self, x: Tensor, mask: Tensor, lengths: Sequence[int] | None, new: bool) -> dict[str, BufferCall]:
        """Calls on buffers like ``x``.

        Args:
            x: ``(R, S, H)``.
            mask: bool ``(R, S)``.
            lengths: where the mask is one of lengths.
            new: allocate the result instead of writing to the buffers'.
        """
        select = mask[:, :, None]
        calls: dict[str, BufferCall] = {}
        if "compile" in self.names:
            calls["compile"] = self._compiled(x, select, new)
        if "eager" in self.names:
            calls["eager"] = lambda b: (b.x * select).sum(0) if new else torch.sum(b.x * select, 0, out=b.out)
        if "loop" in self.names and lengths is not None and not new:
            calls["loop"] = lambda b: _loop(b, lengths)
        if "sum fp32" in self.names and not new:
            calls["sum fp32"] = _sum_flat
        return calls

    def _compiled(self, x: Tensor, select: Tensor, new: bool) -> BufferCall:
        shape = (x.shape, x.dtype, new)
        if shape != self._shape:
            torch._dynamo.reset()
            self._shape = shape
        code = torch.compile(_masked if new else _masked_into, dynamic=False)
        return lambda b: code(b.x, select) if new else code(b.x, select, b.out)


def _masked(x: Tensor, select: Tensor) -> Tensor:
    return (x * select).sum(0)


def _masked_into(x: Tensor, select: Tensor, out: Tensor) -> Tensor:
    return out.copy_((x * select).sum(0))


def _loop(b: Buffers, lengths: Sequence[int]) -> Tensor:
    b.wide.zero_()
    for r, n in enumerate(lengths):
        b.wide[:n].add_(b.x[r, :n])
    return b.wide


def _sum_flat(b: Buffers) -> Tensor:
    torch.sum(b.x.view(b.x.shape[0], -1), 0, dtype=torch.float32, out=b.wide.view(-1))
    return b.wide


class Sums:
    """A case on "cpu" or the current CUDA device."""

    def __init__(self, case: Case, device: str, baselines: Baselines) -> None:
        self.case, self.device, self.baselines = case, device, baselines
        self.dtype = DTYPES[case.dtype]
        generator = torch.Generator(device).manual_seed(1)
        shape = (case.num_ranks, case.size, case.width)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
        self.lengths = lengths_of(case)
        if case.operation == "masked_sum":
            self.mask = torch.rand(shape[:2], generator=generator, device=device) < case.fill
        else:
            ends = torch.tensor(self.lengths, device=device)
            self.mask = torch.arange(case.size, device=device) < ends[:, None]
        x.masked_fill_(~self.mask[:, :, None], 0)
        self.valid = int(self.mask.sum()) * case.width
        self.bytes = (self.valid + case.size * case.width) * self.dtype.itemsize
        self.buffers, self.cold = make_buffers(x, self.bytes)
        self.want = self._reference()

    def job(self) -> Job:
        case, modes = self.case, self.case.operation == "modes"
        variants = self._modes() if modes else [*self._ours(), *self._theirs()]
        variants.append(self._variant("copy", self._copy, None))
        if self.device == "cuda":
            variants.append(self._variant("copy kernel", lambda b: torch.neg(b.source, out=b.target), None))
        facts = {
            "case": str(case),
            "operation": case.operation,
            "profile": case.profile,
            "dtype": case.dtype,
            "fill": self.valid / (case.num_ranks * case.size * case.width),
            "num_virtual_ranks": case.num_ranks,
            "size": case.size,
            "width": case.width,
            "processes": 1,
            "bytes": self.bytes,
            "cold": self.cold,
        }
        return Job(facts, variants, self._poison, ("shardsum",) if modes else BASELINES, ("copy", "copy kernel"))

    def _poison(self) -> None:
        for b in self.buffers:
            b.out.fill_(float("nan"))
            b.wide.fill_(float("nan"))

    # Variants

    def _variant(self, name: str, call: BufferCall, want: Tensor | None, tolerance: Tensor | None = None) -> Variant:
        return Variant(name, [partial(call, b) for b in self.buffers], want, tolerance)

    def _copy(self, b: Buffers) -> Tensor:
        return b.source.clone() if self.case.operation == "allocating" else b.target.copy_(b.source)

    def _ours(self) -> list[Variant]:
        mask, lengths, new = self.mask, self.lengths, self.case.operation == "allocating"
        calls: dict[str, BufferCall] = {}
        if self.case.operation == "masked_sum":
            module = MaskedSum(mask)
            calls["shardsum"] = lambda b: masked_sum(b.x, mask, out=b.out)
            calls["MaskedSum"] = lambda b: module(b.x)
        else:
            calls["shardsum"] = lambda b: ragged_sum(b.x, lengths, out=None if new else b.out)
        if self.device == "cuda" and self.case.operation == "ragged_sum":
            on_device = torch.tensor(lengths, device=self.device)
            calls["device lengths"] = lambda b: ragged_sum(b.x, on_device, out=b.out)
        return [self._variant(name, call, self.want) for name, call in calls.items()]

    def _theirs(self) -> list[Variant]:
        lengths = None if self.case.operation == "masked_sum" else self.lengths
        new = self.case.operation == "allocating"
        calls = self.baselines(self.buffers[0].x, self.mask, lengths, new)
        tolerance = self._tolerance() if calls else None
        return [self._variant(name, call, self.want, tolerance) for name, call in calls.items()]

    def _modes(self) -> list[Variant]:
        """The output modes, which should cost what their bytes cost; the baseline is the plain sum."""
        lengths, wide_bytes = self.lengths, self.want.numel() * 4
        first = self.buffers[0]
        variants = [
            self._variant("shardsum", lambda b: ragged_sum(b.x, lengths, out=b.out), self.want),
            self._variant("mean", lambda b: ragged_sum(b.x, lengths, op="mean", out=b.out), self._reference(op="mean")),
            self._variant(
                "scale", lambda b: ragged_sum(b.x, lengths, scale=0.3, out=b.out), self._reference(scale=0.3)
            ),
            self._variant(
                "list of shards",
                lambda b: ragged_sum([row[:n] for row, n in zip(b.x, lengths)], size=self.case.size, out=b.out),
                self.want,
            ),
            self._variant(
                "out fp32", lambda b: ragged_sum(b.x, lengths, out=b.wide), self._reference(out_dtype=torch.float32)
            ),
            self._variant(
                "accumulate fp32",
                lambda b: ragged_sum(b.x, lengths, out=b.wide, accumulate=True),
                self._reference(out_dtype=torch.float32, previous=torch.ones_like(first.wide)),
            ),
        ]
        variants[-2].bytes = self.valid * self.dtype.itemsize + wide_bytes
        variants[-1].bytes = self.valid * self.dtype.itemsize + 2 * wide_bytes
        variants[-1].once = lambda: ragged_sum(first.x, lengths, out=first.wide.fill_(1), accumulate=True)
        return variants

    # What is right

    def _reference(self, **mode: Any) -> Tensor:
        mode.setdefault("out_dtype", self.dtype)
        x = self.buffers[0].x
        if self.case.operation == "masked_sum":
            return reference.masked_sum(x, self.mask, **mode)
        rows = [row[:n] for row, n in zip(x, self.lengths)]
        return reference.ragged_sum(rows, [0] * len(rows), self.case.size, **mode)

    def _tolerance(self) -> Tensor:
        magnitude = torch.zeros_like(self.want, dtype=torch.float32)
        for row in self.buffers[0].x:
            magnitude += row.abs()
        return rounding(self.want, magnitude, self.case.num_ranks, torch.float32)
