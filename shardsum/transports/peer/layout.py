"""Where things lie in the symmetric memory of the peer transport (csrc/peer/call.h). Pure arithmetic.

Two levels: the *regions* of a workspace are fixed when it is made; the *slots* that a group cuts them into depend on
its number of virtual ranks, and may differ from one launch to the next.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .tuning import Tuning

MAX_RANKS = 64  # kPeerMaxRanks
MAX_HOSTED = 32  # kPeerMaxHosted
MAX_BLOCKS = 255  # the abort word has 8 bits for one
FLOAT_GROUP, INT_GROUP = 1024, 1536  # bytes of a row that one warp pushes at a time: two and three vectors a lane
STREAM_STRETCH = 4096  # of a large one: eight
_INT_GROUP_WORDS = 2048  # bytes that an INT_GROUP travels as
_ROW_FLAG_BYTES, _STAGE_FLAG_BYTES = 32, 16  # sizeof(RowFlag), sizeof(StageFlag)
_TILE_ROOM = 1 << 16
_SMALL_INBOXES = 16 << 20  # with more than two processes at least, so that a later group may have more virtual ranks


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _floor(n: int) -> int:
    return n // 256 * 256


@dataclass(frozen=True)
class Regions:
    """Offsets in the symmetric block of every process. Flags have room for as many virtual ranks as there may be.

    Attributes:
        staging, reduced, inboxes: bytes of one of the two halves of each.
    """

    world_size: int
    max_blocks: int
    staging: int
    reduced: int
    inboxes: int

    @property
    def stages_at(self) -> int:
        return 2 * self.max_blocks * MAX_RANKS * _ROW_FLAG_BYTES

    @property
    def abort_at(self) -> int:
        return self.stages_at + 2 * self.max_blocks * self.world_size * _STAGE_FLAG_BYTES

    @property
    def staging_at(self) -> int:
        return round_up(self.abort_at + 8 * (1 + self.world_size), 256)

    @property
    def reduced_at(self) -> int:
        return self.staging_at + 2 * self.staging

    @property
    def inbox_at(self) -> int:
        return self.reduced_at + 2 * self.reduced

    @property
    def total_bytes(self) -> int:
        return self.inbox_at + 2 * self.inboxes


@dataclass(frozen=True)
class MemoryLayout:
    """The slots of one group: how it cuts the regions for its rows.

    Attributes:
        num_ranks, rows_per_process: virtual ranks, and how many one process hosts at most.
    """

    regions: Regions
    num_ranks: int
    rows_per_process: int
    tuning: Tuning

    @property
    def world_size(self) -> int:
        return self.regions.world_size

    @property
    def blocks(self) -> int:
        """The most blocks of a launch."""
        return min(self.tuning.blocks, self.regions.max_blocks)

    @property
    def writes(self) -> bool:
        """Whether rows that travel once are written to their readers."""
        return self.world_size <= self.tuning.write_processes

    @property
    def streams(self) -> bool:
        """Whether rows of large sums of floats are pushed while they are summed."""
        return self.world_size <= self.tuning.stream_processes

    @property
    def row_bytes(self) -> int:
        """A row's slot of staging."""
        return _floor(self.regions.staging // (self.num_ranks if self.writes else self.rows_per_process))

    @property
    def part_bytes(self) -> int:
        """Two-shot: the slot of one process's part of a row."""
        return _floor(self.regions.staging // self.num_ranks)

    @property
    def inbox_rows(self) -> int:
        """Rows that an inbox has a slot for. Of two processes, each gets only the other's."""
        return self.rows_per_process if self.world_size == 2 else self.num_ranks

    @property
    def inbox_row_bytes(self) -> int:
        return _floor(self.regions.inboxes // self.inbox_rows)

    @property
    def push_limit(self) -> int:
        """Bytes of the largest row that is pushed before it is summed: what the tuning says, if it fits an inbox."""
        return min(self.tuning.push_limit(self.world_size), self.inbox_row_bytes // _INT_GROUP_WORDS * INT_GROUP)


def default_staging(world_size: int) -> int:
    """Staging for the rows of one process. With more than two processes launches are longer, hence larger chunks."""
    return (64 if world_size <= 2 else 128) << 20


def choose_regions(
    num_ranks: int, world_size: int, max_blocks: int, rows_per_process: int, tuning: Tuning, staging_bytes: int
) -> Regions:
    """Regions for such a group, and for others of other numbers of virtual ranks. ``staging_bytes`` is for the rows of
    one process: a row gets its share, and room for whole vectors at both ends."""
    row = round_up(staging_bytes // rows_per_process, 256) + 256
    part = round_up(row // world_size, 256) + _TILE_ROOM
    # A slot for each row that a process hosts; where peers write theirs here, for every row.
    slots = num_ranks if world_size <= tuning.write_processes else rows_per_process
    # Small rows, where every 12 bytes of integers take a word of 16 in whole groups of 32 lanes; or a large one's share
    # of the staging, from a whole stretch on.
    inbox = round_up(tuning.push_limit(world_size), INT_GROUP) // INT_GROUP * _INT_GROUP_WORDS
    if world_size <= tuning.stream_processes:
        inbox = max(inbox, round_up(row + STREAM_STRETCH, STREAM_STRETCH))
    inboxes = inbox * rows_per_process if world_size == 2 else max(inbox * num_ranks, _SMALL_INBOXES)
    # A result as large as the largest row, and room for a tile of wider elements.
    return Regions(world_size, max_blocks, max(row * slots, part * num_ranks), row + (1 << 20), inboxes)


def bounded_staging(
    num_ranks: int, world_size: int, max_blocks: int, rows_per_process: int, tuning: Tuning, most_bytes: int
) -> int:
    """The largest ``staging_bytes`` up to the default whose regions take at most ``most_bytes``.

    Raises:
        ValueError: they do not take so little.
    """
    step = 1 << 16

    def total(steps: int) -> int:
        group = (num_ranks, world_size, max_blocks, rows_per_process, tuning)
        return choose_regions(*group, steps * step).total_bytes

    least = max(16, 2 * rows_per_process)  # a row's slot holds a tile
    if total(least) > most_bytes:
        raise ValueError(
            f"workspace_bytes: {most_bytes} bytes are too few for peer memory of {num_ranks} virtual ranks on "
            f"{world_size} processes; it takes at least {total(least)}"
        )
    steps = range(least, default_staging(world_size) // step + 1)
    return steps[bisect_right(steps, most_bytes, key=total) - 1] * step
