"""The gradients of one FSDP module: by which of FSDP's interfaces they reach the sum of :mod:`shardsum.training.fsdp`.

FSDP offers two: a reduce-scatter of its own, and a hook that runs after all reductions and may change their result.
"""

# No postponed annotations: torch looks at those of collectives.
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def allocate(size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The buffers that FSDP fills and reads: plain tensors."""
    return torch.empty(*size, dtype=dtype, device=device)


class ModuleReduction:
    """Of a module that is sharded over several processes, and not replicated by torch.

    Args:
        reduce: ``reduce(out, gradients, group, op, async_op, label)`` puts this process's part of the sum into ``out``.
        name: of the module; errors name it, and calls of another module never meet its own.
        parameters: of the module, by name.
    """

    def __init__(self, reduce: Callable[..., None], name: str, parameters: dict[str, nn.Parameter]) -> None:
        self._reduce, self._name, self._parameters = reduce, name or "the root", parameters

    def install(self, module: Any) -> None:
        """Make ``module`` reduce by this object, and pass plain sums."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(self)

    allocate = staticmethod(allocate)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        try:
            self._reduce(output_tensor, input_tensor, group, op, async_op, f"gradients of {self._name}")
        except (ValueError, RuntimeError) as error:
            if op != dist.ReduceOp.SUM or async_op:
                raise
            parameters = ", ".join(f"{name} {list(p.shape)}" for name, p in self._parameters.items())
            raise type(error)(
                f"gradients of FSDP module {self._name} (parameters {parameters}): {error}. Where processes differ, "
                "some of them have used a module or a parameter in this step that others have not (or frozen it): "
                "model.set_reduce_scatter_unused_params(True) where torch has it covers parameters of a module that "
                "all processes run; else add 0 * module(...).sum() to the loss of those that do not need it"
            ) from error
        self._reduced(output_tensor)

    def _reduced(self, output: Tensor) -> None:
        """What comes after a sum."""


class ReplicatedReduction(ModuleReduction):
    """Of a module that torch replicates: the sum is over all replicas already, and torch adds it over them once more.

    So the sum waits here until torch's all_reduce is over, and replaces its result. With
    ``set_requires_all_reduce(False)`` torch keeps the outputs of micro-batches, adds them, and takes the total into
    the all_reduce that comes next. The total here is the same sum, in the same order and dtype.
    """

    _total: Tensor | None = None
    #: Torch holds the first output of a window of micro-batches as long as it goes on (``reset_iter_state`` ends it).
    _first: weakref.ref[Tensor] | None = None

    def install(self, module: Any) -> None:
        super().install(module)
        module.set_all_reduce_hook(self._replace)

    def _reduced(self, output: Tensor) -> None:
        if self._total is None or self._first is None or self._first() is None:
            self._total, self._first = output.clone(), weakref.ref(output)
        else:
            self._total += output

    def _replace(self, reduced: Tensor) -> None:
        """FSDP's all-reduce hook."""
        assert self._total is not None  # FSDP has called this object just now
        reduced.copy_(self._total)
        if reduced.is_cuda:  # made on the stream of the reduce-scatter
            self._total.record_stream(torch.cuda.current_stream(reduced.device))
        self._total = self._first = None


class UnshardedReduction(ModuleReduction):
    """Of a module that is "sharded" over one process: FSDP calls no reduce-scatter there, but the hook.

    Args:
        group: that process.
    """

    def __init__(self, *of_module: Any, group: dist.ProcessGroup) -> None:
        super().__init__(*of_module)
        self._group = group

    def install(self, module: Any) -> None:
        super().install(module)
        module.set_all_reduce_hook(self._sum)

    def _sum(self, gradients: Tensor) -> None:
        self(gradients, gradients.clone(), self._group, dist.ReduceOp.SUM)


def own_parameters(model: nn.Module, name: str, modules: dict[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters of an FSDP module that no FSDP module inside it has, by their names in the model."""
    prefix = f"{name}." if name else ""
    inner = tuple(f"{other}." for other in modules if other != name and other.startswith(prefix))
    return {n: p for n, p in model.named_parameters() if n.startswith(prefix) and not n.startswith(inner)}
