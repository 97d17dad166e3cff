"""Real text as training data, without a download: documents of bytes, dealt out to virtual ranks or packed.

A *document* is a block of a text file, blocks being separated by two blank lines (the functions and classes of Python
source), cut at ``max_length`` bytes. Token n of a document is its byte n-1 (``START`` for n = 0), its target is byte
n: every token has a target, and no target lies on another shard. Which documents a micro-step sees is a function of
(seed, micro-step) alone, so every process knows the lengths of all virtual ranks without asking, and a checkpoint
holds no position in the data.
"""

from __future__ import annotations

import hashlib
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...core.layout import Interval, intersect, intervals_of, split_evenly

START = 256  # the token before a document's first byte
VOCABULARY = 257
_MAX_BYTES = 64 << 20  # of text, the first files win: more than a run reads, little enough to hold


@dataclass(frozen=True)
class Piece:
    """Bytes ``[begin, end)`` of one document; a shard is a list of them."""

    document: bytes
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """What one virtual rank computes: int64 ``(n,)`` each, n = 0 allowed, in storage of its own."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-step: the pieces of every virtual rank; ``cu_seqlens`` are the borders of packed documents, if any."""

    pieces: tuple[tuple[Piece, ...], ...]
    cu_seqlens: tuple[int, ...] | None = None

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each virtual rank."""
        return [sum(piece.length for piece in pieces) for pieces in self.pieces]

    @cached_property
    def reach(self) -> list[int]:
        """For each virtual rank, one more than its largest offset in a document: the rows of its loss per position."""
        return [max((piece.end for piece in pieces), default=0) for pieces in self.pieces]

    def shard(self, virtual_rank: int, device: torch.device) -> Shard:
        inputs: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        for piece in self.pieces[virtual_rank]:
            tokens = [START, *piece.document]
            inputs += tokens[piece.begin : piece.end]
            targets += tokens[piece.begin + 1 : piece.end + 1]
            positions += range(piece.begin, piece.end)
        columns = (torch.tensor(column, dtype=torch.int64).to(device) for column in (inputs, targets, positions))
        return Shard(*columns)


class Corpus:
    """The documents of a folder (default: the standard library's sources), reshuffled by ``seed`` every epoch.

    Raises:
        ValueError: the folder does not exist or holds no text.
    """

    def __init__(self, folder: str | None, max_length: int, seed: int) -> None:
        self.documents: list[bytes] = []
        self.num_bytes = 0
        for path in _text_files(folder):
            for document in _split(path, max_length):
                self.documents.append(document)
                self.num_bytes += len(document)
            if self.num_bytes >= _MAX_BYTES:
                break
        if not self.documents:
            raise ValueError(f"data: no text in {folder or 'the standard library of this Python; name a folder'}")
        self.seed = seed
        self._cached: tuple[int, list[int], list[int]] = (-1, [], [])

    def check_fills(self, length: int) -> None:
        """Make sure that there is text for a packed sequence of ``length`` tokens.

        Raises:
            ValueError: there are fewer bytes.
        """
        if length > self.num_bytes:
            raise ValueError(f"train.sequence_length: {length} is more than the {self.num_bytes} bytes of the data")

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the documents and their borders."""
        sha = hashlib.sha256()
        for document in self.documents:
            sha.update(len(document).to_bytes(8, "little") + document)
        return sha.hexdigest()

    def own_documents(self, micro_step: int, num_virtual_ranks: int) -> Batch:
        """``parallel: documents``: the next document of the stream for every virtual rank."""
        pieces = []
        for number in range(micro_step * num_virtual_ranks, (micro_step + 1) * num_virtual_ranks):
            epoch, index = divmod(number, len(self.documents))
            document = self.documents[self._epoch(epoch)[0][index]]
            pieces.append((Piece(document, 0, len(document)),))
        return Batch(tuple(pieces))

    def packed(self, micro_step: int, num_virtual_ranks: int, length: int) -> Batch:
        """``parallel: context``: the next ``length`` bytes of the stream as one sequence, split over the virtual ranks.

        A document that the end of the sequence cuts goes on as a document of its own in the next one.
        """
        epoch, index = divmod(micro_step, self.num_bytes // length)
        documents = list(self._window(epoch, index * length, (index + 1) * length))
        borders = intervals_of([len(document) for document in documents])
        pieces = tuple(
            tuple(_overlaps(documents, borders, chunk))
            for chunk in intervals_of(split_evenly(length, num_virtual_ranks))
        )
        return Batch(pieces, (0, *(end for _, end in borders)))

    def _window(self, epoch: int, begin: int, end: int) -> Iterator[bytes]:
        order, ends = self._epoch(epoch)
        for index in range(bisect_right(ends, begin), len(order)):
            document = self.documents[order[index]]
            start = ends[index] - len(document)
            if start >= end:
                return
            yield document[max(begin - start, 0) : end - start]

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """The order of the documents in this epoch, and where in its stream of bytes each ends."""
        if self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.documents), generator=generator).tolist()
            self._cached = (epoch, order, list(accumulate(len(self.documents[i]) for i in order)))
        return self._cached[1], self._cached[2]


def _overlaps(documents: list[bytes], borders: list[Interval], chunk: Interval) -> Iterator[Piece]:
    for document, border in zip(documents, borders):
        begin, end = intersect(border, chunk)
        if begin < end:
            yield Piece(document, begin - border[0], end - border[0])


def _text_files(folder: str | None) -> list[Path]:
    if folder is None:
        # Generated at build time, with paths of the machine in it: the one file that is not source.
        return [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if "sysconfigdata" not in p.name]
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"data: {folder!r} is not a folder")
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    return [root / name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def _split(path: Path, max_length: int) -> Iterator[bytes]:
    """The documents of one file; a binary file (one with a zero byte) has none."""
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES).replace(b"\r\n", b"\n")
    if b"\0" in text:
        return
    for block in text.split(b"\n\n\n"):
        block = block.strip(b"\n")
        for begin in range(0, len(block), max_length):
            yield block[begin : begin + max_length]
