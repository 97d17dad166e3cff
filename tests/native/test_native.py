"""Loading the native library: from where, the library built ahead of time, fallbacks. Each scenario in a process of
its own, in which nothing is loaded yet."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardsum
from shardsum.core import reference
from shardsum.native import builder
from shardsum.native import loader as native
from shardsum.native.artifact import read_record, seal
from tests.native.children import run


def listen() -> list[str]:
    """The library's log messages from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardsum").addHandler(handler)
    return said


def load_and_sum(ahead_of_time: str | None = None) -> dict[str, Any]:
    """Load twice, sum once; what happened."""
    if ahead_of_time:
        builder.AHEAD_OF_TIME = Path(ahead_of_time)
    error = None
    said = listen()
    try:
        native.load()
        native.load()
    except (RuntimeError, ValueError) as e:
        error = f"{type(e).__name__}: {e}"
    if error is None:
        x, lengths = torch.randn(4, 50, 3), [50, 20, 0, 31]
        out = shardsum.ragged_sum(x, lengths, op="mean", scale=0.5)
        rows = [x[r, :n] for r, n in enumerate(lengths)]
        assert torch.equal(out, reference.ragged_sum(rows, [0] * 4, 50, op="mean", scale=0.5, out_dtype=torch.float32))
    return {
        "error": error,
        "status": None if error else native.status(),
        "warnings": [message for message in said if "builds its native library" not in message],
        "mapped": _mapped_libraries(),
    }


def sum_first(ahead_of_time: str) -> dict[str, Any]:
    """A sum, before anything else; a module that was made where nothing is loaded."""
    builder.AHEAD_OF_TIME = Path(ahead_of_time)
    x, module = torch.ones(4, 3), shardsum.MaskedSum.from_lengths([3, 0, 1, 2], 3)
    before = native._status
    assert module(x).tolist() == [3, 2, 1] and shardsum.ragged_sum(list(x), out=torch.empty(3)).tolist() == [4] * 3
    return {"before": before, "mapped": _mapped_libraries()}


def _mapped_libraries() -> list[str]:
    """The native libraries in this process's memory."""
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return [f for f in files if Path(f).name.startswith(("native-", "_native")) and f.endswith(".so")]


def test_torch_never_loads_a_library(library):
    seen = run({"SHARDSUM_BACKEND": "torch"}, load_and_sum)
    assert (seen["status"].backend, seen["status"].library, seen["warnings"]) == ("torch", None, [])
    assert seen["mapped"] == []


def test_native_loads_the_library(library):
    seen = run({"SHARDSUM_BACKEND": "native", "SHARDSUM_CACHE": str(library.parent)}, load_and_sum, str(library))
    assert seen["status"].backend == "native" and seen["warnings"] == []
    assert seen["mapped"] == [str(library)]
    assert seen["status"].cpu_isa in ("avx512", "avx2", "baseline")


def test_the_first_sum_loads_the_library(library):
    assert run({"SHARDSUM_BACKEND": "native"}, sum_first, str(library)) == {"before": None, "mapped": [str(library)]}


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
    sources, stale = read_record(library).sources, tmp_path / "_native.so"
    stale.write_bytes(library.read_bytes().replace(sources.encode(), b"0" * len(sources)))
    seal(stale)
    seen = run(nowhere, load_and_sum, str(stale))
    assert seen["status"].backend == "torch" and len(seen["warnings"]) == 1
    assert f"{stale} is ignored: it was built from other sources" in seen["warnings"][0]


@pytest.mark.parametrize("end", [0, 100_000, -1])
def test_a_library_that_is_not_whole_is_never_mapped(end, library, nowhere, tmp_path):
    cut = tmp_path / "_native.so"
    cut.write_bytes(library.read_bytes()[:end])
    seen = run(nowhere, load_and_sum, str(cut))
    assert f"{cut} is ignored: it is not a whole library" in seen["warnings"][0] and seen["mapped"] == []


def test_a_cache_that_is_not_trusted_is_never_loaded_from(library, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(library.parent, cache)
    seen = run({"SHARDSUM_CACHE": str(cache)}, load_and_sum)
    assert seen["status"].library == cache / library.name
    cache.chmod(0o777)
    seen = run({"SHARDSUM_CACHE": str(cache)}, load_and_sum)
    assert seen["status"].backend == "torch" and seen["mapped"] == []
    assert len(seen["warnings"]) == 1 and f"other users can write {cache}" in seen["warnings"][0]


def fall_back(device: str) -> list[str]:
    native.load()
    said = listen()
    for _ in range(2):
        native.note_fallback(torch.device(device))
    return said


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


def test_load_is_not_traced(library):
    assert run({"SHARDSUM_BACKEND": "native", "SHARDSUM_CACHE": str(library.parent)}, compile_with_load)


def import_only() -> bool:
    import shardsum  # noqa: F401

    return native._status is None and _mapped_libraries() == []


def test_import_loads_nothing(nowhere):
    assert run({**nowhere, "SHARDSUM_BACKEND": "native"}, import_only)
