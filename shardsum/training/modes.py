"""State of the thread that a function of a lockstep changes by context managers, and that is switched with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack


def is_compiled() -> bool:
    """Whether this is code under torch.compile: being traced, or run as it is where tracing broke off."""
    if torch.compiler.is_compiling():
        return True
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


@dataclass(frozen=True)
class Modes:
    """Attributes:
    grad: grad mode.
    autocast: ``(device type, enabled, dtype)`` of the CPU and the group's device, then the cache's flag.
    stacks: what cannot be switched, only compared: inference mode, hooks on saved tensors, modes of torch.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    stacks: tuple[Any, ...] = field(compare=False)

    @classmethod
    def now(cls, device: torch.device) -> Modes:
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        stacks = (
            torch.is_inference_mode_enabled(),
            hooks,
            _len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        )
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), stacks)

    def set(self) -> None:
        torch._C._set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    def __str__(self) -> str:
        on = [f"{kind} {dtype}" for kind, enabled, dtype in self.autocast if enabled]
        return f"grad {'on' if self.grad else 'off'}, autocast {', '.join(on) or 'off'}"
