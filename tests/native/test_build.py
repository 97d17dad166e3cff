"""Building: what is compiled, in which steps, killed, slow and concurrent builds."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from shardsum.native import builder, recipe
from shardsum.native.artifact import read_record
from tests.native.children import Child, run
from tests.native.tiny import (
    build_tiny,
    build_tiny_ahead_of_time,
    build_tiny_and_listen,
    compiled,
    living,
    logged,
    wait_for_a_compiler,
)


def test_one_byte_of_a_source_makes_another_hash(monkeypatch, tmp_path):
    shutil.copytree(recipe.source_folder(), tmp_path / "csrc")
    monkeypatch.setattr(recipe, "source_folder", lambda: tmp_path / "csrc")
    before = recipe.source_hash()
    header = tmp_path / "csrc" / "row_table.h"
    header.write_text(header.read_text() + "\n")
    assert recipe.source_hash() != before


def test_architectures_are_those_of_this_host_unless_the_environment_names_them(monkeypatch):
    monkeypatch.delenv("SHARDSUM_CUDA_ARCHS", raising=False)
    monkeypatch.setattr(recipe, "local_archs", lambda: ("86", "90"))
    for cuda, expected in (("13.0", ("86", "90")), (None, ())):
        monkeypatch.setattr(recipe.torch.version, "cuda", cuda)
        assert recipe.archs_to_build() == expected
    for value, expected in (("90", ("90",)), ("8.0, 9.0", ("80", "90")), ("none", ()), ("", ())):
        monkeypatch.setenv("SHARDSUM_CUDA_ARCHS", value)
        assert recipe.archs_to_build() == expected


@pytest.mark.parametrize(
    ("built", "arch", "expected"),
    [
        (("90",), "90", True),
        (("80",), "86", True),  # a later GPU of the same major version
        (("80", "90"), "121", True),  # by PTX
        (("90",), "80", False),
        (("80", "90", "100", "120"), "75", False),
        (("80", "90", "100", "120"), "103", True),
        (("80", "90", "100", "120"), "110", False),
        ((), "90", False),
    ],
)
def test_a_library_runs_on_later_gpus(built, arch, expected):
    assert recipe.runs_on(built, arch) == expected


def test_an_older_nvcc_compiles_for_the_newest_gpu_it_knows(monkeypatch):
    monkeypatch.setattr(recipe, "_output", lambda command: "compute_80\ncompute_90\ncompute_100\n")
    toolkit = recipe.Toolkit(Path("nvcc"), Path("lib"))
    assert recipe._known_archs(toolkit, ("80", "86", "121")) == ("80", "100")


def test_a_missing_ninja_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(RuntimeError, match="pip install ninja"):
        builder.compile_into(recipe.make_recipe(()), tmp_path, tmp_path / "library.so")


def test_an_nvcc_without_headers_is_no_toolkit(monkeypatch, tmp_path):
    for name in ("bin/nvcc", "lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = recipe.find_toolkit()
    assert found is None or tmp_path not in found.nvcc.parents
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    found = recipe.find_toolkit()
    assert found is not None and found.nvcc == tmp_path / "bin" / "nvcc"


def test_one_line_says_what_is_built_how_long_that_takes_and_where(tiny):
    path, _, log = run(tiny, build_tiny_and_listen)
    (line,) = log.splitlines()
    assert "CPU kernels" in line and "usually in about" in line and f"into {path}" in line
    assert run(tiny, build_tiny_and_listen) == (path, "", "")
    assert run({**tiny, "RANK": "3", "SHARDSUM_CACHE": f"{path.parent}-2"}, build_tiny_and_listen)[2].startswith(
        "[rank 3] shardsum builds"
    )


def test_processes_that_start_together_build_once(tiny, tmp_path):
    children = [Child(tiny, build_tiny) for _ in range(3)]
    paths = {child.result() for child in children}
    assert len(paths) == 1 and paths.pop().exists()
    lines = compiled(tmp_path)
    assert len(lines) == len(set(lines)) > 0
    assert run(tiny, build_tiny).exists() and len(compiled(tmp_path)) == len(lines)


def test_a_killed_build_does_not_block_the_next(tiny, tmp_path):
    (tmp_path / "hang").touch()
    victim = Child(tiny, build_tiny)
    wait_for_a_compiler(tmp_path)
    cache = Path(tiny["SHARDSUM_CACHE"])
    assert len(list(cache.glob(".build-*"))) == 1
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.join()
    (tmp_path / "hang").unlink()  # ends the compilers that outlive their build
    path = run(tiny, build_tiny)
    assert read_record(path) is not None and not list(cache.glob(".build-*"))


def test_a_killed_build_ahead_of_time_leaves_nothing_beside_the_library(tiny, tmp_path):
    package = tmp_path / "package"
    (tmp_path / "hang").touch()
    victim = Child({**tiny, "TMPDIR": str(tmp_path)}, build_tiny_ahead_of_time, str(package / "_native.so"))
    wait_for_a_compiler(tmp_path)
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.join()
    (tmp_path / "hang").unlink()
    assert list(package.iterdir()) == []
    (package / "._native.so-123").touch()  # of a kill between the last copy and the rename
    run(tiny, build_tiny_ahead_of_time, str(package / "_native.so"))
    assert [p.name for p in package.iterdir()] == ["_native.so"]


def test_a_signal_while_a_build_starts_leaves_no_process(tmp_path, monkeypatch):
    pid, read = tmp_path / "pid", os.read

    def interrupted(fd: int, size: int) -> bytes:  # Popen waits here until its program has begun
        read(fd, size)
        while not (pid.exists() and pid.read_text().endswith("\n")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builder._run(["sh", "-c", "echo $$ > pid; exec sleep 60"], tmp_path)
    assert not living({int(pid.read_text())})


def build_by_command(output: str) -> None:
    from shardsum.tools import cli

    builder.AHEAD_OF_TIME = Path(output)
    recipe.source_folder = lambda: Path(os.environ["SOURCES"])
    cli.main(["build"])


def test_a_terminated_command_ends_its_compilers_and_leaves_no_folder(tiny, tmp_path):
    (tmp_path / "hang").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    victim = Child({**tiny, "TMPDIR": str(temporary)}, build_by_command, str(tmp_path / "_native.so"))
    wait_for_a_compiler(tmp_path)
    os.kill(victim.process.pid, signal.SIGTERM)
    victim.process.join()
    pids = {int(line.split()[0]) for line in logged(tmp_path)}
    deadline = time.monotonic() + 10
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids and not living(pids) and list(temporary.glob("shardsum-build-*")) == []


def test_a_compiler_that_hangs_ends_with_the_time_limit_and_leaves_no_process(tiny, tmp_path):
    (tmp_path / "hang").touch()
    _, error, _ = run({**tiny, "SHARDSUM_BUILD_TIMEOUT": "0.5"}, build_tiny_and_listen)
    assert error.startswith("the native library was not built within 0.5 s (SHARDSUM_BUILD_TIMEOUT)")
    pids = {int(line.split()[0]) for line in logged(tmp_path)}
    deadline = time.monotonic() + 10
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids and not living(pids)
    assert not list(Path(tiny["SHARDSUM_CACHE"]).glob(".build-*"))


def test_a_lock_that_is_never_released_is_named_after_the_time_limit(tiny, tmp_path):
    (tmp_path / "hang").touch()
    holder = Child(tiny, build_tiny)
    wait_for_a_compiler(tmp_path)
    path, error, log = run({**tiny, "SHARDSUM_BUILD_TIMEOUT": "0.5"}, wait_impatiently)
    assert path is None and "another process has held" in error and ".so.lock for 0.5 s" in error
    assert "waits for another process that builds" in log
    (tmp_path / "hang").unlink()
    with pytest.raises(AssertionError, match="cannot be built"):
        holder.result()


def wait_impatiently() -> tuple[Path | None, str, str]:
    from shardsum.native import cache

    cache._SILENT_WAIT = 0.1
    return build_tiny_and_listen()


def test_a_time_limit_that_is_no_number_is_refused(tiny):
    _, error, _ = run({**tiny, "SHARDSUM_BUILD_TIMEOUT": "soon"}, build_tiny_and_listen)
    assert error == "SHARDSUM_BUILD_TIMEOUT: expected seconds above 0, got 'soon'"


def test_architectures_without_a_toolkit_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "find_toolkit", lambda: None)
    with pytest.raises(RuntimeError, match=r"archs: \('90',\) asked for, but no CUDA toolkit"):
        builder.build(tmp_path / "_native.so", archs=("90",))
