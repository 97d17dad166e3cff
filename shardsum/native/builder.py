"""Compile csrc/ into one library with ninja: what :mod:`shardsum.native.loader` loads.

One shared object holds the CPU kernels (three instruction sets on x86-64) and, where an nvcc with its headers is found,
the CUDA kernels. It uses PyTorch's stable ABI for torch 2.11 and links no CUDA library: the runtime is static.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

DEFAULT_ARCHS = ("80", "90", "100", "120")
_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", _TARGET)
_NVCC_FLAGS = (
    "-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-cudart", "static", "--threads", "0",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--as-needed")
_CUDA_LINK_FLAGS = ("-lcudart_static", "-lpthread", "-ldl", "-lrt")
# cpu/kernels.cpp is compiled once for each of these; cpu/select.cpp picks one at run time.
_ISA_FLAGS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"),
}
_MARKER = b"shardsum-build:"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can really compile: nvcc, headers and the static runtime."""

    nvcc: Path
    library_folder: Path


def source_folder() -> Path:
    """csrc/, installed beside the package's modules or, in a checkout, beside the package.

    Raises:
        RuntimeError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "bindings.cpp").exists():
            return folder
    raise RuntimeError(f"the sources of the native library are not beside {package}")


def source_hash() -> str:
    """A hash of every source and of the flags: equal hashes mean the same library, up to compilers."""
    folder = source_folder()
    sha = hashlib.sha256(repr((_CXX_FLAGS, _NVCC_FLAGS, _LINK_FLAGS, _ISA_FLAGS)).encode())
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:32]


def find_toolkit() -> Toolkit | None:
    """The first of $CUDA_HOME, $CUDA_PATH, /usr/local/cuda and nvcc's own folder that has all it takes."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if on_path:
        candidates.append(str(Path(on_path).resolve().parent.parent))
    for home in map(Path, filter(None, candidates)):
        nvcc = home / "bin" / "nvcc"
        libraries = [d for d in (home / "lib64", home / "lib") if (d / "libcudart_static.a").exists()]
        if nvcc.exists() and (home / "include" / "cuda_runtime.h").exists() and libraries:
            return Toolkit(nvcc, libraries[0])
    return None


def default_archs() -> tuple[str, ...]:
    """The CUDA architectures to compile for: $SHARDSUM_CUDA_ARCHS ("90", "80,90", "none") or DEFAULT_ARCHS."""
    chosen = os.environ.get("SHARDSUM_CUDA_ARCHS")
    if chosen is None:
        return DEFAULT_ARCHS
    if chosen.strip().lower() in ("", "none"):
        return ()
    return tuple(a.strip().replace(".", "") for a in chosen.split(","))


def cuda_absence() -> str:
    """Why a build here has no CUDA part, if it has none."""
    if not default_archs():
        return "SHARDSUM_CUDA_ARCHS asks for none"
    if find_toolkit() is None:
        return "no CUDA toolkit with nvcc, headers and static runtime is found (CUDA_HOME, /usr/local/cuda, PATH)"
    return "it was built without one"


def built_from(library: Path) -> tuple[str, tuple[str, ...]]:
    """The source hash and CUDA architectures recorded in a built library; ("", ()) if there are none."""
    data = library.read_bytes()
    begin = data.find(_MARKER)
    if begin < 0:
        return "", ()
    record = data[begin + len(_MARKER) : data.index(b";", begin)].decode()
    sources, _, archs = record.partition(":")
    return sources, tuple(filter(None, archs.split(",")))


def stale_reason(library: Path) -> str | None:
    """Why a library built ahead of time should not be loaded here, or None."""
    sources, archs = built_from(library)
    if sources != source_hash():
        return "it was built from other sources"
    if not archs and torch.version.cuda and default_archs() and find_toolkit():
        return "it has no CUDA part, and one can be built here"
    return None


def cached_build() -> Path:
    """The library for this torch and these compilers, from the cache or built into it.

    Raises:
        RuntimeError: no compiler, it failed, or the cache cannot be written.
    """
    recipe = _recipe(default_archs() if torch.version.cuda else ())
    cache = Path(os.environ.get("SHARDSUM_CACHE") or Path.home() / ".cache" / "shardsum")
    library = cache / f"native-{recipe.key()}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(library) + ".lock"):
            for left_by_a_killed_build in cache.glob(f".build-{library.stem}-*"):
                shutil.rmtree(left_by_a_killed_build, ignore_errors=True)
            if not library.exists():
                _run(recipe, library)
    except OSError as error:
        raise RuntimeError(f"the native library cannot be put into {cache} ({error}); set SHARDSUM_CACHE") from error
    return library


def build(output: Path, *, archs: tuple[str, ...] | None = None) -> Path:
    """Build into ``output``, replacing it in one step."""
    recipe = _recipe(default_archs() if archs is None else archs)
    if archs and recipe.toolkit is None:
        raise RuntimeError(f"archs: {archs} asked for, but no CUDA toolkit with nvcc, headers and static runtime found")
    _run(recipe, output.resolve())
    return output


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a build produces."""

    sources: Path
    source_hash: str
    compiler: str
    compiler_version: str
    toolkit: Toolkit | None
    nvcc_version: str
    archs: tuple[str, ...]

    def key(self) -> str:
        """The name of the result in the cache."""
        parts = (
            self.source_hash, torch.__version__, self.compiler, self.compiler_version, self.nvcc_version, self.archs,
            platform.machine(),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def commands(self) -> list[tuple[str, Path, list[str]]]:
        """(object, source, command) for every file to compile."""
        torch_headers = Path(torch.__file__).parent / "include"
        base = [self.compiler, *_CXX_FLAGS, "-isystem", str(torch_headers)]
        record = f'-DSHARDSUM_BUILD="{self.source_hash}:{",".join(self.archs)}"'
        bindings = [*base, record, *(["-DSHARDSUM_WITH_CUDA"] if self.archs else [])]
        isas = _ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
        cpu = self.sources / "cpu"
        jobs = [
            ("bindings.o", self.sources / "bindings.cpp", bindings),
            ("peer_bindings.o", self.sources / "peer" / "bindings.cpp", bindings),
            *((f"{name}.o", cpu / f"{name}.cpp", base) for name in ("select", "sum_masked", "sum_rows")),
            *((f"{isa}.o", cpu / "kernels.cpp", [*base, f"-DSHARDSUM_ISA={isa}", *f]) for isa, f in isas.items()),
        ]
        if self.archs:
            assert self.toolkit is not None
            nvcc = [str(self.toolkit.nvcc), "-ccbin", self.compiler, *_NVCC_FLAGS, *_gencode(self.archs)]
            jobs += [(f"{s.stem}.cuda.o", s, nvcc) for s in _cuda_sources(self.sources)]
        return [(o, s, [*command, "-c", str(s), "-o", o]) for o, s, command in jobs]

    def link(self, objects: list[str]) -> list[str]:
        torch_libraries = Path(torch.__file__).parent / "lib"
        command = [self.compiler, *objects, "-o", "library.so", f"-L{torch_libraries}", *_LINK_FLAGS]
        if self.archs:
            assert self.toolkit is not None
            command += [f"-L{self.toolkit.library_folder}", *_CUDA_LINK_FLAGS]
        return command


def _recipe(archs: tuple[str, ...]) -> Recipe:
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "c++")))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler was found (g++ on PATH, or CXX) to build the native library with")
    sources = source_folder()
    toolkit = find_toolkit() if archs and _cuda_sources(sources) else None
    archs = _known_archs(toolkit, archs) if toolkit else ()
    nvcc_version = _output([str(toolkit.nvcc), "--version"]) if toolkit else ""
    version = _output([compiler, "--version"])
    return Recipe(sources, source_hash(), compiler, version, toolkit, nvcc_version, archs)


def _cuda_sources(sources: Path) -> list[Path]:
    return sorted([*sources.glob("cuda/*.cu"), *sources.glob("peer/*.cu")])


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{shlex.join(command)} does not run: {error}") from error


def _known_archs(toolkit: Toolkit, archs: tuple[str, ...]) -> tuple[str, ...]:
    """Of the default architectures those that this nvcc knows; what was asked for by name is left to nvcc."""
    if archs != DEFAULT_ARCHS:
        return archs
    known = _output([str(toolkit.nvcc), "--list-gpu-arch"]).split()
    return tuple(a for a in archs if f"compute_{a}" in known)


def _gencode(archs: tuple[str, ...]) -> list[str]:
    """Machine code for each architecture, and PTX of the newest for those to come."""
    newest = max(archs, key=int)
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def _run(recipe: Recipe, output: Path) -> None:
    """Build in a folder of our own beside ``output``, then rename: nobody ever sees half a library."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".build-{output.stem}-", dir=output.parent) as folder:
        _write_ninja(recipe, Path(folder))
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        command = [_ninja(), *jobs]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-30:])
            raise RuntimeError(f"the native library cannot be built with {recipe.compiler}:\n{tail}")
        os.replace(Path(folder) / "library.so", output)


def _ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise RuntimeError("ninja is not installed (pip install ninja)") from None
        return found


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
