"""Each layer imports only what stands below it, and importing the package builds and starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "shardsum"

#: From the bottom up; modules of one line may import each other.
LAYERS = [
    {"numerics", "layout", "bits", "checks", "documents", "building"},
    {"reference", "native"},
    {"kernels", "registry"},
    {"operators", "usual"},
    {"ops"},
    {"transports"},
    {"peers"},
    {"agreement", "engine", "generators"},
    {"replays", "requests", "exchange", "exchange_padded", "reports", "membership"},
    {"calls"},
    {"replicas"},
    {"group"},
    {"nn", "attention", "hooks"},
    {"__init__"},
    {"launcher"},
    {"bench", "compare", "doctor", "train"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_modules(path: Path) -> set[str]:
    """Top-level names inside the package that a file imports at run time (not under TYPE_CHECKING)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "shardsum":
            found |= {(node.module or "").split(".")[1]} if "." in (node.module or "") else {"__init__"}
    return found


def test_every_module_has_a_layer() -> None:
    names = {
        p.stem if p.suffix else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert names - set(LEVEL) == set()


def test_imports_point_downwards() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for target in imported_modules(path):
            if target in LEVEL and target != module and LEVEL[target] > LEVEL[module]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong, wrong


def test_layout_knows_no_tensors() -> None:
    assert "torch" not in (PACKAGE / "layout.py").read_text().split('"""', 2)[2]


def test_import_builds_and_starts_nothing(tmp_path: Path) -> None:
    code = (
        "import shardsum.cli, sys, torch; assert not torch.cuda.is_initialized(); "
        "assert 'torch._dynamo' not in sys.modules, 'it doubles the time of an import'"
    )
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(PACKAGE.parent),
        "SHARDSUM_CACHE": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
