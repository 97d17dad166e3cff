"""The command line: which options win, what is refused and how, and that the same command gives the same hash."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from shardsum.tools import cli
from shardsum.tools.bench.run import make_parser as make_bench_parser
from shardsum.tools.train.checkpoint import NAME
from tests.processes import run_processes

CONFIGS = Path(__file__).parents[2] / "configs"
SEED = str(CONFIGS / "seed.yaml")
SEED_ROW = "100 104 108 112 116 120 124 128 114 117 80 82 52 53 54 55 56 57 0 0"


def parse(*arguments: str):
    """The options of one command, as its function gets them."""
    parser = cli.build_parser()
    options = parser.instantiate(parser.parse_args(list(arguments)))
    return options[options.subcommand]


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    assert printed.out == ""
    return lines[0]


# -- help -----


@pytest.mark.parametrize("command", ["doctor", "train", "compare", "plan", "bench", "build"])
def test_help_has_a_description_examples_and_sentences(command: str) -> None:
    parser = cli.build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a.choices, dict))
    one = make_bench_parser() if command == "bench" else commands.choices[command]
    assert one.description.endswith(".") and f"shardsum {command}" in one.epilog
    for action in one._actions:
        if action.dest in ("help", "print_config") or action.dest.endswith("_config"):
            continue  # jsonargparse's own
        text = str(action.help)
        if type(action).__name__ != "_ActionConfigLoad":
            assert text[0].isupper() or text.startswith(("context:", "full")), (action.dest, text)
            assert text.endswith("."), (action.dest, text)


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_after_the_file_win_and_options_before_it_lose(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("train: {steps: 7, parallel: documents}\n")
    assert parse("train", "--config", str(file), "--train.steps", "50").train.steps == 50
    assert parse("train", "--train.steps", "50", "--config", str(file)).train.steps == 7
    assert parse("train", "--config", str(file), "--train.steps", "50").train.parallel == "documents"


def test_flags_are_bare_and_defaults_are_visible() -> None:
    assert parse("train", "--folder", "r", "--resume").resume == "required"
    assert parse("train", "--resume", "auto").resume == "auto"
    assert parse("train").resume is None and parse("train").trace is False
    assert parse("train").group.num_virtual_ranks == 4


@pytest.mark.parametrize("name", ["emulation.yaml", "multi_process.yaml"])
def test_shipped_configs_state_every_field_and_differ_from_the_defaults_in_placement_only(name: str) -> None:
    from dataclasses import asdict

    import yaml

    from shardsum.tools.train import RunConfig

    given, defaults = yaml.safe_load((CONFIGS / name).read_text()), asdict(RunConfig())
    del defaults["resume"]  # a flag of the command, not of the run
    if name == "multi_process.yaml":
        defaults["group"]["placement"] = "zigzag"
    assert given == defaults
    comments = [line for line in (CONFIGS / name).read_text().splitlines() if line.startswith("  ")]
    assert all("#" in line for line in comments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--train.step", "4"], "--train.step"),  # an abbreviation
        (["train", "--conf", SEED], "--conf"),
        (["train", "--config", SEED], "num_virtual_ranks"),  # a key of another command
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--train.parallel", "pipeline"], "pipeline"),
        (["train", "--train.steps", "1e3"], "train.steps"),
        (["train", "--train.steps", "-1"], "train.steps"),
        (["train", "--train.seed", "99999999999999999999999"], "train.seed"),
        (["train", "--group.timeout", "1e30"], "group.timeout"),
        (["train", "--group.costs", "nowhere.json", "--folder", "r"], "costs: nowhere.json"),
        (["train", "--model.width", "130"], "model.width"),
        (["train", "--model.kv_heads", "3"], "model.kv_heads"),
        (["train", "--resume"], "--folder"),
        (["train", "--data", "/nowhere", "--folder", "r"], "/nowhere"),
        (["train", "--train.sequence_length", "100000000", "--folder", "r"], "bytes of the data"),
        (["train", "--folder", "/dev/null"], "/dev/null"),
        (["compare", "--lengths", "[1, 2]"], "lengths"),
        (["compare", "--lengths", "[1, 2, 21, 4]"], "virtual rank 2"),
        (["compare", "--runs", "a", "b"], NAME),
        (["dance"], "dance"),
        ([], "name a command: doctor, train, compare, plan, build or bench; shardsum --help"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in refuse(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_machine_without_a_gpu_is_not_told_to_start_fewer_processes(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "device: cuda, but torch finds no CUDA device" in refuse(capsys, command, "--device", "cuda")


def test_an_unknown_key_of_a_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("train: {stepz: 7}\n")
    assert "train.stepz" in refuse(capsys, "train", "--config", str(file))


def _captured(arguments: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(arguments)
    return code, out.getvalue()


# -- compare ----------------------------------------------------------------------------------------------------------


def _compare(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str]:
    return _captured(["compare", *arguments])


def test_compare_seed_prints_the_row_and_the_same_hash_for_any_number_of_processes() -> None:
    code, alone = _captured(["compare", "--config", SEED])
    assert code == 0
    assert SEED_ROW in alone
    assert "local, all_reduce" in alone
    for world_size in (3, 4):
        results = run_processes(_compare, world_size, ["--config", SEED, "--placement", "zigzag"])
        assert [code for code, _ in results] == [0] * world_size
        together = results[0][1]
        assert SEED_ROW in together
        assert re.search(r"^gather, all_reduce +the same bits$", together, re.MULTILINE)
        assert together.splitlines()[-1] == alone.splitlines()[-1]
        assert alone.splitlines()[-1].startswith("hash ")
        assert all(out == "" for _, out in results[1:])


def test_compare_notices_other_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from shardsum import ShardGroup

    honest = ShardGroup.all_reduce

    def reversed_order(self: ShardGroup, shards: list, lengths: list, **options: object) -> torch.Tensor:
        return honest(self, shards[::-1], lengths[::-1], **options)

    monkeypatch.setattr(ShardGroup, "all_reduce", reversed_order)
    assert cli.main(["compare", "--config", SEED]) == 1
    printed = capsys.readouterr()
    assert "OTHER BITS" in printed.out
    assert "hash" not in printed.out
    assert "ulp apart" in printed.err


# -- files of options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("train: null\n", "train: expected settings or nothing at all, got None"),
        ("group:\n", "group"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\ndata: *b\n", "aliases (*name) are not supported"),
        ("train: [1, 2]\n", "train"),
        ("- 1\n", "config"),
        ("\t:", "config"),
    ],
)
def test_a_wrong_file_of_options_is_one_line(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(content)
    assert sentence in refuse(capsys, "train", "--config", str(file), "--folder", str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == [file]


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    (tmp_path / "f.yaml").write_text("\n".join(lines))
    for command in ("train", "compare"):
        assert "aliases (*name) are not supported" in refuse(capsys, command, "--config", str(tmp_path / "f.yaml"))


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    import shardsum

    for arguments, said in ((["--version"], [f"shardsum {shardsum.__version__}\n"]), (["--help"], list(cli._COMMANDS))):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        printed = capsys.readouterr().out
        assert end.value.code == 0 and all(text in printed for text in said)
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert re.search(r"^examples:\n  .*shardsum compare", printed, re.MULTILINE)  # with their lines
    assert re.search(r"\n\n[A-Z].*\.\s*\n\noptions:", printed, re.DOTALL)
