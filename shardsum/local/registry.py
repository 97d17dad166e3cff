"""How a functional operator is registered with torch, and how it is called.

Registered operators are what torch.compile, fake tensors and dispatch modes see. Their registered autograd walks all
arguments as trees, which takes a tenth of a millisecond a call; eager calls therefore go past the dispatcher, with the
same implementation, the same ``setup`` and the same ``backward`` in an autograd function of their own.

The first argument of every operator is a Tensor or a list of Tensors, and the only one with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..native import loader as native

library = torch.library.Library("shardsum", "FRAGMENT")
_PLAIN = {Tensor, Parameter}


def _is_batched(x: Tensor) -> bool:
    """Whether x may stand for a batch: under torch.func, or as a gradient with ``is_grads_batched``."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(x)


class Operator:
    """``shardsum::<name>``; call it. Made by :func:`define`.

    Attributes:
        overload: the registered operator.
    """

    def __init__(self, name: str, overload: Any, implementation: Callable[..., Any]) -> None:
        self.overload = overload
        self._has_vmap = "Tensor[]" not in str(overload._schema)  # torch's own, one call for each of the batch
        self._name, self._implementation = name, implementation
        self._setup: Callable[..., None] | None = None
        self._backward: Callable[..., tuple] | None = None

    def differentiate(self, setup: Callable[[Any, tuple, Any], None], backward: Callable[..., tuple]) -> None:
        """Register the gradient: ``setup`` and ``backward`` as of :func:`torch.library.register_autograd`."""
        self._setup, self._backward = setup, backward
        torch.library.register_autograd(f"shardsum::{self._name}", backward, setup_context=setup, lib=library)

    def __call__(self, first: Any, *rest: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.overload(first, *rest)
        if self._has_vmap and _is_batched(first):
            return self.overload(first, *rest)
        tensors = [first] if isinstance(first, Tensor) else first
        if not {*map(type, tensors)} <= _PLAIN:  # a subclass has a say in what happens
            return self.overload(first, *rest)
        if self._setup is None or not torch.is_grad_enabled():
            return self._implementation(first, *rest)
        result = _Eager.apply(self, tensors is first, rest, *tensors)
        return list(result) if isinstance(result, tuple) else result


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, listed: bool, rest: tuple, *tensors: Tensor) -> Any:  # type: ignore[override]
        first = list(tensors) if listed else tensors[0]
        result = operator._implementation(first, *rest)
        ctx.operator, ctx.listed, ctx.returns_list = operator, listed, isinstance(result, list)
        assert operator._setup is not None
        operator._setup(ctx, (first, *rest), result)
        return tuple(result) if ctx.returns_list else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        first, *_ = ctx.operator._backward(ctx, list(grads) if ctx.returns_list else grads[0])
        return None, None, None, *(first if ctx.listed else [first])


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Operator:
    """Register ``shardsum::<schema>`` with its implementation and fake."""
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")

    def fake_and_load(*args: Any) -> Any:
        native.load()  # tracing runs this as plain Python: the library is there when the compiled code runs
        return fake(*args)

    torch.library.register_fake(f"shardsum::{name}", fake_and_load, lib=library)
    return Operator(name, getattr(torch.ops.shardsum, name).default, implementation)
