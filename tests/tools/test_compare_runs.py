"""``shardsum compare --runs``: the first step, tensor and element in which two runs differ."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from shardsum.tools import cli
from shardsum.tools.train import RunConfig, checkpoint, run
from shardsum.tools.train.folder import RunFolder
from shardsum.tools.train.step import Step
from tests.tools.runs import tiny, train_processes

pytestmark = pytest.mark.usefixtures("no_picture", "torch_settings")


def test_runs_without_traces_are_compared_at_their_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"losses": torch.tensor([3.0, 2.0, 1.0]), "model.w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    changed = {name: t.clone() for name, t in tensors.items()}
    changed["losses"][1] = torch.nextafter(changed["losses"][1], torch.tensor(9.0))
    changed["model.w"][1, 0] = 5.0
    for name, held in (("a", tensors), ("b", tensors), ("c", changed)):
        (tmp_path / name).mkdir()
        checkpoint.save(RunFolder(tmp_path / name), held, RunConfig(), "", keep=True)

    a, b, c = (str(tmp_path / name) for name in ("a", "b", "c"))
    assert cli.main(["compare", "--runs", a, b]) == 0
    assert capsys.readouterr().out.count("the same bits") == 2
    assert cli.main(["compare", "--runs", a, c]) == 1
    out = capsys.readouterr().out
    assert "losses[1]" in out and "1 ulp apart" in out
    assert "model.w[1, 0]: 3.0 against 5.0" in out


def train_wrong(config: RunConfig) -> None:
    """A run in which one element of one gradient of step 3 is one ulp off."""
    honest, calls = Step.__call__, []

    def step(self: Step, batches: list) -> object:
        result = honest(self, batches)
        calls.append(1)
        if len(calls) == 3:
            gradient = dict(self.model.named_parameters())["blocks.1.up.weight"].grad
            gradient[5, 7] = torch.nextafter(gradient[5, 7], torch.tensor(9.0))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", step)
        run(config)


def test_traces_tell_the_first_step_tensor_and_element(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def traced(name: str, steps: int) -> RunConfig:
        return dataclasses.replace(tiny(text, tmp_path / name, steps=steps), trace=True)

    a, b, c = (str(tmp_path / name) for name in "abc")
    train_processes(traced("a", 4), 1)
    train_processes(traced("b", 2), 2)
    train_processes(dataclasses.replace(traced("b", 4), resume="required"), 3)  # resumed, other processes: the same
    assert cli.main(["compare", "--runs", a, b]) == 0
    assert "traces of 4 steps: the same bits" in capsys.readouterr().out

    train_wrong(traced("c", 4))
    capsys.readouterr()
    assert cli.main(["compare", "--runs", a, c]) == 1
    out = capsys.readouterr().out
    assert "first difference: step 3, in gradient.blocks.1.up.weight\n" in out
    commands = re.findall(r"^  shardsum (train .*)$", out, re.MULTILINE)
    assert len(commands) == 2
    assert commands[1].endswith(f"--config {c}/config.yaml --folder {c}-step3 --train.steps 3 --trace")
    assert cli.main(commands[0].split()) == 0
    train_wrong(traced("c-step3", 3))
    capsys.readouterr()
    (command,) = re.findall(r"^  shardsum (compare .*)$", out, re.MULTILINE)
    assert cli.main(command.split()) == 1
    out = capsys.readouterr().out
    assert re.search(r"^  gradient.blocks.1.up.weight\[5, 7\]: .* against .*, 1 ulp apart$", out, re.MULTILINE)
