"""Gradients of shared parameters, one per virtual rank, summed in rank order: one process first, then gloo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardsum import ShardGroup
from shardsum.core import bits, reference
from shardsum.training import gradients, replicas
from tests.processes import run_processes

R = 5


class Model(nn.Module):
    """Tied weights, a buffer that counts, a parameter that some ranks and one that no rank use, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.sometimes = nn.Parameter(torch.randn(6))
        self.never = nn.Parameter(torch.randn(3, 2))
        self.low = nn.Linear(6, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens: torch.Tensor, v: int) -> torch.Tensor:
        x = self.norm(self.middle(self.embed(tokens))) * self.frozen
        if v in (1, 4):
            x = x + self.sometimes
        return self.head(x).logsumexp(-1).sum() + self.low(x.bfloat16()).float().square().sum()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens_of(v: int) -> torch.Tensor:
    return torch.randint(0, 11, (3 + v,), generator=torch.Generator().manual_seed(v))


def oracle(scale: float | None = None) -> dict[str, torch.Tensor | None]:
    """Every rank's gradients on a copy of the module, added by the reference loop."""
    torch.set_num_threads(1)  # as in the forked processes: torch's own gradients depend on it
    rows: dict[str, list[torch.Tensor]] = {}
    for v in range(R):
        model = make_model()
        model(tokens_of(v), v).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, [])
            if p.grad is not None:
                rows[name].append(p.grad.flatten())
    model = make_model()
    return {
        name: None
        if not rows[name]
        else reference.ragged_sum(rows[name], [0] * len(rows[name]), p.numel(), scale=scale, out_dtype=p.dtype).view_as(
            p
        )
        for name, p in model.named_parameters()
    }


def run(group: ShardGroup, scale: float | None = None) -> dict[str, torch.Tensor | None]:
    model = make_model()
    hosted = group.replicas(model)
    for v, replica in zip(group.virtual_ranks, hosted):
        replica(tokens_of(v), v).backward()
    model.never.grad = torch.ones(3, 2)  # an old gradient is replaced, not added to
    group.reduce_gradients(hosted, scale=scale)
    assert all(p.grad is None for replica in hosted for p in replica.parameters())
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            assert bits.equal(found[name], grad), (name, bits.first_difference(found[name], grad))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 25 * 2**20])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_reference(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, scale: float | None) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    expected = oracle(scale)
    assert expected["never"] is None and expected["frozen"] is None and expected["low.weight"].dtype == torch.bfloat16
    assert_same(run(ShardGroup(R), scale), expected)


def _run_in_process(rank: int, world_size: int, placement: object) -> dict[str, torch.Tensor | None]:
    return run(ShardGroup(R, placement=placement), 0.3)


@pytest.mark.parametrize(
    ("world_size", "placement"),
    [(2, "contiguous"), (2, "zigzag"), (3, [2, 0, 1, 0, 2]), (4, "contiguous")],
)
def test_same_bits_for_every_number_of_processes(world_size: int, placement: object) -> None:
    expected = oracle(0.3)
    for found in run_processes(_run_in_process, world_size, placement):
        assert_same(found, expected)


def test_replicas_follow_the_optimizer_and_load_state_dict() -> None:
    model = make_model()
    group = ShardGroup(2)
    hosted = group.replicas(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = make_model().requires_grad_(False)
    for p in other.parameters():
        p.add_(1)
    for change in (optimizer.step, lambda: model.load_state_dict(other.state_dict())):
        for v, replica in enumerate(hosted):
            replica(tokens_of(v), v).backward()
        group.reduce_gradients(hosted)
        change()
        for replica in hosted:
            for name, p in replica.named_parameters():
                assert torch.equal(p, model.get_parameter(name)), name


def test_tied_weights_stay_tied_and_buffers_are_copies() -> None:
    model = make_model()
    hosted = ShardGroup(3).replicas(model)
    before = model.norm.running_mean.clone()
    for v, replica in enumerate(hosted):
        assert replica.head.weight is replica.embed.weight and replica.head.weight is not model.head.weight
        assert replica.head.weight.data_ptr() == model.head.weight.data_ptr()
        replica(tokens_of(v), v)
    assert torch.equal(model.norm.running_mean, before)
    means = [replica.norm.running_mean for replica in hosted]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[1], means[2])


def test_a_module_may_hold_the_group() -> None:
    group, other = ShardGroup(2), ShardGroup(3)
    model = nn.Linear(2, 2)
    model.group, model.other = group, other
    assert all(replica.group is group and replica.other is other for replica in group.replicas(model))


def test_training_mode_reaches_every_replica() -> None:
    model = make_model()
    hosted = ShardGroup(2).replicas(model)
    hosted.train(False)
    assert not any(m.training for m in (model, *hosted)) and not any(r.norm.training for r in hosted)


def _stale_changes() -> dict[str, tuple[object, str]]:
    def assign(model: Model, hosted: replicas.Replicas) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def replace(model: Model, hosted: replicas.Replicas) -> None:
        model.middle.weight = nn.Parameter(model.middle.weight.detach())

    def untie(model: Model, hosted: replicas.Replicas) -> None:
        model.head.weight = nn.Parameter(torch.randn(11, 6))

    def remove(model: Model, hosted: replicas.Replicas) -> None:
        del model.sometimes

    def freeze(model: Model, hosted: replicas.Replicas) -> None:
        model.middle.bias.requires_grad_(False)

    def convert_replica(model: Model, hosted: replicas.Replicas) -> None:
        hosted[1].middle.double()

    def sparse(model: Model, hosted: replicas.Replicas) -> None:
        hosted[1].sometimes.grad = torch.zeros(6).to_sparse()

    return {
        "double": (lambda model, hosted: model.double(), "sometimes of virtual rank 0's replica no longer shares"),
        "assign": (assign, "parameter sometimes was replaced in the module"),
        "replace": (replace, "parameter middle.weight was replaced in the module"),
        "untie": (untie, "parameter head.weight is new in the module"),
        "remove": (remove, "parameter sometimes is gone from the module"),
        "freeze": (freeze, "middle.bias is frozen in the module, but is not in virtual rank 0's replica"),
        "convert": (convert_replica, "middle.weight of virtual rank 1's replica no longer shares.*float64"),
        "sparse": (sparse, "gradient of sometimes in virtual rank 1's replica is torch.sparse_coo"),
    }


@pytest.mark.parametrize("change", sorted(_stale_changes()))
def test_stale_aliases_are_an_error(change: str) -> None:
    model = make_model()
    group = ShardGroup(2)
    hosted = group.replicas(model)
    apply, message = _stale_changes()[change]
    apply(model, hosted)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        group.reduce_gradients(hosted)


def _stale_on_one(rank: int, world_size: int) -> str:
    group = ShardGroup(4)
    model = make_model()
    hosted = group.replicas(model)
    if rank == 1:
        model.double()
    with pytest.raises(ValueError) as caught:
        group.reduce_gradients(hosted)
    return str(caught.value)


def test_a_stale_alias_on_one_process_is_an_error_on_all() -> None:
    messages = run_processes(_stale_on_one, 2)
    assert all("sometimes of virtual rank 2's replica no longer shares" in m for m in messages), messages


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LazyLinear(3), "parameter weight is not initialised"),
        (nn.Linear(2, 2, dtype=torch.complex64), "parameter weight: dtype torch.complex64 cannot be summed"),
    ],
)
def test_refuses_what_cannot_be_aliased(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardGroup(2).replicas(module)


def _of_another_group(rank: int, world_size: int) -> list[str]:
    group, other = ShardGroup(4), ShardGroup(4, placement="zigzag")
    model = make_model()
    hosted, messages = other.replicas(model), []
    for replica in hosted:
        replica(tokens_of(0), 0).backward()
    for scale, mine in ((None, hosted), ("half", group.replicas(model))):
        with pytest.raises(ValueError) as caught:
            group.reduce_gradients(mine, scale=scale)
        messages.append(str(caught.value))
    assert hosted[0].middle.weight.grad is not None  # nothing half-done
    return messages


def test_refuses_the_replicas_of_another_group_and_a_wrong_scale_on_every_process() -> None:
    theirs, ours = [[0, 3], [1, 2]], [[0, 1], [2, 3]]
    for rank, found in enumerate(run_processes(_of_another_group, 2)):
        assert f"replicas: of virtual ranks {theirs[rank]}, but this process hosts {ours[rank]}" in found[0]
        assert "scale: expected a float, got 'half'" in found[1]


def _other_device(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        ShardGroup(2).replicas(nn.Linear(2, 2, device="meta"))
    return str(caught.value)


def test_refuses_another_device() -> None:
    for message in run_processes(_other_device, 2):
        assert "parameter weight is on meta, but the group works on cpu" in message
