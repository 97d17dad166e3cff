"""Megatron-Core's GPT on chunks of packed documents, against its own attention on the documents one by one.

It wants a process group. A process that has had one must not be forked any more, so the tests run in children.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from shardsum import ShardGroup
from tests.processes import run_processes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    from shardsum.integrations.megatron import apply_cp, model_inputs

pytest.importorskip("greenlet", reason="needs the extra models")
LENGTHS, BORDERS = [9, 0, 4, 11, 1], [0, 7, 7, 15, 25]
TOKENS = torch.randint(31, (1, 25), generator=torch.Generator().manual_seed(0))


def set_up() -> None:
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # it moves its frequencies there
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # around a dropout of 0
    parallel_state.initialize_model_parallel()


def make(**options: Any) -> Any:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    config.normalization = "RMSNorm"
    return GPTModel(config, spec, vocab_size=31, max_sequence_length=32, position_embedding_type="rope")


def _loss_and_gradients(rank: int, world_size: int) -> None:
    set_up()
    model, total = make(), 0.0
    for a, b in zip(BORDERS, BORDERS[1:]):
        if b - a > 1:
            mask = torch.ones(1, 1, b - a - 1, b - a - 1).triu(1).bool()
            ids, labels = TOKENS[:, a : b - 1], TOKENS[:, a + 1 : b]
            total = total + model(ids, torch.arange(b - a - 1)[None], mask, labels=labels).sum()
    total.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    group = ShardGroup(5)
    apply_cp(model)
    replicas = group.replicas(model)
    inputs = model_inputs(group.context_parallel(LENGTHS, BORDERS), TOKENS, TOKENS)
    losses = group.lockstep([partial(m, **kwargs) for m, kwargs in zip(replicas, inputs)])
    loss = sum((x * kwargs["loss_mask"]).sum() for x, kwargs in zip(losses, inputs))
    loss.backward()
    group.reduce_gradients(replicas)
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_loss_and_gradients_of_the_documents_one_by_one() -> None:
    run_processes(_loss_and_gradients, 1)


def _refused(rank: int, world_size: int) -> None:
    set_up()
    model = make()
    apply_cp(model)
    with pytest.raises(ValueError, match="packed_seq_params: NoneType, expected that of model_inputs"):
        model(TOKENS, TOKENS, None)
    with pytest.raises(ValueError, match=r"tokens, labels: \(2, 25\)"):
        cp = ShardGroup(1).context_parallel([25], BORDERS)
        model_inputs(cp, TOKENS.expand(2, -1), TOKENS.expand(2, -1))
    dropping = make()
    dropping.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout: 0\.1, expected 0\.0"):
        apply_cp(dropping)


def test_what_is_refused() -> None:
    run_processes(_refused, 1)
