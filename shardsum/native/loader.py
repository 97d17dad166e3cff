"""Find and load the native library that implements the raw operators of :mod:`shardsum.local.kernels`.

Nothing happens at import. :func:`load` is called before the first operator and decides once per process:

* ``SHARDSUM_BACKEND=torch``   never loads it: the operators run in plain torch, with the same bits.
* ``SHARDSUM_BACKEND=native``  loads it, or raises a RuntimeError that says why it cannot.
* ``SHARDSUM_BACKEND=auto``    (default) loads it, or warns once and runs in plain torch.

A library comes from one of two places. ``shardsum/_native.so``, built ahead of time (a wheel brings it, or
:func:`.builder.build`), is taken when it is whole, was built from the sources that stand beside it and has kernels for
this host's GPUs, whatever torch and Python are installed (it uses their stable ABIs only). Otherwise it is built at
first use into a cache (:mod:`.cache`), under a name that is a hash of sources, flags, torch, compilers, architectures.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.log import log
from . import builder
from . import recipe as recipes
from .artifact import read_record
from .cache import cached_library

_lock = threading.Lock()
_status: Status | None = None


@dataclass(frozen=True)
class Status:
    """Which path runs. ``backend`` is "native" or "torch"; ``cpu_isa`` the instruction set of the native CPU kernels
    ("avx512", "avx2", "baseline", "" without them); ``reason`` says why, in one sentence."""

    backend: str
    library: Path | None
    has_cuda: bool
    cpu_isa: str
    reason: str


def load() -> bool:
    """Load the native library, once per process; cheap afterwards. Whether this call has loaded it.

    Raises:
        RuntimeError: ``SHARDSUM_BACKEND=native`` and it cannot be built or loaded.
        ValueError: ``SHARDSUM_BACKEND`` is something else than auto, native or torch.
    """
    return _status is None and _load_once()


def is_decided() -> bool:
    """Whether :func:`load` has nothing left to do."""
    return _status is not None


# torch.compile calls it while tracing instead of tracing through it. (The public decorator,
# torch.compiler.assume_constant_result, does the same and imports all of torch._dynamo first.)
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def status() -> Status:
    """What :func:`load` decided (it is called if it was not yet)."""
    load()
    assert _status is not None
    return _status


def limit_cpu_isa(name: str | None) -> str:
    """Let the CPU kernels use at most ``name`` ("baseline", "avx2", "avx512"; None: the best of this processor).

    For tests and benchmarks: the result of every operator is the same. Returns the instruction set then in use.

    Raises:
        RuntimeError: no native library is loaded.
    """
    library = status().library
    if library is None:
        raise RuntimeError(f"there are no native CPU kernels here: {status().reason}")
    return _limit_cpu_isa(library, name)


def note_fallback(device: torch.device) -> None:
    """Called by the plain-torch operators: CUDA tensors that reach them past a loaded library deserve a word.

    Warns once that they run in plain torch and why.

    Raises:
        RuntimeError: ``SHARDSUM_BACKEND=native`` does not allow that.
    """
    if device.type != "cuda" or _status is None or _status.backend != "native":
        return
    if os.environ.get("SHARDSUM_BACKEND") == "native":
        raise RuntimeError(f"SHARDSUM_BACKEND=native, but the library has no CUDA kernel: {_status.reason}")
    _warn_of_fallback(_status.reason)


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    log.warning("shardsum sums CUDA tensors in plain torch (the same bits, slower), CPU tensors natively: %s", reason)


def _load_once() -> bool:
    global _status
    with _lock:
        if _status is not None:
            return False
        choice = os.environ.get("SHARDSUM_BACKEND", "auto")
        if choice not in ("auto", "native", "torch"):
            raise ValueError(f"SHARDSUM_BACKEND: expected auto, native or torch, got {choice!r}")
        if choice == "torch":
            _status = Status("torch", None, False, "", "SHARDSUM_BACKEND=torch")
            return False
        try:
            _status = _load_library()
        except Exception as error:
            if choice == "native":
                raise RuntimeError(f"SHARDSUM_BACKEND=native, but {error}") from error
            reason = str(error)
            _status = Status("torch", None, False, "", reason)
            log.warning("shardsum runs in plain torch (the same bits, slower): %s", reason)
            return False
    return True


def _load_library() -> Status:
    path, reason = _find()
    torch.ops.load_library(str(path))
    has_cuda = bool(ctypes.CDLL(str(path)).shardsum_has_cuda())
    if torch.version.cuda and not has_cuda:
        reason += f"; without a CUDA part: {recipes.cuda_absence()}"
    return Status("native", path, has_cuda, _limit_cpu_isa(path, None), reason)


def _limit_cpu_isa(library: Path, name: str | None) -> str:
    limit = ctypes.CDLL(str(library)).shardsum_limit_cpu_isa
    limit.argtypes, limit.restype = [ctypes.c_char_p], ctypes.c_char_p
    return limit(name.encode() if name else None).decode()


def _find() -> tuple[Path, str]:
    """The library to load and where it is from."""
    note = ""
    if (path := builder.AHEAD_OF_TIME).exists():
        stale = _stale_reason(path)
        if stale is None:
            return path, f"built ahead of time: {path}"
        note = f" ({path} is ignored: {stale})"
    try:
        path = cached_library()
    except RuntimeError as error:
        raise RuntimeError(f"{error}{note}") from error
    return path, f"built at first use: {path}{note}"


def _stale_reason(library: Path) -> str | None:
    """Why a library built ahead of time should not be loaded here, or None."""
    record = read_record(library)
    if record is None:
        return "it is not a whole library of this project"
    if record.sources != recipes.source_hash():
        return "it was built from other sources"
    missing = recipes.missing_archs(record.archs)
    if missing and recipes.find_toolkit():
        return f"it has no kernels for sm_{', sm_'.join(missing)}, and they can be built here"
    return None
