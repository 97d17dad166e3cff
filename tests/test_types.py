"""What a type checker says of a user's code: Tensors and lists by overload, and wrong words are errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Lines that end in ``# E: text`` must have an error that holds the text; no other line may have one. The flags are
#: those of ``mypy --strict`` that concern this file alone, so that the cache of an ordinary run of mypy serves.
SNIPPET = """\
# mypy: disallow-any-generics, disallow-untyped-calls, disallow-subclassing-any, warn-return-any, strict-equality
from typing_extensions import assert_type
import torch
from torch import Tensor
from shardsum import MaskedSum, ShardGroup, context_parallel_attention, masked_sum, ragged_sum
from shardsum.group.handle import Handle

group = ShardGroup(4)
x, xs = torch.ones(3), [torch.ones(3)] * 4
assert_type(group.all_reduce(xs, [3] * 4), Tensor)
assert_type(group.all_reduce(x, async_op=True), Handle[Tensor])
assert_type(group.reduce_scatter(x, [3] * 4), Tensor)
assert_type(group.reduce_scatter(xs, [3] * 4, splits=[1, 1, 1, 0]), list[Tensor])
assert_type(group.reduce_scatter(xs, async_op=True).wait(), list[Tensor])
assert_type(group.all_gather(xs, grad="identity"), Tensor)
assert_type(group.exchange(x, [(0, 3)] * 4, [(0, 3)] * 4, size=3), Tensor)
assert_type(group.exchange(xs, [(0, 3)] * 4, [(0, 3)] * 4, size=3), list[Tensor])
assert_type(group.plan("all_reduce", [3] * 4)(xs), Tensor)
assert_type(group.plan("reduce_scatter", [3] * 4, op="mean")(xs), list[Tensor])
assert_type(group.plan("reduce_scatter", [3] * 4)(x), Tensor)
assert_type(group.plan("reduce_scatter", [3] * 4).start(xs).wait(), list[Tensor])
assert_type(context_parallel_attention(x, x, x, group), Tensor)
cp = group.context_parallel([3] * 4)
assert_type(cp.attention(x, x, x), Tensor)
assert_type(cp.attention(xs, xs, xs, scale=1.0), list[Tensor])
assert_type(cp.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cp.attention(xs, xs, xs, return_lse=True), tuple[list[Tensor], list[Tensor]])
assert_type(MaskedSum(torch.ones(4, 3, dtype=torch.bool))(torch.ones(4, 3)), Tensor)
assert_type(ragged_sum(xs), Tensor)

group.all_reduce(xs, op="avg")  # E: No overload
ragged_sum(xs, op="avg")  # E: incompatible type
masked_sum(x, x, op="avg")  # E: incompatible type
group.reduce_scatter(xs, op="avg")  # E: No overload
group.all_gather(xs, op="sum")  # E: No overload
group.exchange(xs, [(0, 3)] * 4, [(0, 3)] * 4)  # E: No overload
group.plan("all_reduce", [3] * 4, splits=[3])  # E: No overload
group.plan("all_to_all", [3] * 4)  # E: No overload
group.token_mean(x, 3, grad="mean")  # E: incompatible type
ShardGroup(4, transport="nccl")  # E: incompatible type
ShardGroup(4, placement="zig-zag")  # E: incompatible type
ShardGroup(4, check="never")  # E: incompatible type
cp.attention(x, x, x, return_lse=True, causal=True)  # E: No overload
"""


def test_a_users_snippet(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run([*command, str(tmp_path / "snippet.py")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[int, str] = {}
    for line, text in re.findall(r"snippet\.py:(\d+): error: (.*)", done.stdout):
        found[int(line)] = found.get(int(line), "") + text
    wanted = {i: line.split("# E: ")[1] for i, line in enumerate(SNIPPET.splitlines(), 1) if "# E: " in line}
    assert found.keys() == wanted.keys(), done.stdout
    assert all(text in found[line] for line, text in wanted.items()), done.stdout
