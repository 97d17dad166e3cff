"""The folder of a run: who writes it, disks that are full, and no file written through a link."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from shardsum.tools.train import RunConfig, checkpoint, run
from shardsum.tools.train.checkpoint import NAME, PREVIOUS
from shardsum.tools.train.folder import RunFolder, new_folder
from tests.processes import run_processes
from tests.tools.runs import STEPS, tiny, train_processes
from tests.tools.test_checkpoint import error_of

pytestmark = pytest.mark.usefixtures("no_picture", "torch_settings")


def test_a_full_disk_is_one_sentence_on_all_and_the_checkpoint_before_goes_on(text: str, tmp_path: Path) -> None:
    """A file-size limit stands for a full disk: writing stops in the middle of the file."""
    whole = train_processes(tiny(text, tmp_path / "whole"), 1)
    config = dataclasses.replace(tiny(text, tmp_path / "run", save_every=1), resume="auto")
    train_processes(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2)), 2)
    size = (tmp_path / "run" / NAME).stat().st_size
    errors = run_processes(error_of, 2, config, size // 2)
    assert errors == [f"{tmp_path}/run/{NAME} cannot be written: File too large"] * 2
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {NAME, PREVIOUS, "config.yaml", "metrics.jsonl", "run.png"}
    assert checkpoint.load(tmp_path / "run").steps == 2
    assert train_processes(config, 1).hash == whole.hash


def _full_after_two_steps(rank: int, world_size: int, config: RunConfig) -> str:
    honest, lines = RunFolder.append, []

    def append(self: RunFolder, name: str, line: str) -> None:
        lines.append(line)
        if len(lines) > 2:
            raise OSError(f"{name} cannot be written: No space left on device")
        honest(self, name, line)

    RunFolder.append = append  # type: ignore[method-assign]
    return error_of(rank, world_size, config)


def test_metrics_that_cannot_be_written_end_the_run_alike_on_all(text: str, tmp_path: Path) -> None:
    errors = run_processes(_full_after_two_steps, 2, tiny(text, tmp_path / "run"))
    assert errors == ["metrics.jsonl cannot be written: No space left on device"] * 2


def test_a_folder_that_cannot_be_written_is_one_sentence(text: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        for path in (folder, folder / "run"):
            path.chmod(0o555)
        readable = folder / "text"
        os.chmod(folder, 0o755)
        readable.mkdir()
        (readable / "a.txt").write_text("some text\n" * 50)
        user = 65534 if os.getuid() == 0 else 0
        errors = run_processes(error_of, 2, tiny(str(readable), folder / "run", steps=1), 0, user)
        assert errors[0] == errors[1] == f"{folder}/run/config.yaml cannot be written: Permission denied"


def test_no_file_is_written_through_a_link(text: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    names = ["metrics.jsonl", "config.yaml", "run.png", "trace.jsonl", "trace.safetensors"]
    for name in names:
        (tmp_path / f"precious-{name}").write_text("precious")
        (tmp_path / "run" / name).symlink_to(tmp_path / f"precious-{name}")
    run(dataclasses.replace(tiny(text, tmp_path / "run", steps=1), trace=True))
    for name in names:
        assert (tmp_path / f"precious-{name}").read_text() == "precious"
        assert not (tmp_path / "run" / name).is_symlink()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_one_run_at_a_time_writes_a_folder(text: str, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "run")
    other.claim()
    with pytest.raises(OSError, match="another run is writing"):
        run(tiny(text, tmp_path / "run", steps=1))
    other.release()
    run(tiny(text, tmp_path / "run", steps=1))
    run(dataclasses.replace(tiny(text, tmp_path / "run", steps=STEPS), resume="required"))  # the lock was given back


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    assert [new_folder(tmp_path / "runs").name for _ in range(3)] == ["now", "now-1", "now-2"]


def test_lines_that_a_crash_cut_and_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [json.dumps({"step": step}) + "\n" for step in (2, 3, 4)]
    (tmp_path / "m").write_text("".join(rows) + '{"step"')
    folder.keep_steps("m", 3)
    assert (tmp_path / "m").read_text() == "".join(rows[:2])
    folder.append("m", "more\n")
    assert (tmp_path / "m").read_text() == "".join(rows[:2]) + "more\n"
