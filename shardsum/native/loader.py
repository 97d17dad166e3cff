"""Build, find and load the native library that implements the raw operators of :mod:`shardsum.local.kernels`.

Nothing happens at import. :func:`load` is called before the first operator and decides once per process:

* ``SHARDSUM_BACKEND=torch``   never loads it: the operators run in plain torch, with the same bits.
* ``SHARDSUM_BACKEND=native``  loads it, or raises a RuntimeError that says why it cannot.
* ``SHARDSUM_BACKEND=auto``    (default) loads it, or warns once and runs in plain torch.

A library comes from one of two places. ``shardsum/_native.so``, built ahead of time (a wheel brings it; :func:`build`
makes it), is taken when it is whole, was built from the sources that stand beside it and has kernels for this host's
GPUs, whatever torch and Python are installed (it uses their stable ABIs only). Otherwise it is built at first use into
a cache (:mod:`.cache`), under a name that is a hash of sources, flags, torch, compilers and architectures.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import recipe as recipes
from .artifact import read_record
from .builder import build as build_library
from .cache import cached_library

_AHEAD_OF_TIME = Path(__file__).parents[1] / "_native.so"
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


def _first_call_with(*args: Any) -> Any:
    load()
    return call_with(*args)


def _refuse(*args: Any) -> Any:
    raise RuntimeError("no native kernel")


def _pack(values: Any) -> bytes | None:
    if type(values) is not list or not {int}.issuperset(map(type, values)):  # True and 8.0 equal ints
        return None
    try:
        return struct.pack(f"{len(values)}q", *values)
    except struct.error:
        return None


def _make_none(items: Any) -> Callable[..., None]:
    return lambda *args: None


def _make_never(items: Any) -> Callable[..., bool]:
    return lambda *args: False


def _are_plain(items: Any, kind: type, name: str | None) -> bool:
    return all(type(x) is kind and (name is None or getattr(x, name) is False) for x in items)


#: ``call_with(operator, lengths, size, mean, scale, *tensors)``: calls an operator that takes tensors alone, one or two
#: and ``lengths`` where those are a tensor (:mod:`shardsum.local.kernels`). RuntimeError where it or an argument's type
#: refuses the call.
call_with: Callable[..., Any] = _first_call_with
#: ``make_usual_sum(items)``: the function of the usual sum (csrc/usual.h, local/usual.py); without a native library
#: it finds all calls unusual.
make_usual_sum: Callable[[tuple[Any, ...]], Callable[..., Any]] = _make_none
#: ``make_again(items)``: the function that runs a known collective again (csrc/again.h).
make_again: Callable[[tuple[Any, ...]], Callable[..., bool]] = _make_never
#: ``pack(values)``: a list of ints that fit into 64 bits as bytes; None for anything else. (This one until the native
#: library brings its own, which is ten times as fast.)
pack: Callable[[Any], bytes | None] = _pack
#: ``are_plain(items, kind, name)``: whether all are exactly of that type, and their attribute ``name``, unless that is
#: None, is False. (Likewise.)
are_plain: Callable[[Any, type, str | None], bool] = _are_plain


def load() -> None:
    """Load the native library, once per process; cheap afterwards.

    Raises:
        RuntimeError: ``SHARDSUM_BACKEND=native`` and it cannot be built or loaded.
        ValueError: ``SHARDSUM_BACKEND`` is something else than auto, native or torch.
    """
    if _status is None:
        _load_once()


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


def build(output: Path | None = None, *, archs: tuple[str, ...] | None = None) -> Path:
    """Build the library ahead of time; returns its path.

    Args:
        output: default ``_native.so`` beside the package, where :func:`load` looks first.
        archs: CUDA architectures as ("80", "90"), () for none; default: ``SHARDSUM_CUDA_ARCHS`` or those of this host's
            GPUs where torch has CUDA and a CUDA toolkit is found, none elsewhere.

    Raises:
        RuntimeError: no compiler, or it failed.
    """
    return build_library(output or _AHEAD_OF_TIME, archs=archs)


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
    warnings.warn(
        f"shardsum sums CUDA tensors in plain torch (the same bits, slower), CPU tensors natively: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


def _load_once() -> None:
    global _status, call_with
    with _lock:
        if _status is not None:
            return
        call_with = _refuse  # unless a library brings its own
        choice = os.environ.get("SHARDSUM_BACKEND", "auto")
        if choice not in ("auto", "native", "torch"):
            raise ValueError(f"SHARDSUM_BACKEND: expected auto, native or torch, got {choice!r}")
        if choice == "torch":
            _status = Status("torch", None, False, "", "SHARDSUM_BACKEND=torch")
            return
        try:
            _status = _load_library()
        except Exception as error:
            if choice == "native":
                raise RuntimeError(f"SHARDSUM_BACKEND=native, but {error}") from error
            reason = str(error)
            _status = Status("torch", None, False, "", reason)
            warnings.warn(
                f"shardsum runs in plain torch (the same bits, slower): {reason}",
                RuntimeWarning,
                stacklevel=2,
            )


def _load_library() -> Status:
    path, reason = _find()
    torch.ops.load_library(str(path))
    has_cuda = bool(ctypes.CDLL(str(path)).shardsum_has_cuda())
    _take_functions(path)
    if torch.version.cuda and not has_cuda:
        reason += f"; without a CUDA part: {recipes.cuda_absence()}"
    return Status("native", path, has_cuda, _limit_cpu_isa(path, None), reason)


def _objects_are_ordinary() -> bool:
    """Whether an object is a reference count and a type, as csrc/python.h has it: not in free-threaded builds, nor in
    those that trace references, nor in other implementations."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    return object.__basicsize__ == 2 * struct.calcsize("P")


def _take_functions(library: Path) -> None:
    """The functions of csrc/python_calls.h, which know the objects of an ordinary CPython only."""
    global call_with, pack, are_plain, make_again, make_usual_sum
    if not _objects_are_ordinary():
        return
    functions = ctypes.PyDLL(str(library))

    def make(name: str) -> Any:
        maker = getattr(functions, f"shardsum_{name}")
        maker.restype = ctypes.py_object
        return maker()

    call_with, pack, are_plain = map(make, ("call_with", "pack", "are_plain"))
    make_again, make_usual_sum = map(make, ("make_again", "make_usual_sum"))


def _limit_cpu_isa(library: Path, name: str | None) -> str:
    limit = ctypes.CDLL(str(library)).shardsum_limit_cpu_isa
    limit.argtypes, limit.restype = [ctypes.c_char_p], ctypes.c_char_p
    return limit(name.encode() if name else None).decode()


def _find() -> tuple[Path, str]:
    """The library to load and where it is from."""
    note = ""
    if _AHEAD_OF_TIME.exists():
        stale = _stale_reason(_AHEAD_OF_TIME)
        if stale is None:
            return _AHEAD_OF_TIME, f"built ahead of time: {_AHEAD_OF_TIME}"
        note = f" ({_AHEAD_OF_TIME} is ignored: {stale})"
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
