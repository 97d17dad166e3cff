"""Unchanged transformers models on chunks of packed documents, against the same model on the whole sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardsum import ShardGroup, bits
from tests.processes import run_processes

pytest.importorskip("greenlet", reason="needs the extra models")
transformers = pytest.importorskip("transformers", reason="needs the extra models")

from shardsum.integrations.transformers import apply_cp, attention_forward, model_inputs  # noqa: E402

BORDERS = [0, 4, 10, 10, 19, 24]
CHUNKS = {"uneven": [9, 0, 4, 11], "even": [6] * 4, "one": [0, 0, 24, 0], "rows": [1, 20, 1, 2]}
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":  # grouped queries, tied weights
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}  # of the second layer
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **(window if "window" in name else {})))


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def whole(name: str) -> Result:
    """Loss and gradients by transformers' own packing, on one process."""
    model, labels = make_model(name), IDS.clone()
    labels[:, [b for b in BORDERS if b < 24]] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in zip(BORDERS, BORDERS[1:])]).expand(2, -1)
    loss = model(input_ids=IDS, position_ids=positions, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def chunked(group: ShardGroup, name: str, lengths: list[int], checkpointing: bool, autocast: bool) -> Result:
    torch.set_num_threads(1)
    model = make_model(name)
    if checkpointing:
        model.train().activation_checkpointing_enable()
    apply_cp(model, group)
    replicas, batch = group.replicas(model), group.context_parallel(lengths, BORDERS)
    calls = [partial(m, **kwargs) for m, kwargs in zip(replicas, model_inputs(batch, IDS, IDS))]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [out.loss for out in group.lockstep(calls)]
    sum(losses).backward()
    group.reduce_gradients(replicas)
    loss = group.all_reduce([x.detach().reshape(1) for x in losses], [1] * 4, size=1)[0]
    return loss, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lengths", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2 window"])
def test_loss_and_gradients_of_the_whole_sequence(name: str, lengths: list[int], checkpointing: bool) -> None:
    loss, grads = whole(name)
    found, mine = chunked(ShardGroup(4), name, lengths, checkpointing, False)
    assert (loss - found).abs() <= 5e-7 and mine.keys() == grads.keys()
    for key, grad in grads.items():
        assert (mine[key] - grad).abs().max() <= 6e-7, key


OPTIONS = [("llama", True, False), ("llama", True, True), ("qwen2 window", False, True)]


def _train(rank: int, world_size: int, placement: str) -> list[Result]:
    group = ShardGroup(4, placement=placement)
    return [chunked(group, name, CHUNKS["uneven"], c, a) for name, c, a in OPTIONS]


def test_same_bits_for_every_number_of_processes() -> None:
    together = _train(0, 1, "contiguous")
    assert not torch.equal(together[0][0], together[1][0])
    for world_size, placement in ((2, "zigzag"), (4, "contiguous")):
        for results in run_processes(_train, world_size, placement):
            for (loss, grads), (found, mine) in zip(together, results):
                assert bits.equal(found, loss) and all(bits.equal(mine[key], grads[key]) for key in grads)


def logits(group: ShardGroup, model: nn.Module, lengths: list[int], ids: torch.Tensor) -> torch.Tensor:
    batch = group.context_parallel(lengths, BORDERS)
    calls = [partial(model, **kwargs) for kwargs in model_inputs(batch, ids)]
    with torch.no_grad():
        found = [out.logits[:, : lengths[v]] for v, out in zip(group.virtual_ranks, group.lockstep(calls))]
    return batch.gather(found if len(found) > 1 else found[0], dim=1)


def _apart(rank: int, world_size: int, placement: str) -> None:
    torch.set_num_threads(1)
    group = ShardGroup(4, placement=placement)
    for name in ("llama", "qwen2 window"):
        model = make_model(name)
        apply_cp(model, group)
        for lengths in CHUNKS.values():
            before = logits(group, model, lengths, IDS)
            for at in (0, 5, 12, 23):
                changed = IDS.clone()
                changed[1, at] = (changed[1, at] + 1) % 61
                differs = (logits(group, model, lengths, changed) != before).any(-1)
                end = min(b for b in BORDERS if b > at)
                assert not differs[0].any() and not differs[1, :at].any() and not differs[1, end:].any()
                assert differs[1, at] and (end == at + 1 or differs[1, at + 1])


def test_one_token_changes_later_outputs_of_its_document_alone() -> None:
    _apart(0, 1, "contiguous")
    run_processes(_apart, 2, "zigzag")


def test_errors_name_what_the_attention_does_not_have() -> None:
    group, model = ShardGroup(4), make_model("llama")
    apply_cp(model, group)
    kwargs = model_inputs(group.context_parallel(CHUNKS["even"], BORDERS), IDS)[0]
    for change, message in (
        ({"attention_mask": torch.ones(2, 6)}, "attention_mask: the batch's cu_seqlens"),
        ({"position_ids": None}, "position_ids: a chunk need not begin"),
        ({"context_batch": None}, "context_batch: attention"),
        (
            {"input_ids": IDS, "position_ids": torch.arange(24)[None]},
            "context_batch: virtual rank 0 has 6 rows, but the layer passes 24 queries",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**kwargs, **change})
    x, module, chunk = torch.zeros(2, 4, 6, 8), model.model.layers[0].self_attn, kwargs["context_batch"]
    for name, value in {"dropout": 0.1, "softcap": 30.0, "s_aux": torch.zeros(4), "attention_mask": x}.items():
        arguments: dict[str, Any] = {"attention_mask": None, "context_batch": chunk, name: value}
        with pytest.raises(ValueError, match=f"{name}: LlamaAttention asks for it"):
            attention_forward(module, x, x, x, **arguments)
    windowed = model_inputs(group.context_parallel(CHUNKS["even"], BORDERS, window=(2, 0)), IDS)[0]
    with pytest.raises(
        ValueError, match=r"context_batch: made with window \(2, 0\), but a layer's attention has \(-1, 0\)"
    ):
        model(**windowed)
    checkpointed = make_model("llama")
    checkpointed.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"gradient_checkpointing: .*without reentrant autograd"):
        apply_cp(checkpointed, group)


def test_targets_stay_in_their_documents() -> None:
    batch = ShardGroup(4).context_parallel(CHUNKS["uneven"], BORDERS)
    inputs = model_inputs(batch, IDS, IDS)
    assert [kwargs["input_ids"].shape[1] for kwargs in inputs] == [9, 2, 4, 11]  # an empty chunk is two filler rows
    rows = [x for v, k in enumerate(inputs) for x in k["shift_labels"][0, : CHUNKS["uneven"][v]].tolist()]
    assert rows == [-100 if i + 1 in BORDERS else IDS[0, i + 1].item() for i in range(24)]
    assert inputs[1]["shift_labels"].tolist() == [[-100] * 2] * 2 and inputs[0]["num_items_in_batch"] == 2 * 20
