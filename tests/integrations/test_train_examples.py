"""launch/train_megatron.py and train_torchtitan.py: what they print alone is what two processes learn."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout

import pytest
import torch._dynamo  # noqa: F401  (AdamW imports it: here once, not in every forked child)
import torch.distributed as dist

from tests.processes import run_processes
from tests.scripts import load_script

pytest.importorskip("greenlet", reason="needs the extra models")
NEEDS = {"megatron": "megatron.core", "torchtitan": "torchtitan.models.llama3"}
WORDS = ["--ranks", "4", "--steps", "2"]


def _train(rank: int, world_size: int, name: str) -> tuple[list[float], str]:
    script = load_script(f"launch/train_{name}.py")
    return script.train(script.parser("").parse_args(WORDS))


def _main(rank: int, world_size: int, name: str) -> str:
    dist.destroy_process_group()
    script = load_script(f"launch/train_{name}.py")
    with redirect_stdout(io.StringIO()) as said:
        script.main(script.train, script.parser("").parse_args(WORDS))
    return said.getvalue()


@pytest.mark.parametrize("name", NEEDS)
def test_one_hash_for_one_and_two_processes(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(NEEDS[name], reason=f"{name} is not installed")
        load_script(f"launch/train_{name}.py")
    (losses, digest), other = run_processes(_train, 2, name)
    assert losses[1] < losses[0] and other == (losses, digest)
    (said,) = run_processes(_main, 1, name)
    assert said.endswith(f"at step 2; hash {digest[:16]}\n")
