"""Training steps of a Llama from transformers on packed documents: shardsum against what users write, in one run.

    python benchmarks/train_step.py --device cuda                            # one GPU
    torchrun --nproc-per-node=2 benchmarks/train_step.py --device cuda       # one sequence over two
    python benchmarks/train_step.py --small                                  # a tiny model on a CPU
    torchrun --nproc-per-node=2 benchmarks/train_step.py --device cuda --only torch [--small]    # beside "user" alone

A model of 1.04 billion parameters (16 layers of 2048, 32 query and 8 key heads of 64, random weights), 65,536 positions
of packed documents with exponentially distributed lengths of mean 512, 2048 and 8192, and of one document, bf16,
activation checkpointing of every layer, AdamW. Each process holds one chunk, or, zigzag, an early and a late one, which
run through the model as one sequence. The ways differ in attention alone:

    shardsum    group.context_parallel once a step, cp.attention in every layer
    user        K and V by all_gather (none on one process), torch.nn.attention.varlen, dK and dV by reduce_scatter
    torch       torch.distributed.tensor.experimental.context_parallel, ring attention. It knows no documents: for one
                document (a mean of all positions) on several GPUs, since it has no ring of its kernels for CPUs.
                Key heads are repeated for it

The first two plan the batch anew in every step. Verified before timed: all give the same loss and the same norm of the
gradient within rounding. Times: medians [20 %, 80 %] of the slowest process, ways in turns. Peak: what torch allocates
at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Meter, ms, parser, report_of, start
from context_ways import UserBatch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from shardsum import ShardGroup
from shardsum.tools.bench.cases import packed_borders
from shardsum.tools.bench.rows import markdown, markdown_header
from shardsum.tools.bench.timing import Timing

SEED = 3  # of the documents
MOST_DIFFERENCE = 1e-2
NAMES, USER = ("shardsum", "user", "torch"), "user, contiguous"
SIZES: dict[str, dict[str, int]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
COLUMNS = ["mean", "documents", "way", "tokens/s", "step ms", "of best user", "peak GB", "loss"]


@dataclass
class Row:
    """One way with one set of documents. ``step`` in seconds, ``peak`` in bytes."""

    mean: int
    documents: int
    way: str
    tokens_per_second: float
    step: Timing
    of_user: float
    peak: int
    loss: float


class Attention:
    """The attention of the way that runs now, as transformers calls it: q, k, v ``(1, heads, rows, head_dim)``."""

    run: Callable[..., Tensor]

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.run(q, k, v, scale=scaling)[None], None


class Training:
    """The model, its optimizer and the batch."""

    def __init__(self, size: str, positions: int, device: torch.device) -> None:
        processes = dist.get_world_size() if dist.is_initialized() else 1
        self.processes, self.attention = processes, Attention()
        self.groups = {"contiguous": ShardGroup(processes, device=device)}
        if processes > 1:
            self.groups["zigzag"] = ShardGroup(2 * processes, placement="zigzag", device=device)
            self.mesh = init_device_mesh(device.type, (processes,))
        AttentionInterface.register("benchmark", self.attention)
        AttentionMaskInterface.register("benchmark", lambda *_, **__: None)
        torch.manual_seed(0)
        config = LlamaConfig(
            **SIZES[size], max_position_embeddings=positions, tie_word_embeddings=True, attn_implementation="benchmark"
        )
        with torch.device(device):
            self.model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device.type == "cuda")
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(config.vocab_size, (1, positions), generator=generator).to(device)

    def gradients(self, way: str, borders: list[int]) -> Tensor:
        """The gradients of one step; returns this process's part of the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        name, placement = way.split(", ")
        cp = self.groups["contiguous" if name == "torch" else placement].context_parallel(None, borders)
        labels = cp.shift(self.tokens, whole=True)
        if name == "torch":
            return self._gradients_of_torch(labels)
        attention = cp.attention if name == "shardsum" else UserBatch(cp).attention
        rows = [chunk.rows for chunk in cp.chunks]
        self.attention.run = partial(_chunks, attention, rows)
        own, targets = (together(cp.split(x, dim=1), 1) for x in (self.tokens, labels))
        return self._backward(own, together(cp.positions, 0)[None], targets, (labels != -100).sum())

    def _gradients_of_torch(self, labels: Tensor) -> Tensor:
        count, positions = (labels != -100).sum(), torch.arange(labels.shape[1], device=labels.device)[None]
        chunks = [self.tokens.clone(), positions, labels]  # cut in place, an early and a late part a process
        self.attention.run = _causal
        with (  # around the backward, too: checkpointed layers run again there
            context_parallel(self.mesh, buffers=chunks, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(chunks)),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            return self._backward(*chunks, count)

    def _backward(self, own: Tensor, positions: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        logits = self.model(input_ids=own, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits[0].float(), targets[0], reduction="sum") / count
        del logits
        loss.backward()
        if self.processes > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        return loss.detach()

    def step(self, way: str, borders: list[int]) -> None:
        self.gradients(way, borders)
        self.optimizer.step()

    def loss_and_norm(self, way: str, borders: list[int]) -> tuple[float, float]:
        loss = self.gradients(way, borders)
        if self.processes > 1:
            dist.all_reduce(loss)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return loss.item(), norm.item()


def together(chunks: Tensor | list[Tensor], dim: int) -> Tensor:
    """What a process hosts, one after the other."""
    return chunks if isinstance(chunks, Tensor) else torch.cat(chunks, dim)


def _chunks(
    attention: Callable[..., Sequence[Tensor]], rows: list[int], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """The attention of each chunk of ``rows``, one after the other."""
    return together(list(attention(*(list(x.split(rows)) for x in (q, k, v)), scale=scale)), 0)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """SDPA, which torch's context_parallel replaces by its ring."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)


def measure(training: Training, meter: Meter, mean: int, borders: list[int], only: Sequence[str]) -> list[Row]:
    """The ways whose names are ``only``, and the user's, with which all are compared."""
    ways = [f"{name}, {placement}" for placement in training.groups for name in ("shardsum", "user")]
    if len(borders) == 2 and training.processes > 1 and meter.on_gpu:
        ways.append("torch, zigzag")
    ways = [way for way in ways if way.split(", ")[0] in only or way == USER]
    found = {way: training.loss_and_norm(way, borders) for way in ways}
    for way in ways:
        for a, b in zip(found[way], found[USER]):
            assert abs(a - b) <= MOST_DIFFERENCE * abs(b), f"loss and norm of the gradient, {way} and {USER}: {found}"
    steps = {way: partial(training.step, way, borders) for way in ways}
    times = meter.times(steps, count=1)
    peaks = {way: meter.peak(step, whole=True) for way, step in steps.items()}
    tokens, user = borders[-1], min(t.median for way, t in times.items() if way.startswith("user"))
    return [
        Row(mean, len(borders) - 1, way, tokens / t.median, t, t.median / user, peaks[way], found[way][0])
        for way, t in times.items()
    ]


def line(row: Row) -> str:
    cells = [ms(row.step), f"{row.of_user:.3f}", f"{row.peak / 1e9:.2f}", f"{row.loss:.4f}"]
    return markdown(row.mean, row.documents, row.way, f"{row.tokens_per_second:.4g}", *cells)


def run(args: argparse.Namespace, device: torch.device) -> list[Row]:
    training = Training("small" if args.small else "1B", args.positions, device)
    parameters, processes = sum(p.numel() for p in training.model.parameters()), training.processes
    report = report_of(args, parameters=parameters, positions=args.positions, processes=processes)
    report.say(f"{parameters / 1e9:.3g} billion parameters, {args.positions} positions, {processes} processes, bf16")
    report.say(markdown_header(*COLUMNS))
    meter = Meter(device, args.samples)
    for mean in args.means:
        found = measure(training, meter, mean, packed_borders(args.positions, mean, SEED), args.only)
        report.add(found, *map(line, found))
    return report.rows


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__, samples=3)
    options.add_argument("--small", action="store_true", help="a tiny model and 256 positions")
    options.add_argument("--positions", type=int)
    options.add_argument("--means", type=int, nargs="+", help="mean lengths of the documents")
    options.add_argument("--only", choices=NAMES, nargs="+", default=NAMES, help='ways beside "user, contiguous"')
    args = options.parse_args(words)
    args.positions = args.positions or (256 if args.small else 65536)
    if args.means is None and args.only == ["torch"]:
        args.means = [args.positions]
    args.means = args.means or ([16, 256] if args.small else [512, 2048, 8192, args.positions])
    return args


if __name__ == "__main__":
    start(arguments(), run)
