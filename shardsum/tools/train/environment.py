"""What a run fixes before it computes.

``docs/training.md`` says why the hash of a run needs each of these settings.
"""

from __future__ import annotations

import os

import torch

from .config import RunConfig

_WORKSPACE = ":4096:8"  # one of the two cuBLAS workspaces with which its results are deterministic


def make_deterministic(config: RunConfig) -> None:
    """Fix everything outside the arithmetic that a result could depend on. Call it before anything computes.

    Raises:
        ValueError: CUBLAS_WORKSPACE_CONFIG already asks for another workspace.
    """
    torch.set_num_threads(config.train.threads)
    torch.use_deterministic_algorithms(True)
    if config.device == "cuda":
        given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
        if given != _WORKSPACE:
            raise ValueError(f"CUBLAS_WORKSPACE_CONFIG: expected {_WORKSPACE} or unset, got {given!r}")
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
