"""The library for this machine, built at first use into a folder that all processes of a user share.

``$SHARDSUM_CACHE``, default ``~/.cache/shardsum``. A library there is code: it is loaded only if it is whole and nobody
but this user or root can have written it (:mod:`.artifact`). One that is not whole is built again; a folder that others
can write is refused. An operating-system lock makes other processes wait for the one that builds, and is released when
that one dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..core.log import log
from .artifact import read_record, untrusted_reason
from .builder import compile_into, time_limit
from .recipe import Recipe, archs_to_build, make_recipe

_SILENT_WAIT = 5.0  # seconds


def cache_folder() -> Path:
    """The folder that libraries are built into.

    Raises:
        RuntimeError: SHARDSUM_CACHE is not set and this user has no home.
    """
    chosen = os.environ.get("SHARDSUM_CACHE")
    try:
        return Path(chosen or "~/.cache/shardsum").expanduser()
    except RuntimeError as error:
        raise RuntimeError(f"the native library has no place in a cache ({error}); set SHARDSUM_CACHE") from error


def cached_library() -> Path:
    """The library for this torch, these compilers and these GPUs, from the cache or built into it.

    Raises:
        RuntimeError: no compiler, it failed or took too long, or the cache cannot be written or trusted.
    """
    folder = cache_folder()
    library = folder / f"native-{(recipe := make_recipe(archs_to_build())).key()}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trust(folder)
        if not _is_usable(library):
            with _lock(library):
                if not _is_usable(library):
                    _build(recipe, library)
    except OSError as error:
        raise RuntimeError(f"the native library cannot be put into {folder} ({error}); set SHARDSUM_CACHE") from error
    return library


def _is_usable(library: Path) -> bool:
    """Whether there is a library, and a whole one."""
    if not os.path.lexists(library):
        return False
    _check_trust(library)
    return read_record(library) is not None


def _check_trust(path: Path) -> None:
    reason = untrusted_reason(path)
    if reason is not None:
        raise RuntimeError(f"the cache of the native library is not trusted, for a library is code: {reason}")


@contextlib.contextmanager
def _lock(library: Path) -> Iterator[None]:
    """The right to build this library. Says so if that takes long; gives up after the time limit."""
    lock = FileLock(f"{library}.lock")
    try:
        lock.acquire(timeout=_SILENT_WAIT)
    except Timeout:
        limit = time_limit()
        log.warning("shardsum waits for another process that builds %s, for %g s at most", library, limit)
        try:
            lock.acquire(timeout=limit)
        except Timeout:
            raise RuntimeError(
                f"another process has held {lock.lock_file} for {limit:g} s (SHARDSUM_BUILD_TIMEOUT): it may hang"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _build(recipe: Recipe, library: Path) -> None:
    """Build beside ``library``, where a rename is one step: nobody ever sees half of it. The lock is held."""
    for left_by_a_killed_build in library.parent.glob(f".build-{library.stem}-*"):
        shutil.rmtree(left_by_a_killed_build, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".build-{library.stem}-", dir=library.parent) as folder:
        os.replace(compile_into(recipe, Path(folder), library), library)
