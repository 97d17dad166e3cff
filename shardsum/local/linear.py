"""Linear operators with their adjoints: registered with torch, differentiable backward, forward and under vmap.

:func:`define` registers ``shardsum::<name>``, linear in its first argument (a Tensor or a list of Tensors);
:func:`link` makes another one its adjoint. A call of it from Python takes one of three ways:

* torch.compile, dispatch modes, fake tensors and subclasses see the registered operator and its registered autograd;
* where a gradient, a tangent or a transform of torch.func is at work, an autograd function is with rules for backward,
  forward mode and batches (a registered autograd takes the host several times as long, and has no such rules);
* else the implementation runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import registry

_PLAIN = {Tensor, Parameter}


class LinearOperator:
    """``shardsum::<name>``; call it. Made by :func:`define`.

    Attributes:
        overload: the registered operator.
        implementation: what it runs.
        adjoint: the operator that maps a cotangent of the result to one of the first argument.
    """

    adjoint: LinearOperator
    _arguments: Callable[[Any, list[Any]], list[Any]]

    def __init__(self, overload: Any, implementation: Callable[..., Any]) -> None:
        self.overload, self.implementation = overload, implementation
        self.takes_list, self.returns_list = ("Tensor[]" in part for part in str(self.overload._schema).split("->"))

    def __call__(self, first: Any, *rest: Any) -> Any:
        tensors = [first] if isinstance(first, Tensor) else first
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not {*map(type, tensors)} <= _PLAIN:
            return self.overload(first, *rest)
        lists = self.takes_list or self.returns_list
        if not lists and torch._C._functorch.is_legacy_batchedtensor(first):  # a batch of cotangents
            return self.overload(first, *rest)
        transformed = torch._C._are_functorch_transforms_active()
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not (transformed or grad or forward_ad._current_level >= 0):
            return self.implementation(first, *rest)
        result = (_Transformed if transformed else _Eager).apply(self, rest, *tensors)
        return list(result) if isinstance(result, tuple) else result

    def applied(self, tensors: Sequence[Tensor], rest: Sequence[Any]) -> Any:
        """What an autograd function returns: a Tensor or a tuple of them."""
        result = self.implementation(list(tensors) if self.takes_list else tensors[0], *rest)
        return tuple(result) if self.returns_list else result


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> LinearOperator:
    """Register ``shardsum::<schema>``; its arguments are ``(first, *middle, op, scale, dtype)``."""
    return LinearOperator(registry.define(schema, implementation, fake), implementation)


def link(operator: LinearOperator, adjoint: LinearOperator, arguments: Callable[[Any, list[Any]], list[Any]]) -> None:
    """Make ``adjoint`` the backward of ``operator``; ``arguments(first, middle)`` gives its middle arguments."""
    operator.adjoint, operator._arguments = adjoint, arguments

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        _keep(ctx, operator, inputs[0] if operator.takes_list else inputs[:1], inputs[1:])

    def backward(ctx: Any, grad: Any) -> tuple:
        return _pull_back(ctx, grad), *[None] * len(ctx.own)

    registry.differentiate(operator.overload, setup, backward)


def _keep(ctx: Any, operator: LinearOperator, tensors: Sequence[Tensor], rest: Sequence[Any]) -> None:
    """Keep what the adjoint and the tangent need, index tensors and masks as saved tensors: both take the same ones."""
    *middle, op, scale, _ = rest
    adjoint = operator._arguments(tensors if operator.takes_list else tensors[0], middle)
    ctx.operator, ctx.own, ctx.adjoint = operator, list(rest), [*adjoint, op, scale, tensors[0].dtype]
    ctx.shapes = [t.shape for t in tensors]
    # Lengths are cloned: the caller may write the next step's before this step's backward.
    kept = [a.clone() if a.dim() == 1 else a for a in rest if isinstance(a, Tensor)]
    if kept:
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)


def _with_tensors(arguments: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    saved = iter(tensors)
    return [next(saved) if isinstance(a, Tensor) else a for a in arguments]


def _pull_back(ctx: Any, grad: Any) -> Any:
    # An expanded gradient (stride 0, from a following sum) becomes memory that the kernels can read.
    grad = [g.contiguous() for g in grad] if isinstance(grad, (list, tuple)) else grad.contiguous()
    return ctx.operator.adjoint(grad, *_with_tensors(ctx.adjoint, ctx.saved_tensors))


class _Linear(torch.autograd.Function):
    """``apply(operator, rest, *tensors)``; the tangent of a linear operator is itself of the tangents."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        first = _pull_back(ctx, list(grads) if ctx.operator.returns_list else grads[0])
        return None, None, *(first if ctx.operator.takes_list else [first])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tangents = tangents[2:]
        given = next(t for t in tangents if t is not None)
        whole = [given.new_zeros(shape) if t is None else t for t, shape in zip(tangents, ctx.shapes)]
        first = whole if ctx.operator.takes_list else whole[0]
        result = ctx.operator(first, *_with_tensors(ctx.own, ctx.saved_tensors))
        return tuple(result) if isinstance(result, list) else result


class _Eager(_Linear):
    @staticmethod
    def forward(ctx: Any, operator: LinearOperator, rest: tuple, *tensors: Tensor) -> Any:  # type: ignore[override]
        _keep(ctx, operator, tensors, rest)
        return operator.applied(tensors, rest)


class _Transformed(_Linear):
    """The same under transforms of torch.func, whose form of a function takes the host several times as long."""

    @staticmethod
    def forward(operator: LinearOperator, rest: tuple, *tensors: Tensor) -> Any:  # type: ignore[override]
        return operator.applied(tensors, rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        operator, rest, *tensors = inputs
        _keep(ctx, operator, tensors, rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, operator: LinearOperator, rest: tuple, *tensors: Tensor) -> tuple[Any, Any]:
        """One call with the batch as the last dimension of the trailing shape."""
        if any(isinstance(dim, int) for dim in in_dims[1]):
            raise ValueError("vmap: shards can be a batch; lengths, starts and masks are the same for all of it")
        batch = [
            t[..., None].expand(*t.shape, info.batch_size) if dim is None else t.movedim(dim, -1)
            for t, dim in zip(tensors, in_dims[2:])
        ]
        result = operator(batch if operator.takes_list else batch[0], *rest)
        if isinstance(result, list):
            return tuple(result), tuple(t.dim() - 1 for t in result)
        return result, result.dim() - 1
