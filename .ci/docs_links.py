"""For mkdocs. Links from documentation to files of the repository outside ``docs/``. A missing file is a warning, so an
error of a strict build; a file that exists is named in the page, since the site does not hold it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.docs_links")
ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave ``docs/`` become the text and the path."""
    here = Path(page.file.abs_src_path).parent

    def named(match: re.Match[str]) -> str:
        text, target = match[1], (here / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, match[2])
        path = target.relative_to(ROOT)
        return f"`{path}`" if text.strip("`") in (str(path), path.name) else f"{text} (`{path}`)"

    return _LINK.sub(named, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name what they refer to by Sphinx's roles (``:func:`name```): the name alone is shown."""
    return re.sub(r":(?:func|class|meth|mod|data|attr):(?=<code>)", "", html)
