"""How a case is measured: every variant is prepared, verified on exactly the calls that are timed, then timed in turns.

Outputs are poisoned with NaN before the verified measurement. A variant that does not run here, or a baseline that is
off by more than its rounding, is left out and said so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core import bits
from .rows import Report, Row, table
from .timing import Call, Processes, Sampler, Timing, host_seconds, sampler, turns


@dataclass
class Variant:
    """One way to compute a case.

    Attributes:
        calls: one a set of buffers; each returns its result.
        want: the result, or None for what only moves bytes (a ceiling).
        tolerance: how far each element may be off; None: not in a single bit.
        once: gives the result to verify, for calls that change their input.
        bytes: useful bytes where they are not the job's.
        wire_bytes: of the busiest process, and of all.
        traffic: gives ``wire_bytes`` after a call, where only that tells.
    """

    name: str
    calls: Sequence[Call]
    want: Tensor | None
    tolerance: Tensor | None = None
    once: Call | None = None
    bytes: int | None = None
    wire_bytes: tuple[int, int] | None = None
    traffic: Callable[[], tuple[int, int]] | None = None


@dataclass
class Job:
    """A case ready to be measured.

    Attributes:
        facts: the fields of its rows that all variants share.
        poison: overwrites every output.
        baselines: names of variants, the fastest of which is the named baseline.
        ceiling: names of variants, the fastest of which others are a percentage of; or a rate of wire bytes in GB/s.
    """

    facts: dict[str, Any]
    variants: list[Variant]
    poison: Callable[[], Any]
    baselines: Sequence[str]
    ceiling: Sequence[str] | float


@dataclass
class Bench:
    """What all jobs of a run share.

    Attributes:
        failed: names of variants with wrong bits, or off by more than rounding.
    """

    report: Report
    device: str
    samples: int
    processes: Processes = field(default_factory=Processes)
    failed: list[str] = field(default_factory=list)

    def measure(self, job: Job) -> None:
        """Add the rows of a job to the report."""
        ready: dict[str, tuple[Variant, Sampler, int]] = {}
        for variant in job.variants:
            try:
                ready[variant.name] = (variant, *self._prepare(job, variant))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                self.report.say(f"{job.facts['case']}: {variant.name} is left out: {first_line(error)}")
        timings = turns({name: sample for name, (_, sample, _) in ready.items()}, self.samples)
        ran = [name for name in job.baselines if name in timings]
        baseline = min(ran, key=lambda name: timings[name].median, default=None)
        rows = []
        for variant, _, wrong in ready.values():
            host = None
            if self.device == "cuda":
                host = host_seconds(variant.calls, self.processes, timings[variant.name].median)
            rows.append(_row(job, variant, timings, baseline, host, wrong))
        if rows:
            self.report.add(rows, *table(rows))

    def _prepare(self, job: Job, variant: Variant) -> tuple[Sampler, int]:
        wrong = self._wrong(job, variant, variant.once()) if variant.once is not None else 0
        sample = sampler(variant.calls, device=self.device, processes=self.processes)
        if variant.once is None and variant.want is not None:
            job.poison()
            sample()
            wrong = self._wrong(job, variant, sample.output)
        if variant.traffic is not None:
            variant.wire_bytes = variant.traffic()
        return sample, wrong

    def _wrong(self, job: Job, variant: Variant, got: Tensor | list[Tensor]) -> int:
        """The most wrong elements on any process."""
        want, got = variant.want, torch.cat(got) if isinstance(got, list) else got
        assert want is not None
        off = got.shape != want.shape
        count = want.numel() if off else int((bits.int_view(got.to(want.dtype)) != bits.int_view(want)).sum())
        if variant.tolerance is not None:
            within = not off and bool(((got.double() - want.double()).abs() <= variant.tolerance).all())
            if self.processes.slowest(float(not within)):
                self.failed.append(f"{variant.name} ({job.facts['case']})")
                raise ValueError("its result is off by more than rounding")
        count = int(self.processes.slowest(count))
        if count and variant.tolerance is None:
            self.failed.append(f"{variant.name} ({job.facts['case']})")
        return count


def _row(
    job: Job, variant: Variant, timings: dict[str, Timing], baseline: str | None, host: float | None, wrong: int
) -> Row:
    t = timings[variant.name]
    useful = job.facts["bytes"] if variant.bytes is None else variant.bytes
    moved, total = variant.wire_bytes or (None, None)
    if isinstance(job.ceiling, Sequence):
        top = min((timings[name].median for name in job.ceiling if name in timings), default=None)
        percent = None if top is None else 100 * (useful / t.median) / (job.facts["bytes"] / top)
    else:
        percent = None if moved is None else 100 * moved / t.median / 1e9 / job.ceiling
    return Row(
        **{**job.facts, "bytes": useful},
        variant=variant.name,
        us=t.median * 1e6,
        us_20=t.p20 * 1e6,
        us_80=t.p80 * 1e6,
        us_least=t.least * 1e6,
        gbps=useful / t.median / 1e9,
        percent=percent,
        wire_bytes=moved,
        total_bytes=total,
        baseline=baseline,
        speedup=None if baseline is None else timings[baseline].median / t.median,
        host_us=None if host is None else host * 1e6,
        wrong=wrong,
    )


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def rounding(want: Tensor, magnitude: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """How far a sum of ``steps`` addends may be off: each addition in ``dtype``, then one rounding to that of ``want``.

    Args:
        magnitude: the sum of the addends' absolute values.
    """
    eps, last = torch.finfo(dtype).eps, torch.finfo(want.dtype).eps
    return steps * eps * magnitude.double() + last * want.double().abs()
