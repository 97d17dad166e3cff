"""Where a run starts: at nothing or at its checkpoint, and at the same on every process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from .. import bits
from ..group import ShardGroup
from ..launcher import gather_bytes
from . import checkpoint
from .config import RunConfig


def starting_point(group: ShardGroup, config: RunConfig, folder: Path, data_digest: str) -> dict[str, Tensor]:
    """The tensors of the checkpoint to resume, none for a new run. Collective.

    Raises:
        ValueError: on every process, if one of them cannot start so, or if they would start from different points.
    """
    tensors, error = {}, ""
    try:
        tensors = _read(config, folder, data_digest)
    except ValueError as e:
        error = str(e)
    known = json.dumps([asdict(config), data_digest, bits.digest(*tensors.values()), bool(error)])
    digests = gather_bytes(group, hashlib.sha256(known.encode()).digest())
    if error:
        raise ValueError(error)
    for v, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"virtual rank {v}'s process differs from virtual rank 0's in its settings, its data or its checkpoint "
                f"(the run folder must be one that all processes see): {digest.hex()[:8]} and {digests[0].hex()[:8]}"
            )
    return tensors


def _read(config: RunConfig, folder: Path, data_digest: str) -> dict[str, Tensor]:
    path = folder / checkpoint.NAME
    if config.resume:
        return checkpoint.load(path, config, data_digest)
    if path.exists():
        raise ValueError(f"folder: {folder} holds a checkpoint; go on with --resume or name another folder")
    return {}
