"""The run: set up, resume, step until done or interrupted, save, show, and hash what came out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core import bits
from ...training.shard_group import ShardGroup
from ..launcher import gather_bytes, launched
from . import checkpoint
from .config import RunConfig, TrainConfig, to_yaml
from .data import Batch
from .environment import make_deterministic
from .interrupt import interruptible
from .metrics import Reporter, Stopwatch
from .model import ByteTransformer
from .plots import save_plots
from .start import starting_point
from .step import Step

_DECAY = 0.98  # a step of the loss per position: the picture shows about the last 50


@dataclass(frozen=True)
class RunResult:
    """What a run returns, on every process alike: losses fp32 ``(steps,)``, and the hash over parameters and losses."""

    hash: str
    losses: Tensor
    folder: Path
    interrupted: bool


def run(config: RunConfig) -> RunResult:
    """Train as ``config`` says. Collective over the launched processes; sets process-wide torch settings.

    Raises:
        ValueError: the configuration, the data or the checkpoint cannot be used.
    """
    make_deterministic(config)
    settings = config.group
    with launched(config.device, settings.timeout) as device:
        group = ShardGroup(
            settings.num_virtual_ranks,
            placement=settings.placement,
            transport=settings.transport,
            device=device,
            timeout=timedelta(seconds=settings.timeout),
            costs=settings.costs,
        )
        return Run(config, group).finish()


class Run:
    """The state of a run: everything its checkpoint holds, and those who show it."""

    def __init__(self, config: RunConfig, group: ShardGroup) -> None:
        self.folder = Path(config.folder or time.strftime("runs/%Y%m%d-%H%M%S"))
        self.config, self.group, self.settings = config, group, config.train
        self.corpus, tensors = starting_point(group, config, self.folder)
        torch.manual_seed(self.settings.seed)  # every process draws the same weights
        self.model = ByteTransformer(config.model).to(group.device)
        self.optimizer = _optimizer(self.model, self.settings)
        self.losses: list[float] = []
        self.loss_per_position = torch.zeros(self.settings.document_length, 2, device=group.device)
        checkpoint.seed_generators(group, self.settings.seed)
        if tensors:
            checkpoint.load_model_state(self.model, self.optimizer, tensors)
            checkpoint.load_generator_state(group, tensors)
            self.losses = tensors["losses"].tolist()
            self.loss_per_position.copy_(tensors["loss_per_position"])
        bf16 = self.settings.precision == "bf16"
        if self.settings.precision == "auto":
            bf16 = group.device.type == "cuda"
        self.step = Step(group, self.model, self.settings.document_length, bf16)
        self.reporter = Reporter(self.folder, active=group.rank == 0)

    def finish(self) -> RunResult:
        """Step to the end or to an interrupt, save, draw, hash."""
        self._introduce()
        first, watch, interrupted = len(self.losses), Stopwatch(), False
        with interruptible() as interrupt:
            with self.reporter.steps(first, self.settings.steps):
                while len(self.losses) < self.settings.steps and not interrupted:
                    self._train_step()
                    interrupted = interrupt.anywhere(self.group)
                    if self.settings.save_every and len(self.losses) % self.settings.save_every == 0:
                        self._save()
            self._save()
            return self._conclude(len(self.losses) - first, watch(), interrupted)

    def _batch(self, micro_step: int) -> Batch:
        ranks = self.group.num_virtual_ranks
        if self.settings.parallel == "documents":
            return self.corpus.own_documents(micro_step, ranks)
        return self.corpus.packed(micro_step, ranks, self.settings.sequence_length)

    def _train_step(self) -> None:
        watch, number, parts = Stopwatch(), len(self.losses), self.settings.accumulation
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = learning_rate(self.settings, number)
        self.optimizer.zero_grad()
        result = self.step([self._batch(number * parts + i) for i in range(parts)])
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or float("inf"), foreach=False)
        self.optimizer.step()
        self.loss_per_position.mul_(_DECAY).add_(result.loss_per_position)
        self.losses.append(result.loss.item())
        seconds = watch()
        self.reporter.step(
            {
                "step": number + 1,
                "loss": self.losses[-1],
                "gradient_norm": norm.item(),
                "learning_rate": learning_rate(self.settings, number),
                "tokens": result.num_tokens,
                "seconds": seconds,
                "tokens_per_second": result.num_tokens / seconds,
            }
        )

    def _save(self) -> None:
        tensors = checkpoint.model_state(self.model, self.optimizer) | checkpoint.generator_state(self.group)
        tensors |= {"losses": torch.tensor(self.losses), "loss_per_position": self.loss_per_position}
        if self.group.rank == 0:
            checkpoint.save(self.folder / checkpoint.NAME, tensors, self.config, self.corpus.digest)

    def _introduce(self) -> None:
        if self.group.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            portable = replace(self.config, folder=str(self.folder), resume=False)
            (self.folder / "config.yaml").write_text(to_yaml(portable))
        num_parameters, processes = sum(p.numel() for p in self.model.parameters()), self.group.world_size
        self.reporter.line(
            f"{self.settings.parallel}: {self.group.num_virtual_ranks} virtual ranks on {processes} "
            f"process{'es' * (processes > 1)}, owners {list(self.group.owners)}, {self.group.device.type}"
        )
        self.reporter.line(
            f"{num_parameters:,} parameters; {len(self.corpus.documents):,} documents, {self.corpus.num_bytes:,} bytes"
        )
        if self.losses:
            self.reporter.line(f"resumed after step {len(self.losses)}")

    def _conclude(self, steps: int, seconds: float, interrupted: bool) -> RunResult:
        losses = torch.tensor(self.losses)
        digest = bits.digest(*self.model.parameters(), losses, self.loss_per_position)
        for v, other in enumerate(gather_bytes(self.group, bytes.fromhex(digest))):
            if other.hex() != digest:
                raise RuntimeError(
                    f"the process of virtual rank {v} ended with other bits: {other.hex()}, not {digest}"
                )
        if self.group.rank == 0:
            save_plots(
                self.folder / "run.png",
                losses=losses.numpy(),
                loss_per_position=self.loss_per_position.cpu().numpy(),
                batch=self._batch(max(len(losses) * self.settings.accumulation - 1, 0)),
                owners=self.group.owners,
            )
        if self.losses:
            last = losses[-10:]
            self.reporter.line(
                f"loss {losses[0]:.3f} -> {last.mean():.3f} (mean of the last {len(last)}); "
                f"{steps} steps in {seconds:.1f} s"
            )
        if interrupted:
            self.reporter.line(f"interrupted; go on with: shardsum train --config {self.folder}/config.yaml --resume")
        self.reporter.line(f"wrote {self.folder}/{{metrics.jsonl,run.png,{checkpoint.NAME},config.yaml}}")
        self.reporter.line(f"hash {digest}")
        return RunResult(digest, losses, self.folder, interrupted)


def learning_rate(settings: TrainConfig, step: int) -> float:
    """Linear warm-up, then falling with the inverse square root: the same at a step however long the run is."""
    warmup = max(settings.warmup, 1)
    return settings.learning_rate * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def _optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """One implementation on every device: fused and foreach AdamW round differently."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), foreach=False, fused=False)
