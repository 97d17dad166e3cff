"""Documentation: every Python block runs, and every row of the table of losses is right."""

from __future__ import annotations

import doctest
import importlib.util
import linecache
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardsum
from shardsum import ShardGroup
from shardsum.group.plan import Plan
from shardsum.tools.doctor import ENVIRONMENT
from shardsum.training.context_balance import balanced_lengths
from shardsum.training.hooks import FSDPReduceScatter, HookState, ddp_comm_hook
from tests.processes import run_processes

DOCS = Path(__file__).parent.parent / "docs"

#: Pages whose blocks need a process group, with the processes that run them.
LAUNCHED = {"how-to/ddp.md": 2, "how-to/fsdp2.md": 4, "how-to/several-hosts.md": 8}

#: What a block's title says it needs, and whether that is here: elsewhere the block is only compiled.
OPTIONAL: dict[str, Callable[[], bool]] = {
    "needs a GPU": torch.cuda.is_available,
    "needs transformers": lambda: all(map(importlib.util.find_spec, ("transformers", "greenlet"))),
}

#: A block, or hidden lines that make the names a block uses: ``<!-- setup``, lines, ``-->``.
_BLOCK = re.compile(
    r"^```python(?P<title>[^\n]*)\n(?P<block>.*?)^```|^<!-- setup\n(?P<setup>.*?)^-->", re.DOTALL | re.MULTILINE
)


def pages() -> list[str]:
    found = (page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md")))
    return [page for page in found if not page.startswith("engineering/")]


def code(page: str) -> str:
    """The page's blocks as one program, each at its own lines so that a traceback names them."""
    text = (DOCS / page).read_text()
    lines = [""] * (text.count("\n") + 1)
    for match in _BLOCK.finditer(text):
        title = match["title"] or ""
        if any(needs in title and not there() for needs, there in OPTIONAL.items()):
            compile(match["block"], page, "exec")
            continue
        kind = "block" if match["block"] is not None else "setup"
        first = text.count("\n", 0, match.start(kind))
        body = match[kind].splitlines()
        lines[first : first + len(body)] = body
    return "\n".join(lines)


def run(page: str) -> None:
    path = DOCS / page
    source = code(page)
    # torch.compile reads the source of what it traces
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    exec(compile(source, str(path), "exec"), {"__name__": f"docs.{page}"})


@pytest.mark.parametrize("page", [p for p in pages() if p not in LAUNCHED and code(p).strip()])
def test_the_blocks_of_a_page_run(page: str) -> None:
    run(page)


def _run_page(rank: int, world_size: int, page: str) -> None:
    run(page)


@pytest.mark.parametrize("page", LAUNCHED)
def test_the_blocks_of_a_page_run_under_a_launcher(page: str) -> None:
    run_processes(_run_page, LAUNCHED[page], page)


def test_the_session_of_the_first_page_is_that_of_the_readme() -> None:
    """tests/test_readme.py runs it."""
    (session,) = re.findall(r"^```console\n.*?^```", (DOCS.parent / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert session in (DOCS / "index.md").read_text()


def test_public_names_are_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    missing = [n for n in shardsum.__all__ if f"::: shardsum.{n}" not in reference and n not in ("bits", "hooks")]
    assert not missing


PUBLIC = [ShardGroup, Plan, shardsum.context_parallel_attention, shardsum.ragged_sum]
PUBLIC += [shardsum.show, shardsum.masked_sum, shardsum.MaskedSum, shardsum.first_difference, balanced_lengths]


@pytest.mark.parametrize("subject", PUBLIC, ids=lambda subject: subject.__qualname__)
def test_examples_of_docstrings(subject: Any) -> None:
    names = {name: getattr(shardsum, name) for name in shardsum.__all__}
    names |= {"torch": torch, "shardsum": shardsum, "partial": partial, "balanced_lengths": balanced_lengths}
    methods = [m for kind in getattr(subject, "__mro__", ())[1:] for m in vars(kind).values() if callable(m)]
    said: list[str] = []
    ran = 0
    for one in (subject, *(m for m in methods if (m.__doc__ or "").count(">>>") and "shardsum" in m.__module__)):
        for test in doctest.DocTestFinder().find(one, globs=names):
            ran += doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append).attempted
    assert ran and not said, "".join(said)


def test_environment_variables_are_those_of_the_doctor() -> None:
    text = (DOCS / "environment.md").read_text()
    assert set(re.findall(r"^\| `(SHARDSUM_\w+)`", text, re.MULTILINE)) == {n for n in ENVIRONMENT if "SHARDSUM" in n}
    assert all(f"`{name}" in text for name in ENVIRONMENT)


TROUBLE: list[Callable[[], object]] = [
    lambda: ShardGroup(),
    lambda: ShardGroup(2).all_reduce([torch.ones(2)] * 2, op="avg"),  # type: ignore[call-overload]
    lambda: ShardGroup(2).all_reduce(torch.ones(3)),
    lambda: ShardGroup(2).all_reduce([torch.ones(2).cfloat()] * 2),
    lambda: ShardGroup(2).all_reduce([torch.ones(2).int()] * 2, op="mean"),
    lambda: ShardGroup(2).all_reduce([torch.ones(2).double()] * 2, out_dtype=torch.bfloat16),
    lambda: ShardGroup(2).all_reduce([torch.ones(2, requires_grad=True)] * 2, async_op=True),
    lambda: ShardGroup(2).all_reduce([torch.ones(2)] * 2, [3, 2]),
    lambda: FSDPReduceScatter()(torch.ones(1), torch.ones(1), None, dist.ReduceOp.AVG),  # type: ignore[arg-type]
    lambda: pickle.dumps(ShardGroup(2)),
]


@pytest.mark.parametrize("index", range(len(TROUBLE)))
def test_troubleshooting_has_the_error(index: int) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        TROUBLE[index]()
    cells = re.findall(r"^\| (`.*?`) \| ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    texts = [[part.strip() for t in re.findall(r"`([^`]+)`", cell) for part in t.split("...")] for cell in cells]
    found = [parts for parts in texts if all(part in str(caught.value) for part in parts)]
    assert found, str(caught.value)


# The table of losses: rank v has TOKENS[v] tokens whose losses are w * x; all numbers are small powers of two

TOKENS = (1, 3)
INPUTS = (torch.tensor([2.0]), torch.tensor([4.0, 8.0, 32.0]))
OF_ALL_TOKENS = sum(float(x.sum()) for x in INPUTS) / sum(TOKENS)
OF_MEANS = sum(float(x.sum()) / n for x, n in zip(INPUTS, TOKENS)) / len(TOKENS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.w[0] * x


Loss = Callable[[ShardGroup, Tensor], Tensor]


def token_mean(grad: str) -> Loss:
    return lambda group, losses: group.token_mean(losses.sum(), len(losses), grad=grad)[0]  # type: ignore[arg-type]


def part_of_all(group: ShardGroup, losses: Tensor) -> Tensor:
    return losses.sum() / sum(TOKENS)


def own_mean(group: ShardGroup, losses: Tensor) -> Tensor:
    return losses.mean()


def by_replicas(loss: Loss | None, scale: float | None) -> Callable[[ShardGroup], float]:
    def gradient(processes: ShardGroup) -> float:
        group, model = processes, Model()
        replicas = group.replicas(model)
        losses = [m(INPUTS[v]) for v, m in zip(group.virtual_ranks, replicas)]
        if loss is None:
            total, _ = group.token_mean([x.sum() for x in losses], [len(x) for x in losses])
        else:
            total = torch.stack([loss(group, x) for x in losses]).sum()
        total.backward()
        group.reduce_gradients(replicas, scale=scale)
        assert model.w.grad is not None
        return float(model.w.grad[0])

    return gradient


def by_ddp(loss: Loss, make_state: Callable[[ShardGroup], HookState] | None) -> Callable[[ShardGroup], float]:
    def gradient(group: ShardGroup) -> float:
        model = DistributedDataParallel(Model())
        if make_state is not None:
            model.register_comm_hook(make_state(group), ddp_comm_hook)
        loss(group, model(INPUTS[group.rank])).backward()
        return float(model.module.w.grad[0])

    return gradient


def by_fsdp(loss: Loss, make: Callable[[], FSDPReduceScatter]) -> Callable[[ShardGroup], float]:
    def gradient(group: ShardGroup) -> float:
        model: Any = fully_shard(Model(), mesh=dist.device_mesh.init_device_mesh("cpu", (group.world_size,)))
        make().install(model)
        loss(group, model(INPUTS[group.rank])).backward()
        return float(model.w.grad.full_tensor()[0])

    return gradient


ROWS: dict[int, tuple[Callable[[ShardGroup], float], float]] = {
    1: (by_replicas(None, None), OF_ALL_TOKENS),
    2: (by_ddp(token_mean("identity"), HookState.for_sum_loss), OF_ALL_TOKENS),
    3: (by_fsdp(token_mean("identity"), FSDPReduceScatter), OF_ALL_TOKENS),
    4: (by_ddp(token_mean("sum"), None), OF_ALL_TOKENS),
    5: (by_ddp(part_of_all, HookState.for_sum_loss), OF_ALL_TOKENS),
    6: (by_ddp(own_mean, HookState.for_mean_loss), OF_MEANS),
    7: (by_fsdp(own_mean, lambda: FSDPReduceScatter(scale=1 / dist.get_world_size())), OF_MEANS),
    8: (by_replicas(own_mean, 1 / 2), OF_MEANS),
}


def _gradients(rank: int, world_size: int) -> dict[int, float]:
    group = ShardGroup()
    return {row: gradient(group) for row, (gradient, _) in ROWS.items()}


def test_every_row_of_the_table_of_losses() -> None:
    listed = [int(n) for n in re.findall(r"^\| (\d+) \|", (DOCS / "how-to" / "losses.md").read_text(), re.MULTILINE)]
    assert listed == list(ROWS)
    for found in run_processes(_gradients, 2):
        # the mean of row 8's first rank, 44 / 3, is no float: the same roundings in other places
        assert found == pytest.approx({row: wanted for row, (_, wanted) in ROWS.items()}, rel=1e-6)
