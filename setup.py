"""Everything about the package stands in pyproject.toml, but this.

With a native library inside, its wheel is for one platform, though for every Python 3, since torch loads the library
and not Python. And an index page has no files beside the README: its links to files lead to PROJECT_URL (an environment
variable of the build: where the project is published), or are plain text.
"""

import os
import re
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

_FILE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def index_page(readme: str, url: str) -> str:
    """The README with links that work without its repository; ``url`` may be empty."""
    return _FILE_LINK.sub(lambda link: f"[{link[1]}]({url}/blob/main/{link[2]})" if url else link[1], readme)


def project_urls(url: str) -> dict[str, str]:
    """What an index page shows beside the description."""
    files = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    named = {name: f"{url}/blob/main/{path}" for name, path in files.items()}
    return {"Repository": url, "Issues": f"{url}/issues", **named} if url else {}


class ShardsumDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return (Path(__file__).parent / "shardsum" / "_native.so").exists()


class ShardsumWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


if __name__ == "__main__":
    published = os.environ.get("PROJECT_URL", "").rstrip("/")
    setup(
        distclass=ShardsumDistribution,
        cmdclass={"bdist_wheel": ShardsumWheel},
        long_description=index_page((Path(__file__).parent / "README.md").read_text(), published),
        long_description_content_type="text/markdown",
        project_urls=project_urls(published),
        # pip install -e: the folder's path, which type checkers follow, in place of an import hook, which they cannot.
        options={"editable_wheel": {"mode": "compat"}},
    )
