"""``shardsum`` and ``python -m shardsum``: the command line, or which extra to install for it."""

from __future__ import annotations

import sys

#: What pyproject.toml's extra "cli" brings; the library itself needs none of them.
_CLI_PACKAGES = ("jsonargparse", "matplotlib", "rich", "safetensors")


def main() -> int:
    """Run the command line and return its exit code; 2 where a package of the extra "cli" is missing."""
    try:
        from .tools.cli import main

        return main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _CLI_PACKAGES:
            raise
        print(f'shardsum: the command line needs {missing}: pip install "shardsum[cli]"', file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
