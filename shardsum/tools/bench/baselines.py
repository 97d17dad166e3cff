"""What one would write without shardsum to sum R padded, masked or ragged shards.

eager      (x * m).sum(0) with a bool mask (R, S, 1)
compile    the same through torch.compile, with static shapes
loop       out[:length_r].add_(x[r, :length_r]) for every rank, out in fp32, after out.zero_()
sum fp32   torch.sum(x.view(R, -1), 0, dtype=fp32), which needs padding of zeros
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buffers import BufferCall, Buffers

BASELINES = ("compile", "eager", "loop", "sum fp32")


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
