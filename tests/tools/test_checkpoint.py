"""Checkpoint files: whatever happens to them, what is loaded is what was saved, or one sentence says what is wrong."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from shardsum.tools.train import RunConfig, checkpoint, loop, run
from shardsum.tools.train.checkpoint import NAME, PREVIOUS
from shardsum.tools.train.folder import RunFolder
from tests.processes import run_processes
from tests.tools.runs import tiny, train_processes

pytestmark = pytest.mark.usefixtures("no_picture", "torch_settings")
CONFIG = RunConfig()


def tensors(step: int, size: int = 300) -> dict[str, torch.Tensor]:
    return {"model.w": torch.arange(size) + step, "flag": torch.tensor([True]), "losses": torch.zeros(step)}


def save(folder: Path, step: int, size: int = 300, keep: bool = True) -> None:
    checkpoint.save(RunFolder(folder), tensors(step, size), CONFIG, "digest", keep)


# -- one file ---------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    data = (tmp_path / NAME).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    generator = random.Random(0)
    places = [*range(64), *(generator.randrange(8 * header) for _ in range(600))]  # header
    places += [8 * header + generator.randrange(8 * (len(data) - header)) for _ in range(300)]  # tensors
    for place in places:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / NAME).write_bytes(flipped)
        with pytest.raises(ValueError, match=NAME) as refused:
            checkpoint.read(tmp_path / NAME)
        assert "\n" not in str(refused.value)
    (tmp_path / NAME).write_bytes(data)
    assert checkpoint.read(tmp_path / NAME).steps == 3


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3)
    data = (tmp_path / NAME).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1):
        (tmp_path / NAME).write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"{NAME} is damaged: {length} bytes"):
            checkpoint.read(tmp_path / NAME)
    for junk in (b"\xff" * 4096, b"\0" * 4096, data + b"x"):
        (tmp_path / NAME).write_bytes(junk)
        with pytest.raises(ValueError, match="is damaged"):
            checkpoint.read(tmp_path / NAME)


def test_a_file_of_another_program_or_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(serialize({"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match="has format None; this version reads format 2"):
        checkpoint.read(tmp_path / NAME)
    bare = {"format": "2"}
    data = serialize({"a": torch.zeros(2)}, bare | {"sha256": checkpoint._sum(bare, {"a": torch.zeros(2)})})
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(ValueError, match="is not a checkpoint of a run: it does not say config, data, steps"):
        checkpoint.read(tmp_path / NAME)


# -- two files --------------------------------------------------------------------------------------------------------


def test_the_one_before_is_used_when_the_newest_is_damaged_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert checkpoint.load(tmp_path).steps == 3 and checkpoint.load(tmp_path).note == ""
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    found = checkpoint.load(tmp_path)
    assert found.steps == 2 and torch.equal(found.tensors["model.w"], tensors(2)["model.w"])
    assert "is damaged" in found.note and f"going on from {PREVIOUS} after step 2" in found.note
    save(tmp_path, 4, keep=False)  # the damaged one does not take the good one's place
    (tmp_path / NAME).unlink()
    found = checkpoint.load(tmp_path)
    assert found.steps == 2 and f"{NAME} is missing" in found.note
    (tmp_path / PREVIOUS).write_bytes(b"")
    with pytest.raises(
        ValueError, match=rf"no checkpoint in .* can be used: {NAME} is missing; .*{PREVIOUS} is damaged"
    ):
        checkpoint.load(tmp_path)


def _save_for_ever(folder: Path) -> None:
    own = RunFolder(folder)
    own.claim()
    for step in range(checkpoint.load(folder).steps + 1, 10**6):
        checkpoint.save(own, tensors(step, size=100_000), CONFIG, "digest", keep=True)


def test_killed_at_any_moment_a_checkpoint_remains_and_leftovers_go(tmp_path: Path) -> None:
    """50 times: SIGKILL 0 to 40 ms after the first of many saves began. No checkpoint is older than the one before."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    generator, steps, unfinished = random.Random(0), 2, 0
    for _ in range(50):
        torch.set_num_threads(1)  # a forked child with several threads hangs
        child = os.fork()
        if child == 0:
            _save_for_ever(tmp_path)
        time.sleep(0.02 + generator.random() * 0.04)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += len(list(tmp_path.glob(".*.unfinished")))
        found = checkpoint.load(tmp_path)
        assert found.steps >= steps and not found.note.startswith("damaged")
        assert torch.equal(
            found.tensors["model.w"], tensors(found.steps, 100_000 if found.steps > 2 else 300)["model.w"]
        )
        steps = found.steps
    assert steps > 2 and unfinished > 0  # it did save, and some saves were interrupted
    folder = RunFolder(tmp_path)
    folder.claim()
    assert {p.name for p in tmp_path.iterdir()} <= {NAME, PREVIOUS}
    folder.release()


def test_a_loaded_checkpoint_is_not_mapped(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found = checkpoint.load(tmp_path)
    assert found.tensors and NAME not in Path("/proc/self/maps").read_text()


# -- what it holds ----------------------------------------------------------------------------------------------------


def _rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """A checkpoint with a right sum and other tensors."""
    metadata = checkpoint.read(folder / NAME).metadata
    held = {name: t for name, t in {**load_file(folder / NAME), **change}.items() if t is not None}
    metadata["sha256"] = checkpoint._sum(metadata, held)
    (folder / NAME).write_bytes(serialize(held, metadata))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("optimizer.norm.weight.exp_avg", None, "the checkpoint has no optimizer.norm.weight.exp_avg"),
        ("model.norm.weight", None, "the checkpoint has no model.norm.weight"),
        ("model.norm.weight", torch.zeros(1), r"model.norm.weight is torch.float32 \(1,\) in the checkpoint, expected"),
        ("model.norm.weight", torch.zeros(32).double(), "model.norm.weight is torch.float64"),
        ("losses", torch.zeros(1), r"losses is torch.float32 \(1,\) in the checkpoint, expected torch.float32 \(2,\)"),
        ("rng.cpu", torch.zeros(3, 5056, dtype=torch.uint8), "rng.cpu is"),
        ("model.other", torch.zeros(1), "the checkpoint has a tensor that this run does not know: model.other"),
    ],
)
def test_wrong_tensors_are_named(
    text: str, half: Path, tmp_path: Path, name: str, value: torch.Tensor | None, sentence: str
) -> None:
    config = dataclasses.replace(tiny(text, tmp_path / "run", steps=2), resume="required")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).write_bytes((half / NAME).read_bytes())
    _rewrite(tmp_path / "run", {name: value})
    with pytest.raises(ValueError, match=f"resume: {sentence}"):
        run(config)


@pytest.fixture(scope="module")
def half(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that was stopped half-way, with a checkpoint of each of its steps."""
    folder = tmp_path_factory.mktemp("half") / "run"
    train_processes(tiny(text, folder, steps=2, save_every=1), 2)
    return folder


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    text: str, half: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train_processes(tiny(text, tmp_path / "whole"), 1)
    config = tiny(text, tmp_path / "run")
    (tmp_path / "run").mkdir()
    for name in (NAME, PREVIOUS):
        (tmp_path / "run" / name).write_bytes((half / name).read_bytes())
    with (tmp_path / "run" / NAME).open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x55" * 20)
    capfd.readouterr()
    assert train_processes(dataclasses.replace(config, resume="auto"), 2).hash == whole.hash
    assert (
        f"is damaged: its bytes do not have the sum that was stored with them; going on from {PREVIOUS} after step 1"
        in (" ".join(capfd.readouterr().out.split()))
    )
    assert checkpoint.read(tmp_path / "run" / PREVIOUS).steps == 1  # not the damaged one
    (tmp_path / "run" / PREVIOUS).unlink()
    (tmp_path / "run" / NAME).write_bytes(b"\0" * 100)
    for resume in ("auto", "required"):
        errors = run_processes(error_of, 2, dataclasses.replace(config, resume=resume))
        assert errors[0] == errors[1] and errors[0].startswith("resume: no checkpoint in")


def error_of(rank: int, world_size: int, config: RunConfig, limit: int = 0, user: int = 0) -> str:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    honest = loop.open_folder

    def open_folder(*args: Any) -> RunFolder:
        os.seteuid(user or os.geteuid())  # only now: the processes' store is a file, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit or before[0], before[1]))
        return honest(*args)

    loop.open_folder = open_folder
    try:
        run(config)
    except (ValueError, OSError) as error:
        os.seteuid(os.getuid())  # while the error holds the group: its store closes its file
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return str(error)
    return ""
