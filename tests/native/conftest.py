from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardsum.native import loader

if shutil.which("g++") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def library() -> Path:
    """The library of these sources, as any first use builds it."""
    path = loader.status().library
    assert path is not None, loader.status().reason
    return path


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled and nothing is cached."""
    return {"PATH": str(tmp_path / "no-such-folder"), "SHARDSUM_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, str | None]:
    """The environment of a build whose sources compile in no time (:mod:`tests.native.tiny`). Its compiler logs what it
    is called with and the process it runs in, and does not end while ``hang`` is in tmp_path."""
    sources = tmp_path / "with spaces" / "csrc"
    for name in ("bindings.cpp", "peer/bindings.cpp", "cpu/kernels.cpp", "cpu/sum_rows.cpp"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("static int nothing;\n")
    compiler = tmp_path / "with spaces" / "compiler"
    compiler.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo tiny && exit 0
echo "$$ $@" >> '{tmp_path}/log'
while [ -e '{tmp_path}/hang' ]; do hung=1; sleep 0.05; done
[ -n "$hung" ] && exit 1
exec {shutil.which("g++")} "$@"
"""
    )
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "SHARDSUM_CACHE": str(tmp_path / "with spaces" / "cache"), "SOURCES": str(sources)}
