"""``shardsum doctor``: what this machine has, and in the last line which path sums run on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .. import __version__
from ..native import loader as native
from ..native import recipe as building

_ISA = {"avx512": "AVX-512", "avx2": "AVX2"}


def report() -> int:
    """Print the report; 0 when sums can run as asked, 1 when SHARDSUM_BACKEND asks for what cannot be had."""
    for name, text in _facts():
        print(f"{name:<10} {text}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is printed below
            status = native.status()
    except (RuntimeError, ValueError) as error:
        print(f"not ok: {error}")
        return 1
    if status.backend == "torch":
        print(f"ok: plain torch, the same bits but slower ({_one_line(status.reason)})")
        return 0
    print(f"{'native':<10} {_one_line(status.reason)}")
    cuda = ""
    if torch.cuda.is_available():
        cuda = " and native CUDA kernel" if status.has_cuda else "; no CUDA kernel, sums on a GPU run in plain torch"
    print(f"ok: native CPU kernel ({_ISA.get(status.cpu_isa, status.cpu_isa)}){cuda}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "shardsum", f"{__version__} in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield "torch", torch.__version__
    yield "cuda", _cuda()
    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    yield "processes", ", ".join(backends) or "torch.distributed has no backend"
    yield (
        "compiler",
        _version(os.environ.get("CXX") or "g++") or _version("c++") or "none (the native library needs one)",
    )
    toolkit = building.find_toolkit()
    yield "nvcc", (_version(str(toolkit.nvcc)) if toolkit else None) or "none (only CUDA kernels need it)"


def _cuda() -> str:
    if torch.version.cuda is None:
        return "none: this torch is built for CPU"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda} in torch, but no usable GPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {len(names)} GPU: {', '.join(sorted(set(names)))}"


def _version(program: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    lines = [line for line in output.splitlines() if any(c.isdigit() for c in line)]
    release = next((line for line in lines if "release" in line), lines[0] if lines else "")  # nvcc puts it last
    return f"{path}: {release}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
