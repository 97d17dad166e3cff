"""Fresh processes, in which nothing is loaded yet: children of a fork server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["shardsum.native.loader", "shardsum.local.kernels"])
VARIABLES = ("SHARDSUM_BACKEND", "SHARDSUM_CACHE", "SHARDSUM_BUILD_TIMEOUT", "CXX", "MAX_JOBS", "RANK")


class Child:
    """``function(*args)`` in a fresh process with this environment. A value of None removes a variable."""

    def __init__(self, environment: dict[str, str | None], function: Callable[..., Any], *args: Any) -> None:
        self.receiver, sender = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_run, args=(sender, environment, function, args))
        self.process.start()
        sender.close()

    def result(self, timeout: float = 120) -> Any:
        assert self.receiver.poll(timeout), "the child does not answer"
        ok, value = self.receiver.recv()
        self.process.join(timeout)
        assert ok, value
        return value


def _run(sender: Any, environment: dict[str, str | None], function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    for name, value in {**dict.fromkeys(VARIABLES), **environment}.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def run(environment: dict[str, str | None], function: Callable[..., Any], *args: Any) -> Any:
    return Child(environment, function, *args).result()
