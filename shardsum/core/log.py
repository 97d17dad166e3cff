"""The library's messages: ``logging.getLogger("shardsum")``, with the process's rank in front where a launcher set one.

Without any configuration of :mod:`logging`, warnings go to stderr and the rest nowhere, as Python does it.

    >>> logging.getLogger("shardsum").setLevel(logging.ERROR)  # no message about a build any more
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any


class _RankPrefix(logging.LoggerAdapter):
    """``[rank 3] message`` under torchrun and every launcher that sets RANK; the message alone elsewhere."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        rank = os.environ.get("RANK")
        return (msg if rank is None else f"[rank {rank}] {msg}"), kwargs


log = _RankPrefix(logging.getLogger("shardsum"), {})
