"""Compile and link the CUDA sources, and load the library, with any torch.

The sources differ between architectures below and from sm_90 on only (__CUDA_ARCH__), so they are translated for these
two. They are assembled for these two as well, or with --all for every architecture of the wheel, as the nightly does.
"""

import ctypes
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from shardsum.native import builder, recipe

FRONT_ENDS = ("80", "90")
archs = ("80", "90", "100", "120") if "--all" in sys.argv else FRONT_ENDS
made = dataclasses.replace(recipe.make_recipe(archs), front_ends=FRONT_ENDS)
with tempfile.TemporaryDirectory() as folder:
    library = builder.compile_into(made, Path(folder), Path(folder))
    torch.ops.load_library(str(library))
    has_cuda = bool(ctypes.CDLL(str(library)).shardsum_has_cuda())
    assert has_cuda == (torch.version.cuda is not None), has_cuda
print(f"CUDA sources compile for sm_{', sm_'.join(made.archs)}; the library loads with torch {torch.__version__}")
