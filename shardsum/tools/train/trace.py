"""``--trace``: a hash of everything a step computes, so that two runs can be compared step by step.

``trace.jsonl`` has a line per step: ``step``, and hashes of the ``loss``, of the ``loss_per_position``, of every
``gradient.NAME`` as it was before clipping (clipping multiplies all of them by one number) and of every ``model.NAME``
after the step. ``trace.safetensors`` has the gradients of the last step themselves. Equal hashes are equal bits
(:func:`shardsum.bits.digest`, the first 16 digits).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialize
from torch import Tensor, nn

from ...core import bits
from .folder import RunFolder, read_file

HASHES, VALUES = "trace.jsonl", "trace.safetensors"


class Trace:
    """The trace of a step under way: :meth:`gradients` before clipping, then :meth:`line` after the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values: dict[str, Tensor] = {}

    def gradients(self) -> None:
        self.values = {
            f"gradient.{name}": p.grad.detach().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def line(self, step: int, loss: Tensor, loss_per_position: Tensor) -> dict[str, Any]:
        """The line of trace.jsonl."""
        tensors = {"loss": loss, "loss_per_position": loss_per_position, **self.values}
        tensors |= {f"model.{name}": p for name, p in self.model.named_parameters()}
        return {"step": step, "hashes": {name: bits.digest(t)[:16] for name, t in tensors.items()}}

    def save(self, folder: RunFolder, steps: int) -> None:
        """Write trace.safetensors, if there was a step. Raises OSError."""
        if not self.values:
            return
        values = {name: t.cpu().contiguous() for name, t in self.values.items()}
        folder.replace(VALUES, serialize(values, {"steps": str(steps)}))


def read_trace(folder: Path) -> dict[int, dict[str, str]]:
    """The hashes of each step; empty without a trace. Raises ValueError for a file that is none."""
    try:
        lines = read_file(folder / HASHES).splitlines()
    except FileNotFoundError:
        return {}
    try:
        rows = [json.loads(line) for line in lines]
        return {int(row["step"]): dict(row["hashes"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / HASHES} is damaged: a line is not the trace of a step") from error
