"""What an installation holds, and what it says where something is missing."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
SETTINGS = read_configuration(ROOT / "pyproject.toml", expand=False)


def test_every_folder_of_code_is_installed() -> None:
    folders = {p.parent for p in (ROOT / "shardsum").rglob("*.py")}
    wanted = {".".join(f.relative_to(ROOT).parts) for f in folders}
    sources = {p.parent for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")}
    wanted |= {".".join(["shardsum", *f.relative_to(ROOT).parts]) for f in sources}
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == wanted


@pytest.mark.parametrize("url", ["", "https://example.org/shardsum"])
def test_links_of_an_index_page_work_without_the_repository(url: str) -> None:
    made = runpy.run_path(str(ROOT / "setup.py"), run_name="looked at")
    page = made["index_page"]((ROOT / "README.md").read_text(), url)
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert "docs/benchmarks.md" in page if url else "docs/benchmarks.md" not in page
    assert all(target.startswith(("https://", "http://")) for target in targets)
    links = made["project_urls"](url)
    assert bool(links) == bool(url) and all(link.startswith(url) for link in links.values())


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))  # importing them raises ModuleNotFoundError
import shardsum, torch
assert shardsum.ragged_sum(torch.ones(2, 3), [1, 3]).tolist() == [2, 1, 1]
from shardsum.__main__ import main
sys.argv = ["shardsum", {command!r}]
sys.exit(main())
"""


@pytest.mark.parametrize(("missing", "command"), [("jsonargparse", "doctor"), ("jsonargparse", "bench")])
def test_the_library_runs_without_the_command_line_which_names_its_extra(missing: str, command: str) -> None:
    others = ["jsonargparse", "rich", "matplotlib", "safetensors"]
    code = WITHOUT.format(missing=others, command=command)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f'shardsum: the command line needs {missing}: pip install "shardsum[cli]"\n'


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("llama", "peft"),
        ("trainer", "transformers"),
        ("megatron", "megatron.core"),
        ("torchtitan", "torchtitan.models.llama3"),
    ],
)
def test_an_example_names_what_it_needs(script: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, f"launch_train_{script}", raising=False)
    with pytest.raises(SystemExit, match=rf"^train_{script}.py needs {missing.split('.')[0]}"):
        load_script(f"launch/train_{script}.py")


def test_the_extra_is_what_the_command_line_needs() -> None:
    from packaging.requirements import Requirement

    from shardsum.__main__ import _CLI_PACKAGES

    extras = SETTINGS["project"]["optional-dependencies"]
    assert {Requirement(r).name for r in extras["cli"]} == set(_CLI_PACKAGES)
