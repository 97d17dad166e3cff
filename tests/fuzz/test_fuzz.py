"""A short run of both kinds; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fuzz import __main__ as fuzz
from tests.fuzz import local, numbers


def test_local_sums() -> None:
    assert fuzz.main(["--seed", "0", "--local", "1500", "--processes", "0"]) == 0


def test_collectives() -> None:
    assert fuzz.main(["--seed", "0", "--local", "0", "--processes", "300"]) == 0


def test_a_wrong_sum_is_found_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(local.shardsum, "ragged_sum", lambda x, *args, **kwargs: torch.zeros(3))
    assert fuzz.main(["--seed", "7", "--local", "20", "--processes", "0"]) == 1
    assert "python -m tests.fuzz --seed 7 --local 1 --processes 0: " in capsys.readouterr().err


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    x = bits.view(np.float32)
    want = torch.from_numpy(x.copy()).bfloat16()
    assert numbers.difference(want, numbers.rounded(x, numbers.KINDS["bf16"]), numbers.KINDS["bf16"]) is None
