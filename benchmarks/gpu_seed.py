"""How should a kernel learn which rows contribute? Four ways on the seed shape, against the library and torch.compile.

    python benchmarks/gpu_seed.py [--json FILE]

R = 4 rows of 20 fp32 values with lengths 8, 12, 10, 18. Microseconds a call inside a CUDA graph, median and spread;
every variant is verified first. The address of a buffer decides which part of the L2 it lies in, which is worth several
percent here: 32 sets of buffers take turns, the same sets for every variant, so that an average of places is compared.

empty              a kernel that does nothing: the floor of a launch
mask tensor        the kernel reads a bool mask, then what it selects
constant memory    the same with the mask in __constant__ memory
compiled bits      the mask is part of the code: other lengths need another kernel
arguments          lengths as kernel arguments
shardsum           ragged_sum with host lengths
device lengths     sum_padded_device: lengths in a tensor, read by the kernel
compile            torch.compile of out.copy_((x * mask).sum(0))
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import parser, report_of, start

from shardsum import ragged_sum
from shardsum.core import reference
from shardsum.local import kernels
from shardsum.native import loader as native
from shardsum.native import recipe as building
from shardsum.tools.bench.timing import Timing, sampler, turns

SIZE, LENGTHS = 20, [8, 12, 10, 18]
VARIANTS = ("empty", "mask tensor", "constant memory", "compiled bits", "arguments")
SETS = 32


@dataclass
class Row:
    variant: str
    seconds: Timing


def build() -> ctypes.CDLL:
    """Compile gpu_seed_variants.cu for this GPU."""
    toolkit = building.find_toolkit()
    if toolkit is None:
        raise RuntimeError("no CUDA toolkit with nvcc, headers and static runtime found")
    source = Path(__file__).with_name("gpu_seed_variants.cu")
    library = Path(tempfile.mkdtemp()) / "variants.so"
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    options = ["-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{arch}", "-cudart=static", "-Xcompiler=-fPIC", "-shared"]
    subprocess.run([str(toolkit.nvcc), *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def run(args: argparse.Namespace, device: torch.device) -> None:
    assert native.status().has_cuda, native.status().reason
    report, library = report_of(args), build()
    xs = [torch.randn(len(LENGTHS), SIZE, device="cuda") for _ in range(SETS)]
    outs = [torch.empty(SIZE, device="cuda") for _ in range(SETS)]
    ends = torch.tensor(LENGTHS, device="cuda")
    mask = torch.arange(SIZE, device="cuda") < ends[:, None]
    if error := library.set_constant_mask(mask.cpu().numpy().tobytes()):
        raise RuntimeError(f"CUDA error {error}")
    host = (ctypes.c_int * len(LENGTHS))(*LENGTHS)

    def variant(i: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def call(x: torch.Tensor, out: torch.Tensor) -> None:
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, mask, out)]
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := library.launch_variant(i, pointers[0], pointers[1], host, pointers[2], stream):
                raise RuntimeError(f"CUDA error {error}")

        return call

    compiled = torch.compile(lambda x, out: out.copy_((x * mask).sum(0)), dynamic=False)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        **{name: variant(i) for i, name in enumerate(VARIANTS)},
        "shardsum": lambda x, out: ragged_sum(x, LENGTHS, out=out),
        "device lengths": lambda x, out: kernels.sum_padded_device(out, x, None, ends, False, None),
        "compile": compiled,
    }
    for name, call in calls.items():
        for x, out in zip(xs, outs):
            call(x, out.fill_(float("nan")))
            want = reference.ragged_sum([x[r, :n] for r, n in enumerate(LENGTHS)], [0] * 4, SIZE, out_dtype=x.dtype)
            assert name == "empty" or torch.equal(out, want), f"{name} is wrong"
    bound = {name: [lambda c=call, x=x, o=o: c(x, o) for x, o in zip(xs, outs)] for name, call in calls.items()}
    timings = turns({name: sampler(calls, device="cuda") for name, calls in bound.items()}, args.samples)
    for name, timing in timings.items():
        report.add([Row(name, timing)], f"{name:16} {timing}")


if __name__ == "__main__":
    options = parser(__doc__, samples=25)
    options.set_defaults(device="cuda")
    start(options.parse_args(), run)
