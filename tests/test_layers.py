"""Each folder of the package imports only folders that stand below it, and importing builds and starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "shardsum"

#: From the bottom up. A folder may import itself and those before it.
LAYERS = ["core", "native", "local", "transports", "group", "training", "integrations", "__init__", "tools", "__main__"]


def imported_modules(path: Path) -> set[str]:
    """Dotted names inside the package that a file imports at run time (not under TYPE_CHECKING)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    folder = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.level == 0 and not (node.module or "").startswith("shardsum")):
            continue
        base = list(folder[: len(folder) - node.level + 1]) if node.level else []
        named = (node.module or "").split(".")[0 if node.level else 1 :]
        base += [part for part in named if part]
        for alias in node.names:
            target = PACKAGE.joinpath(*base, alias.name)
            is_module = target.with_suffix(".py").exists() or target.is_dir()
            found.add(".".join([*base, alias.name] if is_module else base) or "__init__")
    return found


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def test_folders_import_downwards() -> None:
    level = {name: i for i, name in enumerate(LAYERS)}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = module_name(path).split(".")[0]
        for target in imported_modules(path):
            if level[target.split(".")[0]] > level[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong, wrong


def test_no_import_circles() -> None:
    graph = {module_name(path): imported_modules(path) for path in PACKAGE.rglob("*.py")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph.get(name, ()):
                if target != name:
                    visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_layout_knows_no_tensors() -> None:
    assert "torch" not in (PACKAGE / "core" / "layout.py").read_text().split('"""', 2)[2]


def test_import_builds_and_starts_nothing(tmp_path: Path) -> None:
    code = (
        "import shardsum.tools.cli, sys, torch; assert not torch.cuda.is_initialized(); "
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
