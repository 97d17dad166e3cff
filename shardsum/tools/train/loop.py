"""The run: set up, resume, step until done or interrupted, save, show, and hash what came out."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core import bits
from ...training.shard_group import ShardGroup
from ..launcher import gather_texts, launched, on_all
from . import checkpoint
from .checkpoint import Checkpoint
from .config import RunConfig, TrainConfig, to_yaml
from .data import Batch
from .interrupt import anywhere, interruptible
from .metrics import METRICS, Reporter
from .model import ByteTransformer
from .plots import draw_run
from .start import choose_folder, make_deterministic, open_folder, starting_point
from .step import Step
from .trace import HASHES, Trace

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
        self.config, self.group, self.settings = config, group, config.train
        folder = choose_folder(group, config)
        self.corpus, found = starting_point(group, config, folder)
        torch.manual_seed(self.settings.seed)  # every process draws the same weights
        self.model = ByteTransformer(config.model).to(group.device)
        self.optimizer = _optimizer(self.model, self.settings)
        self.losses: list[float] = []
        self.loss_per_position = torch.zeros(self.settings.document_length, 2, device=group.device)
        group.generators.manual_seed(self.settings.seed)
        if found is not None:
            self._resume(found)
        bf16 = self.settings.precision == "bf16"
        if self.settings.precision == "auto":
            bf16 = group.device.type == "cuda"
        self.step = Step(group, self.model, self.settings.document_length, bf16)
        self.trace = Trace(self.model) if config.trace else None
        self._note = found.note if found is not None else ""
        self._saved = found.steps if found is not None and not found.note else -1
        self._newest_is_good = not self._note  # a damaged file must not take the place of the good one before it
        self.folder = open_folder(group, folder)
        self.reporter = Reporter(self.folder, active=group.rank == 0)

    def finish(self) -> RunResult:
        """Step to the end or to an interrupt, save, draw, hash."""
        first, begin, interrupted = len(self.losses), time.perf_counter(), False
        try:
            on_all(self.group, self._write_config)
            self._introduce()
            with interruptible() as interrupt:
                with self.reporter.steps(first, self.settings.steps):
                    while len(self.losses) < self.settings.steps and not interrupted:
                        self._train_step()
                        interrupted, failed = anywhere(self.group, interrupt.requested, self.reporter.error is not None)
                        if failed:
                            on_all(self.group, self._raise_error)
                        if self.settings.save_every and len(self.losses) % self.settings.save_every == 0:
                            self._save()
                if self._saved != len(self.losses):
                    self._save()
                return self._conclude(len(self.losses) - first, time.perf_counter() - begin, interrupted)
        finally:
            self.folder.release()

    def _resume(self, found: Checkpoint) -> None:
        expected = checkpoint.expected_state(self.model, self.group, found.steps, self.loss_per_position)
        checkpoint.check_tensors(found, expected)
        checkpoint.load_state(self.model, self.optimizer, self.group, found.tensors)
        self.losses = found.tensors["losses"].tolist()
        self.loss_per_position.copy_(found.tensors["loss_per_position"])

    def _batch(self, micro_step: int) -> Batch:
        ranks = self.group.num_virtual_ranks
        if self.settings.parallel == "documents":
            return self.corpus.own_documents(micro_step, ranks)
        return self.corpus.packed(micro_step, ranks, self.settings.sequence_length)

    def _train_step(self) -> None:
        begin, number, parts = time.perf_counter(), len(self.losses), self.settings.accumulation
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = learning_rate(self.settings, number)
        self.optimizer.zero_grad()
        result = self.step([self._batch(number * parts + i) for i in range(parts)])
        if self.trace is not None:
            self.trace.gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or float("inf"), foreach=False)
        self.optimizer.step()
        self.loss_per_position.mul_(_DECAY).add_(result.loss_per_position)
        self.losses.append(result.loss.item())
        if self.trace is not None and self.group.rank == 0:
            self.reporter.write(HASHES, self.trace.line(number + 1, result.loss, self.loss_per_position))
        seconds = time.perf_counter() - begin
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
        """Collective; an error of the file system is the same on all processes, and the checkpoint before is kept."""
        tensors = checkpoint.state_of(self.model, self.optimizer, self.group)
        tensors |= {"losses": torch.tensor(self.losses), "loss_per_position": self.loss_per_position}

        def write() -> None:
            if self.group.rank == 0:
                checkpoint.save(self.folder, tensors, self.config, self.corpus.digest, keep=self._newest_is_good)

        on_all(self.group, write)
        self._newest_is_good, self._saved = True, len(self.losses)

    def _raise_error(self) -> None:
        if self.reporter.error is not None:
            raise self.reporter.error

    def _write_config(self) -> None:
        if self.group.rank == 0:
            portable = replace(self.config, folder=str(self.folder.path), resume=None)
            self.folder.replace("config.yaml", to_yaml(portable).encode())
            for name in (METRICS, HASHES) if self.trace is not None else (METRICS,):
                self.folder.keep_steps(name, len(self.losses))  # steps after the checkpoint are about to come again

    def _introduce(self) -> None:
        num_parameters, processes = sum(p.numel() for p in self.model.parameters()), self.group.world_size
        self.reporter.line(
            f"{self.settings.parallel}: {self.group.num_virtual_ranks} virtual ranks on {processes} "
            f"process{'es' * (processes > 1)}, owners {list(self.group.owners)}, {self.group.device.type}"
        )
        self.reporter.line(
            f"{num_parameters:,} parameters; {len(self.corpus.documents):,} documents, {self.corpus.num_bytes:,} bytes"
        )
        if self._note:
            self.reporter.line(f"warning: {self._note}")
        elif self.losses:
            self.reporter.line(f"resumed after step {len(self.losses)} of {self.folder.path}")
        elif int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            self.reporter.line(f"restarted at step 0: {self.folder.path} has no checkpoint yet")

    def _conclude(self, steps: int, seconds: float, interrupted: bool) -> RunResult:
        losses = torch.tensor(self.losses)
        digest = bits.digest(*self.model.parameters(), losses, self.loss_per_position)
        for v, other in enumerate(gather_texts(self.group, digest)):
            if other != digest:
                raise RuntimeError(f"the process of virtual rank {v} ended with other bits: {other}, not {digest}")
        on_all(self.group, partial(self._show, losses))
        folder = self.folder.path
        if self.losses:
            last = losses[-10:]
            self.reporter.line(
                f"loss {losses[0]:.3f} -> {last.mean():.3f} (mean of the last {len(last)}); "
                f"{steps} steps in {seconds:.1f} s"
            )
        if interrupted:
            self.reporter.line(f"interrupted; go on with: shardsum train --config {folder}/config.yaml --resume")
        self.reporter.line(f"wrote {folder}/{{metrics.jsonl,run.png,{checkpoint.NAME},config.yaml}}")
        self.reporter.line(f"hash {digest}")
        return RunResult(digest, losses, folder, interrupted)

    def _show(self, losses: Tensor) -> None:
        """Process 0 writes the picture, and the values of a trace."""
        if self.group.rank != 0:
            return
        picture = draw_run(
            losses=losses.numpy(),
            loss_per_position=self.loss_per_position.cpu().numpy(),
            batch=self._batch(max(len(losses) * self.settings.accumulation - 1, 0)),
            owners=self.group.owners,
        )
        self.folder.replace("run.png", picture)
        if self.trace is not None:
            self.trace.save(self.folder, len(losses))


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
