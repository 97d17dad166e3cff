"""The CPU kernels of every instruction set under AddressSanitizer and UndefinedBehaviorSanitizer: no access beyond what
a row, a mask or an output holds, no undefined arithmetic, the bits of plain loops."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardsum.native import recipe

FLAGS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CASES = 800


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/cpu_sums.cpp with the sources of csrc/cpu, compiled by the library's own commands and FLAGS."""
    folder = tmp_path_factory.mktemp("sanitized")
    made = recipe.make_recipe(())
    driver = [made.compiler, "-std=c++17", "-ffp-contract=off", "-I", str(made.sources), "-c", "-o", "driver.o"]
    commands = [[*driver, str(Path(__file__).with_name("cpu_sums.cpp"))]]
    objects = ["driver.o"]
    for name, source, command in made.commands():
        if source.parent.name == "cpu":
            commands.append(command)
            objects.append(name)

    def compile_one(command: list[str]) -> None:
        done = subprocess.run([*command, *FLAGS], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, commands))
    compile_one([made.compiler, *objects, "-o", "cpu_sums", "-lpthread"])
    return folder / "cpu_sums"


def test_random_sums_are_right_and_touch_nothing_else(program: Path) -> None:
    halves = [
        subprocess.Popen([program, str(seed), str(CASES // 2)], stdout=-1, stderr=-1, text=True) for seed in (1, 10**6)
    ]
    for half in halves:
        output, errors = half.communicate(timeout=200)
        assert half.returncode == 0, output + errors
        assert output == f"{CASES // 2} sums are right\n"
