"""``shardsum doctor``: what this machine has, what was tried on it, and in the last line which path sums run on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from ..native import loader as native
from ..native import recipe as building
from . import selftest
from .launcher import launched

_ISA = {"avx512": "AVX-512", "avx2": "AVX2"}
#: What shardsum reads from the environment, and what the libraries below it do that decides whether processes meet.
ENVIRONMENT = {
    "SHARDSUM_BACKEND": "auto, native or torch: which path sums run on",
    "SHARDSUM_CACHE": "folder of the native library; default ~/.cache/shardsum",
    "SHARDSUM_CUDA_ARCHS": "CUDA architectures to build for, as 80,90, or none; default: those of this machine's GPUs",
    "SHARDSUM_BUILD_TIMEOUT": "seconds that building the native library may take; default 3600",
    "SHARDSUM_COSTS": "table of shardsum bench --calibrate that transport auto decides by",
    "CXX": "C++ compiler; default g++",
    "CUDA_HOME": "CUDA toolkit with nvcc",
    "MAX_JOBS": "compilers that run at once",
    "OMP_NUM_THREADS": "compute threads of a process; a launcher sets 1",
    "CUDA_VISIBLE_DEVICES": "GPUs that a process may use",
    "GLOO_SOCKET_IFNAME": "network interface of processes on CPUs",
    "NCCL_SOCKET_IFNAME": "network interface of processes on GPUs",
    "NCCL_DEBUG": "INFO: NCCL says what it does",
}


def run(device: str = "cpu", as_json: bool = False, timeout: float = 60.0) -> int:
    """Print the report; 0 when sums can run as asked and everything that was tried gave the right bits. Collective.

    Under a launcher process 0 alone prints. What is being done goes to stderr at once, the report to stdout.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    report = _Report(as_json, active=rank == 0)
    report.say("looking at this machine")
    for name, text in _facts():
        report.fact(name, text)
    report.environment({name: os.environ[name] for name in ENVIRONMENT if name in os.environ})
    report.say("loading the native library; the first time it is built, which takes a minute, with nvcc several")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is printed below
            status = native.status()
    except (RuntimeError, ValueError) as error:
        return report.end(f"not ok: {error}")
    if status.backend == "native":
        report.fact("native", _one_line(status.reason))
    for trial in _trials(report, device, timeout):
        report.trial(trial)
    if device == "cuda" and not torch.cuda.is_available():
        return report.end("not ok: device: cuda, but torch finds no CUDA device")
    return report.end(_verdict(status))


class _Report:
    """Lines as they come, or one JSON object at the end."""

    def __init__(self, as_json: bool, active: bool) -> None:
        self.as_json, self.active = as_json, active
        self.facts: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.trials: list[selftest.Trial] = []

    def say(self, doing: str) -> None:
        if self.active:
            print(f"shardsum doctor: {doing} ...", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        if self.active and not self.as_json:
            print(text, flush=True)

    def fact(self, name: str, text: str) -> None:
        self.facts[name] = text
        self.line(f"{name:<10} {text}")

    def environment(self, variables: dict[str, str]) -> None:
        self.variables = variables
        self.line("environment variables (those that are set have their value):")
        for name, meaning in ENVIRONMENT.items():
            value = f"={variables[name]}" if name in variables else ""
            self.line(f"  {name + value:<34} {meaning}")

    def trial(self, trial: selftest.Trial) -> None:
        self.trials.append(trial)
        self.line(trial.line())

    def end(self, verdict: str) -> int:
        failed = [trial.name for trial in self.trials if trial.ok is False]
        if failed:
            verdict = f"not ok: {', '.join(failed)} failed"
        ok = not verdict.startswith("not ok")
        self.line(verdict)
        if self.active and self.as_json:
            trials: list[dict[str, Any]] = [vars(trial) for trial in self.trials]
            content = {"ok": ok, "verdict": verdict, **self.facts, "environment": self.variables, "trials": trials}
            print(json.dumps(content, indent=2), flush=True)
        return 0 if ok else 1


def _trials(report: _Report, device: str, timeout: float) -> Iterator[selftest.Trial]:
    processes = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if processes == 1:
        report.say("trying every transport that can run here; for those between processes two are started")
        yield from selftest.alone(device, timeout)
        return
    report.say(f"waiting for all {processes} processes, at most {timeout:g} s")
    try:
        with launched(device, timeout) as own:
            report.say("trying all pairs of processes and every transport between them")
            store = dist.distributed_c10d._get_default_store()
            yield from selftest.together(dist.PrefixStore("doctor", store), own, timeout)
    except RuntimeError as error:
        yield selftest.Trial("forming the process group", False, str(error))


def _verdict(status: native.Status) -> str:
    if status.backend == "torch":
        return f"ok: plain torch, the same bits but slower ({_one_line(status.reason)})"
    cuda = ""
    if torch.cuda.is_available():
        cuda = " and native CUDA kernel" if status.has_cuda else "; no CUDA kernel, sums on a GPU run in plain torch"
    return f"ok: native CPU kernel ({_ISA.get(status.cpu_isa, status.cpu_isa)}){cuda}"


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
