"""How the parsers of all commands are made and what their help looks like."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader, set_parsing_settings
from yaml import AliasEvent, SafeLoader, YAMLError

_MODE = "yaml without aliases"
_plain_yaml = get_loader("yaml")
CONFIG_HELP = "Read options from this YAML file. Options that stand after it win."


class _Help(DefaultHelpFormatter):
    """Examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def make_parser(description: str | None = None, examples: str = "", **options: Any) -> ArgumentParser:
    """A parser whose options come from the command line and from YAML files without aliases.

    Args:
        examples: commands, one a line, shown at the end of the help.
        options: passed on to ArgumentParser.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader(_MODE, _load_yaml, (YAMLError,))
    epilog = "\n  ".join(["examples:", *examples.splitlines()]) if examples else None
    return ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        parser_mode=_MODE,
        exit_on_error=False,
        allow_abbrev=False,
        **options,
    )


def _load_yaml(text: str) -> Any:
    """Values and files of options. Aliases are refused: a few lines of them unfold to more than any memory holds."""
    if any(isinstance(event, AliasEvent) for event in yaml.parse(text, Loader=SafeLoader)):
        raise YAMLError("aliases (*name) are not supported; write the values out")
    return _plain_yaml(text)
