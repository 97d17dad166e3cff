"""What a build compiles: sources, compilers, flags, architectures, and the command of every file.

One shared object holds the CPU kernels (three instruction sets on x86-64) and, where architectures are asked for and an
nvcc with its headers is found, the CUDA kernels. It uses PyTorch's stable ABI for torch 2.11 and links no CUDA library:
the runtime is static.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", _TARGET)
_NVCC_FLAGS = (
    "-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-cudart", "static", "--threads", "0",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off",
)  # fmt: skip
# What is linked statically stays private: it must not mix with another libstdc++ of the process.
_LINK_FLAGS = (
    "-shared", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL",
)  # fmt: skip
_CUDA_LINK_FLAGS = ("-lcudart_static", "-lpthread", "-ldl", "-lrt")
# cpu/kernels.cpp is compiled once for each of these; cpu/select.cpp picks one at run time.
_ISA_FLAGS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"),
}


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


@functools.cache
def local_archs() -> tuple[str, ...]:
    """The architectures of this host's GPUs, as nvcc names them: ("90",) with H200s, () without a GPU or a driver.

    NVML says so: it does not start CUDA, after which a process could no longer be forked.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        found = set()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for index in range(count.value):
                device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
                if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0 and (
                    nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
                ):
                    found.add(10 * major.value + minor.value)
        return tuple(map(str, sorted(found)))
    finally:
        nvml.nvmlShutdown()


def runs_on(built: tuple[str, ...], arch: str) -> bool:
    """Whether a library with machine code for ``built``, and PTX of the newest of them, has kernels for ``arch``.

    Machine code runs on later GPUs of the same major version; PTX on every later GPU.
    """
    here, archs = int(arch), [int(a) for a in built]
    return bool(archs) and (max(archs) <= here or any(a // 10 == here // 10 and a <= here for a in archs))


def archs_to_build() -> tuple[str, ...]:
    """The CUDA architectures to compile for: $SHARDSUM_CUDA_ARCHS ("90", "80,90", "none"), else those of this host's
    GPUs; none where torch has no CUDA."""
    chosen = os.environ.get("SHARDSUM_CUDA_ARCHS")
    if chosen is None:
        return local_archs() if torch.version.cuda else ()
    if chosen.strip().lower() in ("", "none"):
        return ()
    return tuple(a.strip().replace(".", "") for a in chosen.split(","))


def cuda_absence() -> str:
    """Why a library that was built here has no CUDA part, if it has none."""
    if os.environ.get("SHARDSUM_CUDA_ARCHS") is not None and not archs_to_build():
        return "SHARDSUM_CUDA_ARCHS asks for none"
    if not archs_to_build():
        return "this host has no GPU that NVML knows (SHARDSUM_CUDA_ARCHS=90 compiles for one that it has not)"
    if find_toolkit() is None:
        return "no CUDA toolkit with nvcc, headers and static runtime is found (CUDA_HOME, /usr/local/cuda, PATH)"
    return "it was built without one"


def missing_archs(built: tuple[str, ...]) -> tuple[str, ...]:
    """Of the architectures to build here, those that a library built for ``built`` has no kernels for."""
    return tuple(a for a in archs_to_build() if not runs_on(built, a)) if torch.version.cuda else ()


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
    #: Virtual architectures that nvcc translates the sources for; machine code for each of ``archs`` is made from the
    #: newest of them that it runs. Default: each is translated for itself, which may give better code.
    front_ends: tuple[str, ...] = ()

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
        kernels = self.sources / "cpu" / "kernels.cpp"
        jobs = [
            *((f"{s.stem}.o", s, bindings) for s in sorted(self.sources.glob("*.cpp"))),
            *((f"{s.stem}.peer.o", s, bindings) for s in sorted(self.sources.glob("peer/*.cpp"))),
            *((f"{s.stem}.cpu.o", s, base) for s in sorted(self.sources.glob("cpu/*.cpp")) if s != kernels),
            *((f"{isa}.cpu.o", kernels, [*base, f"-DSHARDSUM_ISA={isa}", *f]) for isa, f in isas.items()),
        ]
        if self.archs:
            assert self.toolkit is not None
            nvcc = [
                str(self.toolkit.nvcc),
                "-ccbin",
                self.compiler,
                *_NVCC_FLAGS,
                *_gencode(self.archs, self.front_ends or self.archs),
            ]
            jobs += [(f"{s.stem}.cuda.o", s, nvcc) for s in _cuda_sources(self.sources)]
        return [(o, s, [*command, "-c", str(s), "-o", o]) for o, s, command in jobs]

    def link(self, objects: list[str]) -> list[str]:
        torch_libraries = Path(torch.__file__).parent / "lib"
        command = [self.compiler, *objects, "-o", "library.so", f"-L{torch_libraries}", *_LINK_FLAGS]
        if self.archs:
            assert self.toolkit is not None
            command += [f"-L{self.toolkit.library_folder}", *_CUDA_LINK_FLAGS]
        return command


def make_recipe(archs: tuple[str, ...]) -> Recipe:
    """The recipe for these CUDA architectures with the compilers of this machine; without a toolkit, for none.

    Raises:
        RuntimeError: no C++ compiler was found, or a compiler does not even print its version.
    """
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
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{shlex.join(command)} does not run: {error}") from error


def _known_archs(toolkit: Toolkit, archs: tuple[str, ...]) -> tuple[str, ...]:
    """For each architecture itself or, where this nvcc is older, the newest one before it: its PTX runs there, too."""
    known = [int(a.removeprefix("compute_")) for a in _output([str(toolkit.nvcc), "--list-gpu-arch"]).split()]
    older = (max((k for k in known if k <= int(a)), default=int(a)) for a in archs)
    return tuple(map(str, dict.fromkeys(older)))


def _gencode(archs: tuple[str, ...], front_ends: tuple[str, ...]) -> list[str]:
    """Machine code for each architecture, and PTX of the newest for those to come."""
    virtual = {a: max((f for f in front_ends if int(f) <= int(a)), key=int) for a in archs}
    flags = [f"-gencode=arch=compute_{v},code=sm_{a}" for a, v in virtual.items()]
    newest = virtual[max(archs, key=int)]
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]
