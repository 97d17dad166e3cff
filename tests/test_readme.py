"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardsum

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for name, body in BLOCKS if name == language]


def run(command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command.split(), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_is_the_file() -> None:
    assert blocks("python")[0] == "# launch/hello.py\n" + (ROOT / "launch" / "hello.py").read_text()


def test_the_console_shows_what_is_printed() -> None:
    (session,) = blocks("console")
    shown = re.findall(r"\$ (.*)\n(.*)\n", session)
    assert len(shown) == 2
    for command, output in shown:
        assert run(command).strip().splitlines()[-1] == output


def test_the_training_step_snippet_runs() -> None:
    names = {"ShardGroup": shardsum.ShardGroup, "R": 3, "mesh": {"sp": None}, "S": 6, "lengths": [2, 1, 3]}
    names |= {"shards": [torch.ones(n) for n in (2, 1, 3)], "held": [(0, 2), (2, 3), (3, 6)], "wanted": [(0, 6)] * 3}
    names |= {"loss_sums": [torch.ones(())] * 3, "num_valid": [2, 1, 3]}
    exec(blocks("python")[1], names)
    assert names["rows"].tolist() == [1.0] * 6 and names["tokens"].item() == 6


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", TEXT))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_commands_of_the_shell_blocks_exist() -> None:
    commands = [line.split("#")[0].split() for body in blocks("bash") for line in body.splitlines() if line.strip()]
    for words in commands:
        if words[0].startswith("launch/"):
            assert os.access(ROOT / words[0], os.X_OK), words
