"""Which GPUs this host has, asked of NVML: it does not start CUDA, after which a process could no longer be forked."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def local_archs() -> tuple[str, ...]:
    """The architectures of this host's GPUs, as nvcc names them: ("90",) with H200s, () without a GPU or a driver."""
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
