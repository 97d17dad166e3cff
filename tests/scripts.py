"""Scripts of launch/ and benchmarks/ as modules, by their path: some of them have one name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: str) -> ModuleType:
    """The module of ``path``, relative to the repository. It finds the scripts beside it that it imports."""
    name = path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        folder = str((ROOT / path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
