"""The native operators of the peer transport: what stands below a plan (csrc/peer/bindings.cpp).

``peer_call(Tensor(a!) out, Tensor shard, Tensor plan) -> ()``
    One call with one row and one output on this process. ``plan`` comes from ``peer_bind``: a CPU int64 tensor that
    holds all that is common to such calls, ready to launch. Checked against it: device, dtype, shape (the shard may
    have more positions than its row), contiguity, and that the two share no memory. Tensors with lazy signs are
    refused. Gradients are not checked: the caller has decided that none is needed, and counts the write to
    ``out`` (``torch.autograd.graph.increment_version``).
``peer_call_new(Tensor shard, Tensor plan) -> Tensor``
    The same with a new ``out``.
``peer_call_new.list(Tensor[] shards, Tensor plan) -> Tensor[]``
    The same with any number of rows and outputs on this process.
``peer_bind(Tensor plan, int[] bounds, int[] row_shape, Tensor shard, Tensor out, int state) -> Tensor``
    Makes such a plan: :meth:`.prepared.PreparedCall.bind`. ``shard`` and ``out`` give dtype and device alone; ``state``
    is the address of the group's state, or 0.
``peer_run(Tensor(a!)[] outs, Tensor[] shards, int[] bounds, Tensor? lengths, int number, plan,``
``Tensor? accumulators, int carried, Tensor(c!)[] headers) -> ()``
    Any number of rows and outputs: :meth:`.prepared.PreparedCall.__call__`.

Shared with the group is its *state*, one int64 in memory that both sides hold (a CPU tensor of one element, which must
outlive its plans): the bit ``FAILED``, and in ``NUMBER`` how many calls the group has made. The group writes the
number before each call. ``peer_call`` sets the bit where the transport has failed, begins only where it is clear, and
adds 1 to the number once it has launched. That number and the plan's signature travel with the bounds of every row, and
each process compares them with its own before it adds anything: where they differ the call fails on all processes.
(Without a state the number is 0.)

Every refusal is a RuntimeError (NotImplementedError where no kernel takes such tensors). Then nothing has happened and
the number is as before, unless ``FAILED`` is set now: the group has failed, or the launch itself did, and the
transport's ``check()`` or CUDA says why.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

#: Bits of a group's state: its transport has failed; the number of calls.
FAILED, NUMBER = 1 << 62, (1 << 48) - 1
#: The most dimensions of a position that ``peer_bind`` takes.
MAX_ROW_DIMS = 15
#: The layout of a plan's words (csrc/peer/plan.h).
PLAN_VERSION = 6

#: csrc/row_table.h
DTYPE_CODES = {
    torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.uint8: 4, torch.int8: 5,
    torch.int16: 6, torch.int32: 7, torch.int64: 8, torch.bool: 9,
}  # fmt: skip

_library = torch.library.Library("shardsum", "FRAGMENT")
_library.define(
    "peer_run(Tensor(a!)[] outs, Tensor[] shards, int[] bounds, Tensor? lengths, int number, "
    "Tensor(b!) plan, Tensor? accumulators, int carried, Tensor(c!)[] headers) -> ()"
)
_library.define("peer_bind(Tensor plan, int[] bounds, int[] row_shape, Tensor shard, Tensor out, int state) -> Tensor")
_library.define("peer_call(Tensor(a!) out, Tensor shard, Tensor plan) -> ()")
_library.define("peer_call_new(Tensor shard, Tensor plan) -> Tensor")
_library.define("peer_call_new.list(Tensor[] shards, Tensor plan) -> Tensor[]")


def _refuse(*args: Any) -> NoReturn:
    raise RuntimeError("shardsum: a call over peer memory takes no tensors with lazy signs or zeros")


for _name in ("peer_call", "peer_call_new", "peer_call_new.list"):
    for _key in ("Negative", "Conjugate", "ZeroTensor"):  # PyTorch's own fallback would hand over copies
        _library.impl(_name, _refuse, _key)
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradCUDA")

# OpOverload.__call__ only forwards to _op.
peer_run = torch.ops.shardsum.peer_run.default._op
peer_bind = torch.ops.shardsum.peer_bind.default._op
peer_call = torch.ops.shardsum.peer_call.default._op
peer_call_new = torch.ops.shardsum.peer_call_new.default._op
peer_call_new_list = torch.ops.shardsum.peer_call_new.list._op
