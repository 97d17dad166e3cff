"""Where a run starts: settings of the process, its folder, and nothing or a checkpoint; the same on every process."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from ...training.shard_group import ShardGroup
from ..launcher import from_first, gather_texts, launch_name, on_all, under_launcher
from . import checkpoint
from .checkpoint import Checkpoint
from .config import RunConfig
from .data import Corpus
from .folder import RunFolder, new_folder

_WORKSPACE = ":4096:8"  # one of the two cuBLAS workspaces with which its results are deterministic


def make_deterministic(config: RunConfig) -> None:
    """Fix everything outside the arithmetic that a result could depend on (docs/training.md says why each). Call it
    before anything computes.

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


def choose_folder(group: ShardGroup, config: RunConfig) -> Path | None:
    """The run's folder if it has a name before it starts: the one asked for, or under a launcher that restarts what
    fails, one that its restarts find again. None: a new one. Collective."""
    if config.folder is not None:
        return Path(config.folder)
    name = from_first(group, lambda: launch_name() or "")
    return Path("runs") / name if name else None


def starting_point(group: ShardGroup, config: RunConfig, folder: Path | None) -> tuple[Corpus, Checkpoint | None]:
    """The data, and the checkpoint to resume (None for a new run). Collective.

    Raises:
        ValueError: on every process, if one of them cannot start so, or if they would start from different points.
        OSError: on every process, if one of them cannot read a file.
    """
    corpus, found = on_all(group, lambda: _read(config, folder))
    known = json.dumps([asdict(config), corpus.digest, found.metadata["sha256"] if found else None])
    digests = gather_texts(group, hashlib.sha256(known.encode()).hexdigest())
    for v, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"virtual rank {v}'s process differs from virtual rank 0's in its settings, its data or its checkpoint "
                f"(the run folder must be one that all processes see): {digest[:8]} and {digests[0][:8]}"
            )
    return corpus, found


def _read(config: RunConfig, folder: Path | None) -> tuple[Corpus, Checkpoint | None]:
    mode = config.resume or ("auto" if under_launcher() else "never")
    exists = folder is not None and checkpoint.exists(folder)
    if exists and mode == "never":
        raise ValueError(f"folder: {folder} holds a checkpoint; go on with --resume or name another folder")
    found = None
    if folder is not None and (mode == "required" or (exists and mode == "auto")):
        found = checkpoint.load(folder)
    corpus = Corpus(config.data, config.train.document_length, config.train.seed)
    if config.train.parallel == "context":
        corpus.check_fills(config.train.sequence_length)
    if found is not None:
        checkpoint.check_settings(found, config, corpus.digest)
    return corpus, found


def open_folder(group: ShardGroup, path: Path | None) -> RunFolder:
    """The run folder, created and locked by process 0. Collective.

    Raises:
        OSError: on every process, if it cannot be created or another run is writing it.
    """

    def claim() -> str:
        folders.append(RunFolder(path or new_folder(Path("runs"))))
        folders[0].claim()
        return str(folders[0].path)

    folders: list[RunFolder] = []
    name = from_first(group, claim)
    return folders[0] if folders else RunFolder(Path(name))
