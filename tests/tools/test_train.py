"""The main job: one hash for any number of processes, resuming included; and what the data and the step must be.

Cheapest first: pure data, one process, forked processes, one real launcher.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from shardsum import ShardGroup
from shardsum.core import bits
from shardsum.core.layout import owners_of
from shardsum.tools import cli
from shardsum.tools.pictures import distinct_colours
from shardsum.tools.train import ModelConfig, RunConfig, RunResult, loop, plots, run
from shardsum.tools.train.checkpoint import NAME, PREVIOUS
from shardsum.tools.train.data import START, Corpus
from shardsum.tools.train.model import ByteTransformer
from shardsum.tools.train.step import Step
from tests.processes import run_processes
from tests.tools.runs import SMALLEST, STEPS, tiny, train_processes

pytestmark = pytest.mark.usefixtures("no_picture", "torch_settings")


# -- data -------------------------------------------------------------------------------------------------------------


def test_packed_sequences_are_the_whole_text_whatever_the_number_of_virtual_ranks(text: str) -> None:
    corpus = Corpus(text, max_length=48, seed=3)
    cpu, length = torch.device("cpu"), 110
    for ranks in (1, 4, 7):
        seen = b""
        for step in range(3):
            batch = corpus.packed(step, ranks, length)
            shards = [batch.shard(v, cpu) for v in range(ranks)]
            assert batch.cu_seqlens is not None and batch.cu_seqlens[-1] == length == sum(batch.lengths)
            inputs, targets, positions = (
                torch.cat([getattr(s, name) for s in shards]) for name in ("inputs", "targets", "positions")
            )
            starts = set(batch.cu_seqlens[:-1])
            for i in range(length):
                assert (inputs[i] == START) == (i in starts) == (positions[i] == 0)
                if i not in starts:
                    assert inputs[i] == targets[i - 1] and positions[i] == positions[i - 1] + 1
            seen += bytes(targets.tolist())
        order, _ = corpus._epoch(0)
        assert seen == b"".join(corpus.documents[i] for i in order)[: 3 * length]


def test_every_virtual_rank_has_its_own_document_and_an_epoch_has_each_once(text: str) -> None:
    corpus = Corpus(text, max_length=48, seed=3)
    steps = len(corpus.documents) // 4
    batches = [corpus.own_documents(step, 4) for step in range(steps)]
    seen = [piece.document for batch in batches for pieces in batch.pieces for piece in pieces]
    assert len(seen) == 4 * steps
    left = list(corpus.documents)
    for document in seen:
        left.remove(document)  # raises if one came twice
    assert len({tuple(batch.lengths) for batch in batches}) > 1
    assert max(map(len, corpus.documents)) == 48
    assert Corpus(text, max_length=48, seed=3).own_documents(9, 4) == corpus.own_documents(9, 4)
    assert Corpus(text, max_length=48, seed=4).own_documents(9, 4) != corpus.own_documents(9, 4)


def test_data_skips_binary_and_hidden_files_and_refuses_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match="no text in"):
        Corpus(str(tmp_path), 48, 0)
    (tmp_path / "b.txt").write_bytes(b"second\r\nline")
    (tmp_path / "a.txt").write_bytes(b"\n\nfirst\n\n\n\nblock\n")
    assert Corpus(str(tmp_path), 48, 0).documents == [b"first", b"block", b"second\nline"]
    with pytest.raises(ValueError, match="sequence_length: 22 is more than the 21 bytes"):
        Corpus(str(tmp_path), 48, 0).check_fills(22)
    assert Corpus(str(tmp_path), 48, 0).packed(0, 4, 21).lengths == [6, 5, 5, 5]


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", ["context", "documents"])
def test_the_loss_falls_and_the_run_folder_holds_everything(
    text: str, tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "draw_run", plots.draw_run)
    config = tiny(text, Path("run"), parallel, steps=40, save_every=25)
    result = run(config)
    assert result.losses.shape == (40,)
    assert result.losses[0] > 5.0 and result.losses[-5:].mean() < 3.6
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 41))
    assert [m["loss"] for m in metrics] == result.losses.tolist()
    assert all(m["tokens_per_second"] > 0 for m in metrics)
    assert Path("run/run.png").read_bytes().startswith(b"\x89PNG")
    tensors = load_file(f"run/{NAME}")
    assert torch.equal(tensors["losses"], result.losses)
    assert tensors["rng.cpu"].shape[0] == 4
    assert len({bytes(state.tolist()) for state in tensors["rng.cpu"]}) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    assert sorted(p.name for p in Path("run").iterdir()) == [
        PREVIOUS,
        NAME,
        "config.yaml",
        "metrics.jsonl",
        "run.png",
    ]


def test_a_picture_of_no_step_and_of_many_processes(text: str) -> None:
    corpus = Corpus(text, 48, 0)
    nothing = {"losses": np.zeros(0, np.float32), "loss_per_position": np.zeros((48, 2), np.float32)}
    owners = owners_of(20, 10, "zigzag")
    picture = plots.draw_run(**nothing, batch=corpus.packed(0, 20, 12), owners=owners)  # empty chunks, too
    assert picture.startswith(b"\x89PNG")
    for count in (1, 10, 11, 64):
        assert len(set(distinct_colours(count))) == count


def test_splitting_a_sequence_changes_its_loss_and_gradients_by_rounding_only(text: str) -> None:
    corpus = Corpus(text, 48, 0)
    results = []
    for ranks in (1, 4, 7):
        torch.manual_seed(0)
        model = ByteTransformer(ModelConfig(width=32, layers=2, heads=4, kv_heads=2))
        step = Step(ShardGroup(ranks), model, 48, bf16=False)(
            [corpus.packed(micro_step, ranks, 110) for micro_step in range(2)]
        )
        results.append([step.loss, step.loss_per_position, *(p.grad for p in model.parameters())])
        assert step.num_tokens == 220 == step.loss_per_position[:, 1].sum()
        torch.testing.assert_close(step.loss_per_position[:, 0].sum() / 220, step.loss.detach())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_a_step_runs_under_a_counter_of_operations_with_the_same_bits(text: str) -> None:
    batches, grads = [Corpus(text, 48, 0).packed(i, 4, 110) for i in range(2)], []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        torch.manual_seed(0)
        model = ByteTransformer(SMALLEST)
        with mode:
            Step(ShardGroup(4), model, 48, bf16=False)(batches)
        grads.append([p.grad for p in model.parameters()])
    assert all(map(bits.equal, *grads))


def test_dropout_and_seed_change_the_hash(text: str, tmp_path: Path) -> None:
    config = tiny(text, tmp_path / "a", "context", steps=2)
    hashes = {run(config).hash}
    hashes.add(run(dataclasses.replace(config, folder=str(tmp_path / "b"), model=ModelConfig(width=32, heads=4))).hash)
    hashes.add(run(tiny(text, tmp_path / "c", "context", steps=2, seed=1)).hash)
    assert len(hashes) == 3


def test_a_run_folder_is_not_overwritten_and_other_settings_are_not_resumed(text: str, tmp_path: Path) -> None:
    config = tiny(text, tmp_path / "a", "documents", steps=1)
    run(config)
    with pytest.raises(ValueError, match="holds a checkpoint"):
        run(config)
    other = tiny(text, tmp_path / "a", "documents", learning_rate=1.0)
    with pytest.raises(ValueError, match=r"train.learning_rate is 1.0, but the checkpoint was made with 0.003"):
        run(dataclasses.replace(other, resume="required"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("another text")
    with pytest.raises(ValueError, match="not the data of the checkpoint"):
        run(dataclasses.replace(config, data=str(tmp_path / "text"), resume="required"))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run(dataclasses.replace(config, folder=str(tmp_path / "b"), resume="required"))


# -- forked processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """The uninterrupted runs of one process; every other run must have their hash."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        parallel: train_processes(tiny(text, folder / parallel, parallel), 1) for parallel in ("context", "documents")
    }


@pytest.mark.parametrize(
    ("parallel", "world_size", "placement"),
    [
        *itertools.product(["context"], [2, 3, 4], ["contiguous", "zigzag"]),
        ("documents", 2, "contiguous"),
        ("documents", 3, "zigzag"),
        ("documents", 4, "zigzag"),
    ],
)
def test_the_same_hash_on_any_number_of_processes(
    text: str, tmp_path: Path, alone: dict[str, RunResult], parallel: str, world_size: int, placement: str
) -> None:
    result = train_processes(tiny(text, tmp_path / "run", parallel, placement=placement), world_size)
    assert torch.equal(result.losses, alone[parallel].losses)
    assert result.hash == alone[parallel].hash


def test_the_same_hash_after_fifty_steps(text: str, tmp_path: Path) -> None:
    hashes = set()
    for world_size, placement in ((1, "contiguous"), (3, "zigzag"), (4, "contiguous")):
        changes = {"steps": 50, "accumulation": 1, "sequence_length": 60, "placement": placement}
        config = tiny(text, tmp_path / f"of-{world_size}", "context", **changes)
        hashes.add(train_processes(dataclasses.replace(config, model=SMALLEST), world_size).hash)
    assert len(hashes) == 1


@pytest.mark.parametrize(("parallel", "world_sizes"), [("context", [1, 3]), ("documents", [3])])
def test_a_checkpoint_of_four_processes_resumes_on_one_and_on_three(
    text: str, tmp_path: Path, alone: dict[str, RunResult], parallel: str, world_sizes: list[int]
) -> None:
    train_processes(tiny(text, tmp_path / "run", parallel, steps=STEPS // 2), 4)
    for world_size in world_sizes:
        folder = tmp_path / f"resumed-{world_size}"
        shutil.copytree(tmp_path / "run", folder)
        config = tiny(text, folder, parallel, placement="zigzag")
        result = train_processes(dataclasses.replace(config, resume="required"), world_size)
        assert result.hash == alone[parallel].hash
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS


def _interrupted(rank: int, world_size: int, config: RunConfig) -> RunResult:
    honest, calls = Step.__call__, []

    def step(self: Step, batches: list) -> object:
        calls.append(1)
        if rank == world_size - 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(self, batches)

    Step.__call__ = step  # type: ignore[method-assign,assignment]
    return run(config)


def test_ctrl_c_on_one_process_saves_a_checkpoint_that_goes_on_to_the_same_hash(
    text: str, tmp_path: Path, alone: dict[str, RunResult]
) -> None:
    config = tiny(text, tmp_path / "run", "context")
    results = run_processes(_interrupted, 2, config)
    assert [result.interrupted for result in results] == [True, True]
    assert [len(result.losses) for result in results] == [2, 2]
    resumed = train_processes(dataclasses.replace(config, resume="required"), 1)
    assert not resumed.interrupted
    assert resumed.hash == alone["context"].hash


def _different_data(rank: int, world_size: int, config: RunConfig, folder: str) -> str:
    try:
        run(dataclasses.replace(config, data=folder) if rank == 1 else config)
    except ValueError as error:
        return str(error)
    return ""


def test_processes_that_see_different_data_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("another text\n" * 20)
    errors = run_processes(_different_data, 2, tiny(text, tmp_path / "run", "context"), str(tmp_path / "text"))
    assert all("differs from virtual rank 0's" in error for error in errors)


# -- a real launcher --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_prints_the_hash_of_a_lone_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train.steps", "2", "--train.sequence_length", "120", "--model.width", "32", "--model.layers", "1"]
    options = ["train", "--train.parallel", "context", *sizes]
    assert cli.main([*options, "--folder", str(tmp_path / "alone")]) == 0
    alone = capsys.readouterr().out
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardsum"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, *launcher, *options, "--folder", "together"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    hashes = [re.findall(r"^hash [0-9a-f]{64}$", out, re.MULTILINE) for out in (alone, done.stdout)]
    assert len(hashes[0]) == 1
    assert hashes[0] == hashes[1]
