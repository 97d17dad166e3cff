"""Words that rows are pushed in: which are sent, which are awaited and emptied, by the kernels' own code on the CPU.

Sender and receiver work out by themselves which words of a launch travel, and where they lie.
tests/peer/cuda/peer_words.cpp runs what they run, a lane at a time; here memory accesses in PTX are replaced by plain
ones, and plans are made up.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from shardsum.core.layout import ExchangePlan, intervals_of, split_evenly
from shardsum.native.recipe import find_toolkit
from shardsum.transports.peer import shapes as peer_plan
from shardsum.transports.peer import transport as peer
from shardsum.transports.peer.layout import MemoryLayout, choose_regions
from shardsum.transports.peer.operators import DTYPE_CODES
from shardsum.transports.peer.prepared import Addresses, plan_words
from shardsum.transports.peer.shapes import Message
from shardsum.transports.peer.tuning import Tuning

TESTS = Path(__file__).parent
CSRC = Path(peer.__file__).parents[3] / "csrc"
_BODIES = {  # of the functions that access memory in PTX
    "store_word": "written(p, v);",
    "load_word": "uint4 v{0, 0, 0, 0}; if (valid) copy_word(&v, p); return v;",
    "load_private": "uint4 v; copy_word(&v, p); return v;",
    "store_flags": "p[0] = a, p[1] = b;",
    "load_flags": "a = p[0], b = p[1];",
    "acquire_flags": "a = p[0], b = p[1];",
    "wait_is_over": "*dead = 1; return true;",
}


def _plain(text: str) -> str:
    """CUDA source with the bodies above, without launches."""
    for name, body in _BODIES.items():
        text = re.sub(rf"(\b{name}\([^;{{]*?\)) \{{\n.*?\n\}}\n", rf"\1 {{ {body} }}\n", text, flags=re.S)
    text = re.sub(r"\ntemplate <typename[^\n]*>\n__global__ .*?\n}\n", "\n", text, flags=re.S)  # kernels
    text = re.sub(r"\nint peer_\w+_launch\(.*?\n}\n", "\n", text, flags=re.S)
    text = re.sub(r"\n// One launch[^\n]*\ntemplate <typename Kernel>.*?\n}\n", "\n", text, flags=re.S)
    text = re.sub(r'asm(?: volatile)?\((?:"(?:[^"\\]|\\.)*"|[^"])*?\);', ";", text)
    return text.replace("__shared__ ", "").replace('"../cuda/', '"').replace('"../', f'"{CSRC}/')


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toolkit, compiler = find_toolkit(), shutil.which("g++")
    if toolkit is None or compiler is None:
        pytest.skip("needs CUDA's headers and g++")
    folder = tmp_path_factory.mktemp("words")
    for path in [*(CSRC / "cuda").glob("*.*"), *(CSRC / "peer").glob("*.*")]:
        name = path.name if path.suffix != ".cu" else path.with_suffix(".cpp").name
        (folder / name).write_text(_plain(path.read_text()))
    include = toolkit.nvcc.parents[1] / "include"
    source, binary = TESTS / "cuda" / "peer_words.cpp", folder / "peer_words"
    flags = ["-std=c++17", "-O1", "-w", "-fpermissive", f"-I{folder}", f"-isystem{include}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(binary)], check=True)
    return binary


def _words(world_size: int, layout: MemoryLayout, message: Message, call: Any) -> str:
    """One case for the program: every process's plan, then its tensors. Empty if its rows are not pushed."""
    plan, dtype, out_dtype, mean, bounds, on_device, pick = call
    try:
        shape = peer_plan.choose_shape(message, layout)
    except ValueError:  # memory that does not hold a tile of a two-shot
        return ""
    if not shape.push:
        return ""
    codes, nowhere = (DTYPE_CODES[dtype], DTYPE_CODES[out_dtype]), Addresses((0,) * world_size, 0, 0, 0)
    words: list[int] = [world_size]
    for rank in range(world_size):
        words += plan_words(plan, message, shape, layout, nowhere, rank, codes, mean)
        words.append(layout.regions.total_bytes)
    for rank in range(world_size):
        words.append(on_device)
        for r in plan.hosted_sources(rank):
            words += [*bounds[r], pick.choice([0, 0, 1, 3])]
        words += [pick.choice([0, 0, 1]) for _ in plan.hosted_sinks(rank)]
    return " ".join(str(int(word)) for word in words)


_PAIRS = [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64),
    (torch.int16, torch.int64), (torch.int32, torch.int64), (torch.int64, torch.int64),
]  # fmt: skip


def _case(pick: random.Random) -> str:
    """A random exchange of random rows; inboxes hold what its largest launch needs, or less."""
    world_size = pick.choice([2, 2, 2, 3, 4])
    num_ranks = pick.choice([world_size, world_size, pick.randrange(world_size, 7)])
    owners = [*range(world_size), *(pick.randrange(world_size) for _ in range(num_ranks - world_size))]
    if pick.random() < 0.02:
        num_ranks, owners = 64, [r % world_size for r in range(64)]
    pick.shuffle(owners)
    dtype, out_dtype = pick.choice(_PAIRS)
    width = pick.choice([1, 1, 3, 8, 100])
    size = pick.randrange(1, 2 + pick.choice([40, 3000, 30000]) // width)

    def interval() -> tuple[int, int]:
        a, b = sorted(pick.randrange(size + 1) for _ in range(2))
        return pick.choice([(a, b), (a, b), (a, a), (0, b), (0, size)])

    kind = pick.choice(["all_reduce", "reduce_scatter", "exchange", "several"])
    sources, sinks, sink_owners = [interval() for _ in owners], [(0, size)] * world_size, list(range(world_size))
    if kind == "reduce_scatter":
        sinks, sink_owners = intervals_of(split_evenly(size, num_ranks)), owners
    elif kind != "all_reduce":
        sink_owners = (
            owners if kind == "exchange" else [pick.randrange(world_size) for _ in range(pick.randrange(1, 7))]
        )
        sinks = [interval() for _ in sink_owners]
    on_device = pick.random() < 0.4
    if on_device:  # rows start at 0
        sources = [(0, end) for _, end in sources]
    plan = ExchangePlan(tuple(sources), tuple(owners), tuple(sinks), tuple(sink_owners), world_size)
    bounds = [(begin, end - begin, end - begin + pick.randrange(3)) for begin, end in sources]
    if on_device and peer_plan.is_replicated(plan):  # any values: they are clamped
        bounds = [(0, pick.randrange(-9, size + 9), room) for _, _, room in bounds]
    elif on_device:
        bounds = [(0, pick.randrange(held + 1), room) for _, held, room in bounds]
    small, streams = pick.random() < 0.3, pick.random() < 0.9
    message = peer_plan.describe_message(
        plan, width, dtype.itemsize, out_dtype.itemsize, False, dtype.is_floating_point
    )
    whole, needed = (n * width * dtype.itemsize for n in (size, message.needed))
    limit = whole * pick.choice([1, 1, 2]) if small else 0
    tuning = Tuning(
        blocks=pick.choice([1, 3, 7, 132]), producer_warps=pick.randrange(1, 6), push_bytes={0: limit},
        stream_processes=9 if streams else 1, write_processes=9, one_producer_bytes=pick.choice([0, 1 << 30]),
    )  # fmt: skip
    hosted = max(owners.count(g) for g in range(world_size))
    row = pick.choice([whole, needed, needed, needed - 4096, whole // 3, 8192])
    regions = choose_regions(num_ranks, world_size, pick.choice([5, 132]), hosted, tuning, max(row, 0) * hosted)
    layout = MemoryLayout(regions, num_ranks, hosted, tuning)
    mean = dtype.is_floating_point and dtype == out_dtype == torch.float32 and pick.random() < 0.5
    return _words(world_size, layout, message, (plan, dtype, out_dtype, mean, bounds, on_device, pick))


def test_every_word_is_sent_once_awaited_and_emptied(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardsum.transports.peer.layout._SMALL_INBOXES", 0)
    pick = random.Random(0)
    cases = [case for case in (_case(pick) for _ in range(600)) if case]
    done = subprocess.run([program], input="\n".join(cases), capture_output=True, text=True)
    assert done.stdout.strip() == f"{len(cases)} cases" and len(cases) > 300


def test_rows_that_have_no_slot_are_refused() -> None:
    tuning = Tuning()
    layout = MemoryLayout(choose_regions(2, 2, 128, 1, tuning, 1 << 20), 2, 1, tuning)
    for owners in ((0, 0), (0, 1, 1)):
        plan = ExchangePlan(((0, 8),) * len(owners), owners, ((0, 8),) * 2, (0, 1), 2)
        message = peer_plan.describe_message(plan, 1, 4, 4, False)
        shape = peer_plan.choose_shape(message, layout)
        with pytest.raises(ValueError, match="there is memory for 2, 1 on a process"):
            plan_words(plan, message, shape, layout, Addresses((0, 0), 0, 0, 0), 0, (2, 2))
