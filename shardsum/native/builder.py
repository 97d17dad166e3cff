"""Build the native library by ninja: in a folder of its own, then into place in one step."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..core.log import log
from .artifact import seal
from .recipe import Recipe, archs_to_build, make_recipe

#: Where a library that was built ahead of its first use is looked for.
AHEAD_OF_TIME = Path(__file__).parents[1] / "_native.so"


def build(output: Path | None = None, *, archs: tuple[str, ...] | None = None) -> Path:
    """Build into ``output``, replacing it in one step; a build that is killed leaves nothing beside it.

    Args:
        output: the library's path; default :data:`AHEAD_OF_TIME`.
        archs: CUDA architectures as ("80", "90"), () for none; default :func:`.recipe.archs_to_build`.

    Returns:
        The library's path.

    Raises:
        RuntimeError: no compiler, it failed, or it took longer than SHARDSUM_BUILD_TIMEOUT.
    """
    recipe = make_recipe(archs_to_build() if archs is None else archs)
    if archs and recipe.toolkit is None:
        raise RuntimeError(f"archs: {archs} asked for, but no CUDA toolkit with nvcc, headers and static runtime found")
    output = (output or AHEAD_OF_TIME).resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    for left_by_a_kill in output.parent.glob(f".{output.name}-*"):  # between the copy and the rename
        left_by_a_kill.unlink()
    with tempfile.TemporaryDirectory(prefix="shardsum-build-") as folder:
        library = compile_into(recipe, Path(folder), output)
        beside = output.with_name(f".{output.name}-{os.getpid()}")
        try:
            shutil.copy2(library, beside)
            os.replace(beside, output)
        finally:
            beside.unlink(missing_ok=True)
    return output


def compile_into(recipe: Recipe, folder: Path, destination: Path) -> Path:
    """Compile and link in ``folder``; the path of the sealed library there. ``destination`` is where it will go: one
    line on stderr says so, for the wait is long.

    Raises:
        RuntimeError: ninja is missing, a compiler failed (with the end of its output), or the time limit passed.
    """
    try:
        import ninja
    except ImportError as error:
        raise RuntimeError("the native library is built by ninja, which is not installed: pip install ninja") from error
    cuda = f" and CUDA kernels for sm_{', sm_'.join(recipe.archs)}" if recipe.archs else ""
    log.warning(
        "shardsum builds its native library: CPU kernels%s, usually in about %d s, into %s",
        *(cuda, _usual_seconds(recipe), destination),
    )
    _write_ninja(recipe, folder)
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    returncode, output = _run([str(Path(ninja.BIN_DIR) / "ninja"), *jobs], folder)
    if returncode != 0:
        tail = "\n".join(output.splitlines()[-30:])
        raise RuntimeError(f"the native library cannot be built with {recipe.compiler}:\n{tail}")
    library = folder / "library.so"
    seal(library)
    return library


def time_limit() -> float:
    """Seconds that a build, or waiting for another process's build, may take: $SHARDSUM_BUILD_TIMEOUT, else an hour.

    Raises:
        RuntimeError: it is not a positive number.
    """
    text = os.environ.get("SHARDSUM_BUILD_TIMEOUT", "3600")
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise RuntimeError(f"SHARDSUM_BUILD_TIMEOUT: expected seconds above 0, got {text!r}")


def _usual_seconds(recipe: Recipe) -> int:
    """About how long this build takes on this machine (of one core: a minute, and one more an architecture)."""
    processors = min(len(os.sched_getaffinity(0)), int(os.environ.get("MAX_JOBS") or 8), 8)
    return max(20, round(60 * (1 + len(recipe.archs)) / processors / 10) * 10)


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output; every process of the build ends with it, whatever ends the wait."""
    limit = time_limit()
    process = object.__new__(subprocess.Popen)  # known here even where a signal's exception comes while it starts
    try:
        process.__init__(  # type: ignore[misc]
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the native library was not built within {limit:g} s (SHARDSUM_BUILD_TIMEOUT): a compiler may hang"
        ) from None
    finally:
        if hasattr(process, "pid") and process.poll() is None:
            process.terminate()  # ninja passes it on to its compilers, which are in process groups of their own
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    return process.returncode, output


def _write_ninja(recipe: Recipe, folder: Path) -> None:
    lines = ["rule run", "  command = $cmd", "  description = $out", ""]
    objects = []
    for name, source, command in recipe.commands():
        objects.append(name)
        lines += [f"build {name}: run {_escaped(str(source))}", f"  cmd = {_shell(command)}", ""]
    lines += [f"build library.so: run {' '.join(objects)}", f"  cmd = {_shell(recipe.link(objects))}", ""]
    (folder / "build.ninja").write_text("\n".join(lines))


def _shell(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
