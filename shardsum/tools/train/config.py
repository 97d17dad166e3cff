"""The settings of ``shardsum train``: frozen dataclasses, one per subject, every field with its default and its line.

They are read from YAML and from the command line (:mod:`shardsum.tools.cli`); this file imports no torch, so that
``--help`` is quick. A wrong value is a ValueError that names the option and the value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal


def _require(holds: bool, option: str, expected: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{option}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """The sequence-parallel group: R virtual ranks on however many processes were launched."""

    num_virtual_ranks: int = 4
    """How many virtual ranks there are, R. The bits of a run depend on it. The number of processes (1 to R) changes
    nothing but time."""
    placement: Literal["contiguous", "zigzag"] = "contiguous"
    """Which process hosts which virtual ranks. Zigzag balances causal attention. No bit depends on it."""
    transport: Literal["auto", "local", "gather", "all_to_all", "carry", "peer"] = "auto"
    """How rows move between processes. No bit depends on it."""
    timeout: float = 300.0
    """The number of seconds after which a silent process is an error."""
    costs: str | None = None
    """The file of shardsum bench --calibrate by which transport auto decides. By default it is a built-in table."""

    def __post_init__(self) -> None:
        _require(self.num_virtual_ranks >= 1, "group.num_virtual_ranks", "at least 1", self.num_virtual_ranks)
        _require(0 < self.timeout <= 10**8, "group.timeout", "up to 100000000 seconds", self.timeout)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The byte-level transformer."""

    width: int = 128
    """How many features a token has."""
    layers: int = 3
    """How many transformer blocks the model has."""
    heads: int = 4
    """How many query heads a block has. The width must be a multiple of twice this number."""
    kv_heads: int = 2
    """How many key and value heads a block has. Groups of query heads share them."""
    dropout: float = 0.0
    """The probability of dropping a feature of a block's output. Each virtual rank has a generator of its
    own."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads"):
            _require(getattr(self, name) >= 1, f"model.{name}", "at least 1", getattr(self, name))
        _require(
            self.width % (2 * self.heads) == 0, "model.width", f"a multiple of 2 * heads = {2 * self.heads}", self.width
        )
        _require(self.heads % self.kv_heads == 0, "model.kv_heads", f"a divisor of heads = {self.heads}", self.kv_heads)
        _require(0 <= self.dropout < 1, "model.dropout", "a probability in [0, 1)", self.dropout)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training run."""

    parallel: Literal["context", "documents"] = "context"
    """context: one sequence of packed documents is split over the virtual ranks, attention crosses their borders.
    documents: every virtual rank takes a document of its own, so shards have different lengths."""
    steps: int = 200
    """How many optimizer steps the whole run takes. A resumed run counts the steps before it."""
    sequence_length: int = 2048
    """How many tokens the packed sequence of "context" has. It need not be a multiple of the virtual ranks."""
    document_length: int = 768
    """The longest document in bytes. Longer ones are cut."""
    accumulation: int = 1
    """How many micro-steps' gradients one optimizer step adds up."""
    learning_rate: float = 0.003
    """The peak of the schedule, which rises linearly and then falls as 1 / sqrt(step)."""
    warmup: int = 10
    """How many steps the learning rate rises."""
    weight_decay: float = 0.1
    """The weight decay of AdamW. It applies to matrices only."""
    clip: float = 1.0
    """The largest norm of the gradient. 0 turns clipping off."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """The precision of matrix products and attention (autocast). auto is bf16 on a GPU and fp32 on a CPU."""
    seed: int = 0
    """The seed of the initial weights, the order of the documents and the dropout."""
    threads: int = 1
    """How many threads a process computes with. Runs on different numbers of processes agree only with 1."""
    save_every: int = 50
    """How many steps lie between two checkpoints. 0 saves only the last step."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "accumulation", "threads"):
            _require(getattr(self, name) >= 1, f"train.{name}", "at least 1", getattr(self, name))
        _require(0 <= self.seed < 2**32, "train.seed", "0 or more, below 2^32", self.seed)
        for name in ("steps", "warmup", "weight_decay", "clip", "save_every"):
            _require(getattr(self, name) >= 0, f"train.{name}", "0 or more", getattr(self, name))
        _require(self.document_length >= 16, "train.document_length", "at least 16 bytes", self.document_length)
        _require(self.learning_rate > 0, "train.learning_rate", "a positive number", self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of shardsum train."""

    group: GroupConfig = field(default_factory=GroupConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: str | None = None
    """The folder of text files to train on. By default these are the source files of Python's standard library."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the run computes. With cuda every process takes the GPU of its LOCAL_RANK."""
    folder: str | None = None
    """The folder of everything that the run writes. By default it is runs/ and the time of the start."""
    resume: Literal["never", "required", "auto"] | None = None
    """Whether to go on from the checkpoint in the run folder. never: a folder that holds one is refused; required: one
    that holds none is refused; auto: go on if there is one. Default: auto under a launcher, else never."""
    trace: bool = False
    """Write hashes of every step's loss, gradients and parameters, for shardsum compare --runs."""

    def __post_init__(self) -> None:
        if self.resume == "required" and self.folder is None:
            raise ValueError("resume: say which run to go on with (--folder FOLDER)")


def to_yaml(config: RunConfig) -> str:
    """The configuration as a file that ``shardsum train --config`` reads."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False)
