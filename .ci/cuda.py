"""Compile and link the CUDA sources, and load the library, with any torch.

The sources differ between architectures below and from sm_90 on only (__CUDA_ARCH__), so they are translated for these
two. A change's machine code is made for sm_90 alone and not optimised. With --all it is that of the wheel, as the
nightly does.
"""

import ctypes
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch

from shardsum.native import builder, recipe

if "--all" in sys.argv:
    archs, front_ends = ("80", "90", "100", "120"), ("80", "90")
else:
    archs, front_ends = ("90",), ("90",)
    os.environ["NVCC_APPEND_FLAGS"] = "-gencode=arch=compute_80,code=compute_80 -Xcicc -O0 -Xptxas -O0"
made = dataclasses.replace(recipe.make_recipe(archs), front_ends=front_ends)
with tempfile.TemporaryDirectory() as folder:
    library = builder.compile_into(made, Path(folder), Path(folder))
    torch.ops.load_library(str(library))
    has_cuda = bool(ctypes.CDLL(str(library)).shardsum_has_cuda())
    assert has_cuda == (torch.version.cuda is not None), has_cuda
print(f"CUDA sources compile, to the end for sm_{', sm_'.join(made.archs)}; the library loads with {torch.__version__}")
