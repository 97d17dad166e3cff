"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_training_step_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    exec("\n".join(blocks("python")[1:]), {})
    assert capsys.readouterr().out.startswith("57 ")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_commands_of_the_shell_blocks_exist() -> None:
    commands = [line.split("#")[0].split() for body in blocks("bash") for line in body.splitlines() if line.strip()]
    for words in commands:
        if words[0].startswith("launch/"):
            assert os.access(ROOT / words[0], os.X_OK), words
