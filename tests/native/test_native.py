"""Building and loading the native library: cache, lock, killed builds, the library built ahead of time, fallbacks.

Every scenario needs a process in which nothing is loaded yet: children of a fork server that has imported torch.
Builds of the lock and cache tests use tiny stand-ins for csrc/, compiled by the real recipe.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardsum
from shardsum.core import reference
from shardsum.local import kernels
from shardsum.native import builder as building
from shardsum.native import loader as native

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["shardsum.native", "shardsum.local.kernels"])


class Child:
    """``function(*args)`` in a fresh process with this environment."""

    def __init__(self, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> None:
        self.receiver, sender = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_run, args=(sender, environment, function, args))
        self.process.start()
        sender.close()

    def result(self, timeout: float = 120) -> Any:
        assert self.receiver.poll(timeout), "the child does not answer"
        ok, value = self.receiver.recv()
        self.process.join(timeout)
        assert ok, value
        return value


def _run(sender: Any, environment: dict[str, str], function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    for name in ("SHARDSUM_BACKEND", "SHARDSUM_CACHE", "CXX", "MAX_JOBS"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def run(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    return Child(environment, function, *args).result()


def load_and_sum(ahead_of_time: str | None = None) -> dict[str, Any]:
    """Load twice, sum once; what happened."""
    if ahead_of_time:
        native._AHEAD_OF_TIME = Path(ahead_of_time)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            native.load()
            native.load()
        except (RuntimeError, ValueError) as e:
            error = f"{type(e).__name__}: {e}"
    if error is None:
        x, lengths = torch.randn(4, 50, 3), [50, 20, 0, 31]
        out = torch.empty(50, 3)
        kernels.sum_padded(out, x, [], lengths, True, 0.5, False)
        rows = [x[r, :n] for r, n in enumerate(lengths)]
        assert torch.equal(out, reference.ragged_sum(rows, [0] * 4, 50, op="mean", scale=0.5, out_dtype=torch.float32))
    return {
        "error": error,
        "status": None if error else native.status(),
        "warnings": [str(w.message) for w in caught],
        "mapped": _mapped_libraries(),
    }


def sum_without_functions(ahead_of_time: str) -> str:
    """The usual calls where Python's objects are not those that the library's functions know."""
    native._AHEAD_OF_TIME, native._objects_are_ordinary = Path(ahead_of_time), lambda: False
    x, lengths = torch.randn(4, 50, 3), [50, 20, 0, 31]
    want = reference.ragged_sum([x[r, :n] for r, n in enumerate(lengths)], [0] * 4, 50, out_dtype=torch.float32)
    for form in (lengths, torch.tensor(lengths)):
        assert torch.equal(shardsum.ragged_sum(x, form), want)
        assert torch.equal(shardsum.ragged_sum(x, form, out=torch.empty(50, 3)), want)
    assert torch.equal(shardsum.ragged_sum([x[r, :n] for r, n in enumerate(lengths)]), want)
    assert native.pack(lengths) == struct.pack("4q", *lengths) and native.pack([True]) is None
    assert native.make_again((1,) * 15)(x, lengths) is False
    return native.status().backend


def _mapped_libraries() -> list[str]:
    """The native libraries in this process's memory."""
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return [f for f in files if Path(f).name.startswith(("native-", "_native")) and f.endswith(".so")]


@pytest.fixture(scope="session")
def library() -> Path:
    """The library of these sources, as any first use builds it."""
    path = native.status().library
    assert path is not None, native.status().reason
    return path


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled and nothing is cached."""
    return {"PATH": str(tmp_path / "no-such-folder"), "SHARDSUM_CACHE": str(tmp_path / "cache")}


def test_torch_never_loads_a_library(library):
    seen = run({"SHARDSUM_BACKEND": "torch"}, load_and_sum)
    assert (seen["status"].backend, seen["status"].library, seen["warnings"]) == ("torch", None, [])
    assert seen["mapped"] == []


def test_native_loads_the_library(library):
    seen = run({"SHARDSUM_BACKEND": "native", "SHARDSUM_CACHE": str(library.parent)}, load_and_sum, str(library))
    assert seen["status"].backend == "native" and seen["warnings"] == []
    assert seen["mapped"] == [str(library)]
    assert seen["status"].cpu_isa in ("avx512", "avx2", "baseline")


def test_a_library_runs_without_its_functions(library):
    assert run({"SHARDSUM_BACKEND": "native"}, sum_without_functions, str(library)) == "native"


def test_native_without_a_compiler_is_an_error(nowhere):
    seen = run({**nowhere, "SHARDSUM_BACKEND": "native"}, load_and_sum)
    assert seen["error"].startswith("RuntimeError: SHARDSUM_BACKEND=native, but no C++ compiler was found")


def test_auto_without_a_compiler_warns_once_and_runs_torch(nowhere):
    seen = run(nowhere, load_and_sum)
    assert seen["status"].backend == "torch" and "no C++ compiler" in seen["status"].reason
    assert len(seen["warnings"]) == 1 and "plain torch" in seen["warnings"][0], seen["warnings"]
    assert "no C++ compiler" in seen["warnings"][0]


def test_auto_with_a_compiler_that_fails_says_what_it_said(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "disk is full of eels" >&2\nexit 1\n')
    compiler.chmod(0o755)
    seen = run({"CXX": str(compiler), "SHARDSUM_CACHE": str(tmp_path / "cache")}, load_and_sum)
    assert seen["status"].backend == "torch" and "full of eels" in seen["warnings"][0]
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob(".build-*"))


def test_another_backend_is_refused():
    seen = run({"SHARDSUM_BACKEND": "cuda"}, load_and_sum)
    assert seen["error"] == "ValueError: SHARDSUM_BACKEND: expected auto, native or torch, got 'cuda'"


def test_a_library_built_ahead_of_time_needs_nothing_else(library, nowhere, tmp_path):
    copy = shutil.copy(library, tmp_path / "_native.so")
    seen = run({**nowhere, "SHARDSUM_BACKEND": "native"}, load_and_sum, str(copy))
    assert seen["status"].library == copy and seen["status"].reason.startswith("built ahead of time")
    assert not Path(nowhere["SHARDSUM_CACHE"]).exists()


def test_a_stale_library_is_ignored_with_a_reason(library, nowhere, tmp_path):
    sources, _ = building.built_from(library)
    stale = tmp_path / "_native.so"
    stale.write_bytes(library.read_bytes().replace(sources.encode(), b"0" * len(sources)))
    seen = run(nowhere, load_and_sum, str(stale))
    assert seen["status"].backend == "torch" and len(seen["warnings"]) == 1
    assert f"{stale} is ignored: it was built from other sources" in seen["warnings"][0]
    stale.write_bytes(b"not a library")
    assert "other sources" in run(nowhere, load_and_sum, str(stale))["warnings"][0]


def test_one_byte_of_a_source_makes_another_hash(monkeypatch, tmp_path):
    shutil.copytree(building.source_folder(), tmp_path / "csrc")
    monkeypatch.setattr(building, "source_folder", lambda: tmp_path / "csrc")
    before = building.source_hash()
    header = tmp_path / "csrc" / "row_table.h"
    header.write_text(header.read_text() + "\n")
    assert building.source_hash() != before


def test_architectures_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("SHARDSUM_CUDA_ARCHS", raising=False)
    assert building.default_archs() == ("80", "90", "100", "120")
    for value, expected in (("90", ("90",)), ("8.0, 9.0", ("80", "90")), ("none", ()), ("", ())):
        monkeypatch.setenv("SHARDSUM_CUDA_ARCHS", value)
        assert building.default_archs() == expected


def test_an_nvcc_without_headers_is_no_toolkit(monkeypatch, tmp_path):
    for name in ("bin/nvcc", "lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = building.find_toolkit()
    assert found is None or tmp_path not in found.nvcc.parents
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    found = building.find_toolkit()
    assert found is not None and found.nvcc == tmp_path / "bin" / "nvcc"


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, str]:
    """Sources that compile in no time, and a compiler that logs what it compiles and can be made to hang."""
    sources = tmp_path / "csrc"
    files = ("select", "sum_masked", "sum_rows", "kernels")
    for name in ("bindings.cpp", "peer/bindings.cpp", *(f"cpu/{name}.cpp" for name in files)):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("static int nothing;\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo tiny && exit 0
echo "$@" >> {tmp_path}/log
while [ -e {tmp_path}/hang ]; do hung=1; sleep 0.05; done
[ -n "$hung" ] && exit 1
exec {shutil.which("g++")} "$@"
"""
    )
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "SHARDSUM_CACHE": str(tmp_path / "cache"), "SOURCES": str(sources)}


def build_tiny() -> Path:
    building.source_folder = lambda: Path(os.environ["SOURCES"])
    return building.cached_build()


def logged(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_processes_that_start_together_build_once(tiny, tmp_path):
    children = [Child(tiny, build_tiny) for _ in range(3)]
    paths = {child.result() for child in children}
    assert len(paths) == 1 and paths.pop().exists()
    compiled = [line for line in logged(tmp_path) if " -c " in line]
    assert len(compiled) == len(set(compiled)) > 0
    assert run(tiny, build_tiny).exists() and len([x for x in logged(tmp_path) if " -c " in x]) == len(compiled)


def test_a_killed_build_does_not_block_the_next(tiny, tmp_path):
    (tmp_path / "hang").touch()
    victim = Child(tiny, build_tiny)
    deadline = time.monotonic() + 60
    while not logged(tmp_path):
        assert time.monotonic() < deadline, "the first build does not start"
        time.sleep(0.05)
    left = list((tmp_path / "cache").glob(".build-*"))
    assert len(left) == 1
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.join()
    (tmp_path / "hang").unlink()  # ends the compilers that outlive their build
    path = run(tiny, build_tiny)
    assert path.exists() and not list((tmp_path / "cache").glob(".build-*"))


def test_an_unwritable_cache_is_named(tmp_path, tiny):
    (tmp_path / "file").touch()
    environment = {**tiny, "SHARDSUM_CACHE": str(tmp_path / "file" / "cache")}
    seen = run(environment, load_and_sum)
    assert seen["status"].backend == "torch"
    assert len(seen["warnings"]) == 1 and "set SHARDSUM_CACHE" in seen["warnings"][0]


def fall_back(device: str) -> list[str]:
    native.load()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            native.note_fallback(torch.device(device))
    return [str(w.message) for w in caught]


def test_cuda_tensors_without_a_cuda_kernel_are_mentioned_once(library):
    environment = {"SHARDSUM_BACKEND": "auto", "SHARDSUM_CACHE": str(library.parent)}
    assert run(environment, fall_back, "cpu") == []
    seen = run(environment, fall_back, "cuda")
    assert len(seen) == 1 and "CUDA tensors in plain torch" in seen[0]
    with pytest.raises(AssertionError, match="RuntimeError: SHARDSUM_BACKEND=native, but the library has no CUDA"):
        run({**environment, "SHARDSUM_BACKEND": "native"}, fall_back, "cuda")


def compile_with_load() -> bool:
    def step(x: torch.Tensor) -> torch.Tensor:
        native.load()
        return x + 1

    return torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("odd", ["implementation", "threads", "traced"])
def test_objects_that_look_different_are_left_alone(monkeypatch, odd):
    """In another interpreter, or another build of this one, the operators run without the functions in C."""
    assert native._objects_are_ordinary()
    if odd == "implementation":
        monkeypatch.setattr(native.sys, "implementation", SimpleNamespace(name="pypy"))
    elif odd == "threads":
        monkeypatch.setattr(native.sysconfig, "get_config_var", lambda name: {"Py_GIL_DISABLED": 1}.get(name))
    else:
        monkeypatch.setattr(native.struct, "calcsize", lambda text: 16)
    assert not native._objects_are_ordinary()


def test_load_is_not_traced(library):
    assert run({"SHARDSUM_BACKEND": "native", "SHARDSUM_CACHE": str(library.parent)}, compile_with_load)


def import_only() -> bool:
    import shardsum  # noqa: F401

    return native._status is None and _mapped_libraries() == []


def test_import_loads_nothing(nowhere):
    assert run({**nowhere, "SHARDSUM_BACKEND": "native"}, import_only)
