"""How an operator is registered with torch: what torch.compile, fake tensors and dispatch modes see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..native import loader as native

_library = torch.library.Library("shardsum", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register ``shardsum::<schema>`` with its implementation and fake; returns the operator."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")

    def fake_and_load(*args: Any) -> Any:
        native.load()  # tracing runs this as plain Python: the library is there when the compiled code runs
        return fake(*args)

    torch.library.register_fake(f"shardsum::{name}", fake_and_load, lib=_library)
    return getattr(torch.ops.shardsum, name).default


def differentiate(operator: Any, setup: Callable[[Any, tuple, Any], None], backward: Callable[..., tuple]) -> None:
    """Register a gradient: ``setup`` and ``backward`` as of :func:`torch.library.register_autograd`. That walks all
    arguments as trees at every call, in need of a gradient or not: eager code has an autograd function of its own."""
    torch.library.register_autograd(operator, backward, setup_context=setup, lib=_library)
