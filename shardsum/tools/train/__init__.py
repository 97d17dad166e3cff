"""The main job: a byte-level transformer on real text, the same bits on any number of processes."""

from .config import GroupConfig, ModelConfig, RunConfig, TrainConfig
from .loop import RunResult, run

__all__ = ["GroupConfig", "ModelConfig", "RunConfig", "RunResult", "TrainConfig", "run"]
