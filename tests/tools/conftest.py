"""What tests of runs share: text to train on, and torch settings as they were."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.backends.backend_agg  # noqa: F401  (once, not in every forked process)
import pytest
import torch
import torch._dynamo  # AdamW imports it; here once, not in every forked process

from shardsum.tools.train import loop
from tests.tools.runs import copy_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return copy_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def no_picture() -> Iterator[None]:
    """Drawing takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_run", lambda **_: b"")
        yield


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """A run changes settings of the whole process."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
