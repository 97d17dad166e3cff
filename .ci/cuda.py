"""Compile and link the CUDA sources for every architecture of the wheel, and load the library, with any torch.

The sources differ between architectures below and from sm_90 on only (__CUDA_ARCH__), so they are translated for two
and assembled for all: half the time of the wheel's build.
"""

import ctypes
import dataclasses
import tempfile
from pathlib import Path

import torch

from shardsum.native import builder, recipe

made = dataclasses.replace(recipe.make_recipe(recipe.DEFAULT_ARCHS), front_ends=("80", "90"))
with tempfile.TemporaryDirectory() as folder:
    library = builder.compile_into(made, Path(folder), Path(folder))
    torch.ops.load_library(str(library))
    has_cuda = bool(ctypes.CDLL(str(library)).shardsum_has_cuda())
    assert has_cuda == (torch.version.cuda is not None), has_cuda
print(f"CUDA sources compile for sm_{', sm_'.join(made.archs)}; the library loads with torch {torch.__version__}")
