"""Where a run starts: at nothing or at its checkpoint, and at the same on every process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from ...core import bits
from ...training.shard_group import ShardGroup
from ..launcher import gather_bytes
from . import checkpoint
from .config import RunConfig
from .data import Corpus


def starting_point(group: ShardGroup, config: RunConfig, folder: Path) -> tuple[Corpus, dict[str, Tensor]]:
    """The data, and the tensors of the checkpoint to resume (none for a new run). Collective.

    Raises:
        ValueError: on every process, if one of them cannot start so, or if they would start from different points.
    """
    start, error, known = None, "", ""
    try:
        start = corpus, tensors = _read(config, folder)
        known = json.dumps([asdict(config), corpus.digest, bits.digest(*tensors.values())])
    except (ValueError, OSError) as e:
        error = str(e)
    digests = gather_bytes(group, hashlib.sha256(known.encode()).digest())
    if start is None:
        raise ValueError(error)
    for v, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"virtual rank {v}'s process differs from virtual rank 0's in its settings, its data or its checkpoint "
                f"(the run folder must be one that all processes see): {digest.hex()[:8]} and {digests[0].hex()[:8]}"
            )
    return start


def _read(config: RunConfig, folder: Path) -> tuple[Corpus, dict[str, Tensor]]:
    path, settings = folder / checkpoint.NAME, config.train
    if path.exists() and not config.resume:
        raise ValueError(f"folder: {folder} holds a checkpoint; go on with --resume or name another folder")
    corpus = Corpus(config.data, settings.document_length, settings.seed)
    if settings.parallel == "context":
        corpus.check_fills(settings.sequence_length)
    return corpus, checkpoint.load(path, config, corpus.digest) if config.resume else {}
