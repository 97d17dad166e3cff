"""The checkpoint of a run: one safetensors file that any number of processes can resume, and the one before it.

Everything in it belongs to the model or to a virtual rank, nothing to a process:

    model.NAME                                parameters
    optimizer.NAME.{step,exp_avg,exp_avg_sq}  AdamW's state (none before the first step)
    rng.cpu, rng.cuda                         uint8 ``(R, n)``: the generator state of every virtual rank
    losses                                    float32 ``(steps,)``
    loss_per_position                         float32 ``(document_length, 2)``: decayed sum and count

Metadata, all strings: ``format``, ``config`` (the settings as JSON), ``data`` (digest of the documents), ``steps``
(also the position in the data), and ``sha256`` over the rest: the metadata, and every tensor's name, dtype, shape and
bytes. Nothing is resumed from a file whose bytes do not have that sum.

A file is written beside the old one, forced to the disk, and takes the name; the old one is kept as ``PREVIOUS``. A
damaged newest checkpoint is therefore a loss of some steps, and said so, not of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save as serialize
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from ...training.shard_group import ShardGroup
from .config import RunConfig
from .folder import RunFolder, read_file

NAME = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
_FORMAT = "2"
#: Settings that a resumed run may change: how long, how and where it runs, none of which its bits depend on.
_FREE = (
    "folder",
    "resume",
    "trace",
    "data",
    "group.placement",
    "group.transport",
    "group.timeout",
    "group.costs",
    "train.steps",
    "train.save_every",
)


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds. Tensors on the CPU, in memory of their own; ``note`` says if it is not the newest file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    note: str = ""

    @property
    def steps(self) -> int:
        return int(self.metadata["steps"])


def save(folder: RunFolder, tensors: Mapping[str, Tensor], config: RunConfig, data: str, keep: bool) -> None:
    """Write the newest checkpoint; ``keep`` the one before it (not if that one is known to be damaged).

    Raises:
        OSError: it cannot be written; the files are as they were.
    """
    own = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    metadata = {
        "format": _FORMAT,
        "config": json.dumps(asdict(config)),
        "data": data,
        "steps": str(own["losses"].numel()),
    }
    metadata["sha256"] = _sum(metadata, own)
    # Not safetensors.torch.save: it makes a ctypes type for every new size, here of the losses, that stays for ever.
    content = serialize({name: t.numpy() for name, t in own.items()}, metadata)
    folder.replace(NAME, content, keep=PREVIOUS if keep else None)


def exists(folder: Path) -> bool:
    """Whether the folder holds something to resume, damaged or not."""
    return any((folder / name).exists() for name in (NAME, PREVIOUS))


def load(folder: Path) -> Checkpoint:
    """The newest checkpoint of a folder whose bytes are as they were written.

    Raises:
        ValueError: there is none; one sentence that says what is wrong with those there are.
    """
    wrong = []
    for name in (NAME, PREVIOUS):
        try:
            found = read(folder / name)
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except (ValueError, OSError) as error:
            wrong.append(str(error))
        else:
            note = f"{wrong[0]}; going on from {name} after step {found.steps}" if wrong else ""
            return Checkpoint(found.tensors, found.metadata, note)
    if not exists(folder):
        raise ValueError(f"resume: {folder} holds no {NAME}")
    raise ValueError(f"resume: no checkpoint in {folder} can be used: {'; '.join(wrong)}")


def read(path: Path) -> Checkpoint:
    """One file, its sum verified.

    Raises:
        ValueError: it is damaged, cut, or not a checkpoint of this format.
        OSError: it cannot be read.
    """
    data = read_file(path)
    try:
        tensors = parse_tensors(data)
        end = 8 + int.from_bytes(data[:8], "little")
        metadata = dict(json.loads(data[8:end]).get("__metadata__", {}))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {len(data)} bytes that are not a complete checkpoint") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {metadata.get('format')}; this version reads format {_FORMAT}")
    if metadata.get("sha256") != _sum(metadata, tensors):
        raise ValueError(f"{path} is damaged: its bytes do not have the sum that was stored with them")
    missing = sorted({"config", "data", "steps"} - metadata.keys())
    if missing:
        raise ValueError(f"{path} is not a checkpoint of a run: it does not say {', '.join(missing)}")
    return Checkpoint(tensors, metadata)


def check_settings(found: Checkpoint, config: RunConfig, data: str) -> None:
    """Refuse settings and data with which the run would not go on to the bits of an uninterrupted one.

    Raises:
        ValueError: it names the setting and both values.
    """
    saved, now = _flat(json.loads(found.metadata["config"])), _flat(asdict(config))
    for option in sorted(saved.keys() | now.keys()):
        if option not in _FREE and saved.get(option) != now.get(option):
            raise ValueError(
                f"resume: {option} is {now.get(option)!r}, but the checkpoint was made with {saved.get(option)!r}"
            )
    if found.metadata["data"] != data:
        raise ValueError("resume: the data is not the data of the checkpoint; name its folder with --data")


def check_tensors(found: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or one of another shape or dtype.

    Raises:
        ValueError: it names the tensor.
    """
    for name in sorted(expected.keys() | found.tensors.keys()):
        if name not in found.tensors:
            raise ValueError(f"resume: the checkpoint has no {name}")
        if name not in expected:
            raise ValueError(f"resume: the checkpoint has a tensor that this run does not know: {name}")
        have, want = found.tensors[name], expected[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            raise ValueError(
                f"resume: {name} is {have.dtype} {tuple(have.shape)} in the checkpoint, "
                f"expected {want.dtype} {tuple(want.shape)}"
            )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, group: ShardGroup) -> dict[str, Tensor]:
    """Parameters and AdamW state by name, and the random streams of all R virtual ranks. Collective."""
    state: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    streams = group.generators.state_dict()
    for kind in _kinds(group):
        shards = [streams[f"{v}.{kind}"].to(group.device) for v in group.virtual_ranks]
        whole = group.all_gather(shards, [len(shards[0])] * group.num_virtual_ranks)
        state[f"rng.{kind}"] = whole.unflatten(0, (group.num_virtual_ranks, -1)).cpu()
    return state


def expected_state(model: nn.Module, group: ShardGroup, steps: int, loss_per_position: Tensor) -> dict[str, Tensor]:
    """Tensors of the names, dtypes and shapes that a checkpoint after ``steps`` steps has; no values."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p
        if steps:
            state |= {f"optimizer.{name}.{key}": p for key in ("exp_avg", "exp_avg_sq")}
            state[f"optimizer.{name}.step"] = torch.empty(())
    streams, v = group.generators.state_dict(), group.virtual_ranks[0]
    state |= {f"rng.{kind}": streams[f"{v}.{kind}"].expand(group.num_virtual_ranks, -1) for kind in _kinds(group)}
    return state | {"losses": torch.empty(steps), "loss_per_position": loss_per_position}


@torch.no_grad()
def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: ShardGroup, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of :func:`state_of`; writes into the parameters in place, so their aliases stay good."""
    for name, p in model.named_parameters():
        p.copy_(tensors[f"model.{name}"])
        prefix = f"optimizer.{name}."
        for key, value in tensors.items():
            if key.startswith(prefix):
                # AdamW keeps its step count on the CPU, the moments with the parameter.
                entry = key.removeprefix(prefix)
                optimizer.state[p][entry] = value.clone() if entry == "step" else value.to(p.device)
    kinds, ranks = _kinds(group), group.virtual_ranks
    group.generators.load_state_dict({f"{v}.{kind}": tensors[f"rng.{kind}"][v] for v in ranks for kind in kinds})


def _kinds(group: ShardGroup) -> list[str]:
    """Of generators."""
    return ["cpu"] if group.device.type == "cpu" else ["cpu", group.device.type]


def _sum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    rest = {key: value for key, value in metadata.items() if key != "sha256"}
    sha = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        sha.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        sha.update(_bytes(t))
    return sha.hexdigest()


def _bytes(t: Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
