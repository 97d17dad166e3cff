"""The arithmetic of the peer transport: memory layout, tile map, chunks, one- or two-shot. No tensors, no GPU.

Everything here is computed by every process from values that all share, so that all launch the same grid over the same
tiles. Counts are elements unless a name says bytes; an "element" of a movement is a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.layout import ExchangePlan, Interval, intersect, length

MAX_RANKS = 64  # kPeerMaxRanks
MAX_HOSTED = 32  # kPeerMaxHosted
_WARP = 32
_STREAM_WARPS = 8  # of a block that streams, whatever ``threads``
_ROW_FLAG_BYTES, _STAGE_FLAG_BYTES = 32, 16  # sizeof(RowFlag), sizeof(StageFlag)
_TILE_ROOM = 1 << 16
FLOAT_GROUP, INT_GROUP = 1024, 1536  # bytes of a row that one warp pushes at a time: two and three vectors a lane
STREAM_STRETCH = 4096  # of a large one: eight


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Tuning:
    """Launch shapes and switch points, measured on H200; every process must use the same. docs/peer.md says how.

    Attributes:
        threads: of a block, a multiple of 32 from 96 to 256; those that push always have 256.
        blocks: the most of a launch. Also limited by the smallest GPU's multiprocessors: half of what can be resident.
        producer_warps: warps of a block that copy in later pieces, or write or stream rows, while the others sum.
        small_bytes: rows that are read are copied and signalled as one piece up to this size.
        columns, stretches: vectors a lane, and stretches a tile, of larger ones; a tile is a piece.
        two_shot_bytes: how many bytes a two-shot must save on the busiest link to pay for its second round of signals.
        push_bytes: rows of a sum up to this size are pushed to the peers, word by word, before they are summed.
        stream_processes: in groups up to this size larger rows of floats are pushed while they are summed.
        write_processes: in groups up to this size other rows are written, piece by piece, also where they travel once.
        write_pieces, write_stretches: a block's part of a written row has so many pieces, but none has more stretches.
        one_producer_bytes: up to this size one warp of a block writes or streams rows, above it producer_warps.

    Both tables are by the number of processes; key 0 holds for every other number.
    """

    threads: int = 256
    blocks: int = 128
    producer_warps: int = 2
    small_bytes: int = 2 << 20
    columns: int = 8
    stretches: int = 16
    two_shot_bytes: Mapping[int, int] = field(default_factory=lambda: {2: 350_000, 0: 500_000})
    push_bytes: Mapping[int, int] = field(default_factory=lambda: {2: 3 << 18, 3: 1 << 20, 4: 1 << 19, 0: 1 << 17})
    stream_processes: int = 2
    write_processes: int = 2
    write_pieces: int = 4
    write_stretches: int = 4
    one_producer_bytes: int = 12 << 20

    def __post_init__(self) -> None:
        if self.threads % _WARP or not 96 <= self.threads <= 256:
            raise ValueError(f"threads: {self.threads} is not a multiple of 32 from 96 to 256")
        if 0 not in self.two_shot_bytes or 0 not in self.push_bytes or not 1 <= self.blocks <= 255:
            raise ValueError("two_shot_bytes and push_bytes need the key 0, and blocks lie in 1..255")
        others = 3 if self.write_processes > 1 else 1
        if not 1 <= self.producer_warps <= self.threads // _WARP - others:
            raise ValueError(f"producer_warps: {self.producer_warps} of {self.threads // _WARP} leave too few readers")
        if self.stream_processes > 1 and self.producer_warps > _STREAM_WARPS - 2:  # one sums, one sees to the launch
            raise ValueError(f"producer_warps: {self.producer_warps} of {_STREAM_WARPS} leave none that sums")

    def push_limit(self, world_size: int) -> int:
        return self.push_bytes.get(world_size, self.push_bytes[0])

    def pays_two_shot(self, world_size: int, saved_bytes: int) -> bool:
        return saved_bytes > self.two_shot_bytes.get(world_size, self.two_shot_bytes[0])


@dataclass(frozen=True)
class MemoryLayout:
    """Offsets in the symmetric block of every process (csrc/peer/call.h).

    ``staging_bytes`` is for the rows of one process."""

    num_ranks: int
    world_size: int
    max_blocks: int
    rows_per_process: int
    staging_bytes: int
    push_limit: int = 0
    writes: bool = False
    streams: bool = False

    @property
    def row_bytes(self) -> int:
        """A row's slot: its share, and room for whole vectors at both ends."""
        return round_up(self.staging_bytes // self.rows_per_process, 256) + 256

    @property
    def part_bytes(self) -> int:
        """Two-shot: the slot of one process's part of a row, and room for a tile more."""
        return round_up(self.row_bytes // self.world_size, 256) + _TILE_ROOM

    @property
    def slots_bytes(self) -> int:
        """A slot for each row that a process hosts; where peers write theirs here, for every row."""
        rows = self.num_ranks if self.writes else self.rows_per_process
        return max(self.row_bytes * rows, self.part_bytes * self.num_ranks)

    @property
    def reduced_bytes(self) -> int:
        """Two-shot: a result as large as the largest row, and room for a tile of wider elements."""
        return self.row_bytes + (1 << 20)

    @property
    def stages_at(self) -> int:
        return 2 * self.max_blocks * self.num_ranks * _ROW_FLAG_BYTES

    @property
    def abort_at(self) -> int:
        return self.stages_at + 2 * self.max_blocks * self.world_size * _STAGE_FLAG_BYTES

    @property
    def staging_at(self) -> int:
        return round_up(self.abort_at + 8 * (1 + self.world_size), 256)

    @property
    def reduced_at(self) -> int:
        return self.staging_at + 2 * self.slots_bytes

    @property
    def inbox_at(self) -> int:
        return self.reduced_at + 2 * self.reduced_bytes

    @property
    def inbox_row_bytes(self) -> int:
        """Small rows, where every 12 bytes of integers take a word of 16 in whole groups of 32 lanes; or a large one's
        share of the staging, from a whole stretch on."""
        small = round_up(self.push_limit, INT_GROUP) // INT_GROUP * 2048
        return max(small, round_up(self.row_bytes + STREAM_STRETCH, STREAM_STRETCH) if self.streams else 0)

    @property
    def inbox_rows(self) -> int:
        """Of two processes, each gets only the other's rows."""
        return self.rows_per_process if self.world_size == 2 else self.num_ranks

    @property
    def inboxes_bytes(self) -> int:
        return self.inbox_rows * self.inbox_row_bytes

    @property
    def total_bytes(self) -> int:
        return self.inbox_at + 2 * self.inboxes_bytes


@dataclass(frozen=True)
class TileMap:
    """How a chunk is cut: tile t belongs to block ``t % blocks``, whose j-th tile is in piece ``j // tiles_per_piece``.

    A warp takes a stretch at a time, ``columns`` vectors a lane. In a two-shot a tile has a part for each process.
    """

    stretch: int
    stretches_per_tile: int
    columns: int
    tiles_per_piece: int
    blocks: int

    @property
    def tile(self) -> int:
        return self.stretch * self.stretches_per_tile

    def tiles(self, chunk: int) -> int:
        return -(-chunk // self.tile)

    def pieces(self, chunk: int) -> int:
        return -(-self.tiles(chunk) // (self.blocks * self.tiles_per_piece))

    def block_and_piece(self, tile: int) -> tuple[int, int]:
        return tile % self.blocks, tile // self.blocks // self.tiles_per_piece


@dataclass(frozen=True)
class Message:
    """What a call moves, as all processes know it.

    Attributes:
        size, width: positions and elements of one.
        extent: positions that one process reads at most.
        longest: positions that one row holds at most.
        needed: positions of one row that others than its owner read at most.
        in_bytes, out_bytes: of an element.
        move, replicated: bytes are copied, not summed; every process gets the whole result.
        floats: the elements are of a float dtype.
    """

    size: int
    width: int
    extent: int
    longest: int
    needed: int
    in_bytes: int
    out_bytes: int
    move: bool
    replicated: bool
    floats: bool = True

    @property
    def vector(self) -> int:
        """Elements that a lane takes at a time."""
        return 16 // self.in_bytes if self.in_bytes > 1 or self.move else 8


@dataclass(frozen=True)
class Shape:
    """How a message is launched: chunk by chunk (elements), each over the same tile map.

    ``producers``: warps of a block that copy, write or push rows while the others sum; 0 where all push, then all sum.
    """

    tiles: TileMap
    chunk: int
    two_shot: bool
    push: bool = False
    write: bool = False
    producers: int = 1

    def launches(self, message: Message) -> int:
        return -(-message.size * message.width // self.chunk)


def describe_message(
    plan: ExchangePlan, width: int, in_bytes: int, out_bytes: int, move: bool, floats: bool = True
) -> Message:
    """The message of one exchange; a replicated one does not depend on the plan's sources."""
    replicated = is_replicated(plan)
    size = plan.sinks[0][1] if replicated else max(end for _, end in (*plan.sinks, *plan.sources))
    if size >= 1 << 31:
        raise ValueError(f"size: {size} positions are more than the peer transport can count")
    extent = size if replicated else max(sum(map(length, plan.wanted(g))) for g in range(plan.world_size))
    longest = size if replicated else max(map(length, plan.sources))
    most = size if replicated else max(length(needed(plan, r, held)) for r, held in enumerate(plan.sources))
    if move:
        width, in_bytes, out_bytes = width * in_bytes, 1, 1
    return Message(size, width, extent, longest, most, in_bytes, out_bytes, move, replicated, floats and not move)


def is_replicated(plan: ExchangePlan) -> bool:
    """Every process wants the same single interval from 0."""
    first = plan.sinks[0]
    return first[0] == 0 and set(plan.sinks) == {first} and plan.sink_owners == tuple(range(plan.world_size))


def needed(plan: ExchangePlan, source: int, interval: Interval) -> Interval:
    """The hull of the positions of ``interval`` that processes other than the source's owner read."""
    others = [b for b in range(plan.world_size) if b != plan.source_owners[source]]
    parts = [intersect(interval, wanted) for b in others for wanted in plan.wanted(b)]
    parts = [p for p in parts if length(p)]
    return (min(b for b, _ in parts), max(e for _, e in parts)) if parts else (0, 0)


def choose_shape(m: Message, layout: MemoryLayout, tuning: Tuning, two_shot: bool | None = None) -> Shape:
    """How to launch ``m``; ``two_shot`` forces one or two rounds for a replicated sum that is not pushed."""
    if two_shot and (m.move or not m.replicated):
        raise ValueError("two_shot: only for a sum that every process gets")
    if two_shot is None and is_pushed(m, layout):
        return Shape(
            choose_push_tiles(m, total_of(m), layout.max_blocks, tuning), total_of(m), False, True, producers=0
        )
    if two_shot is None:
        two_shot = takes_two_shot(m, layout, tuning)
    if layout.streams and m.floats and not two_shot:
        return choose_stream(m, layout, tuning)
    write, parts = layout.writes or two_shot, layout.world_size if two_shot else 1
    total, fits = total_of(m), (layout.row_bytes - 32) // m.in_bytes
    tiles = choose_tiles(m, total, parts, layout.max_blocks, tuning, write)
    producers = 1 if two_shot else choose_producers(m, tuning) if write else tuning.producer_warps
    if two_shot:
        fits = min(layout.part_bytes // m.in_bytes * parts - tiles.tile, layout.reduced_bytes // m.out_bytes)
    chunk = total
    if (total if two_shot else m.longest * m.width) > fits:
        chunk = choose_chunk(total, fits, tiles.tile)
        tiles = choose_tiles(m, chunk, parts, layout.max_blocks, tuning, write)
    return Shape(tiles, chunk, two_shot, write=write, producers=producers)


def choose_stream(m: Message, layout: MemoryLayout, tuning: Tuning) -> Shape:
    """A sum whose rows are pushed while they are summed."""
    total, tile = total_of(m), STREAM_STRETCH // m.in_bytes
    fits, chunk = layout.inbox_row_bytes // m.in_bytes, total
    if total > fits and m.needed * m.width + tile + m.vector > fits:
        chunk = choose_chunk(total, fits, tile)
    tiles = choose_push_tiles(m, chunk, layout.max_blocks, tuning, STREAM_STRETCH)
    return Shape(tiles, chunk, False, push=True, producers=choose_producers(m, tuning))


def choose_producers(m: Message, tuning: Tuning) -> int:
    """Warps of a block that write or stream rows of one round."""
    return 1 if m.extent * m.width * m.in_bytes <= tuning.one_producer_bytes else tuning.producer_warps


def total_of(m: Message) -> int:
    """Elements of the flat range, at least one."""
    return max(1, m.size * m.width)


def is_pushed(m: Message, layout: MemoryLayout) -> bool:
    """Whether ``m`` is a small sum, of elements of two bytes and more."""
    return not m.move and 0 < m.size * m.width * m.in_bytes <= layout.push_limit and m.in_bytes > 1


def takes_two_shot(m: Message, layout: MemoryLayout, tuning: Tuning) -> bool:
    """Whether ``m`` goes in two rounds where nobody forces it."""
    if m.move or not m.replicated or is_pushed(m, layout):
        return False
    return tuning.pays_two_shot(layout.world_size, two_shot_saves(m, layout))


def two_shot_saves(m: Message, layout: MemoryLayout) -> int:
    """Bytes that a two-shot all_reduce spares the busiest link, against every process reading every row."""
    others, rows = layout.world_size - 1, layout.rows_per_process * m.in_bytes
    elements = m.extent * m.width
    return others * rows * elements - others * (rows + m.out_bytes) * elements // layout.world_size


def choose_tiles(m: Message, chunk: int, parts: int, max_blocks: int, tuning: Tuning, write: bool) -> TileMap:
    """The tile map of a chunk; ``parts`` is the number of processes in a two-shot, else 1."""
    if write:
        return choose_write_tiles(m, chunk, parts, max_blocks, tuning)
    warps, extent_bytes = tuning.threads // _WARP, m.extent * m.width * m.in_bytes
    small = extent_bytes <= tuning.small_bytes
    columns, stretches = tuning.columns, tuning.stretches
    if small:  # as many blocks as there is work for
        columns = 1 if extent_bytes <= min(tuning.blocks, max_blocks) * warps * _WARP * 16 else 2
        stretches = warps
    stretch = columns * _WARP * m.vector
    tiles = -(-chunk // (stretch * stretches))
    blocks = min(tuning.blocks, max_blocks, tiles)
    return TileMap(stretch, stretches, columns, -(-tiles // blocks) if small else 1, blocks)


def choose_write_tiles(m: Message, chunk: int, parts: int, max_blocks: int, tuning: Tuning) -> TileMap:
    """Every block gets work for its warps, then stretches of more columns, then larger pieces."""
    most, vectors = min(tuning.blocks, max_blocks), -(-m.extent * m.width // (m.vector * parts))
    # Of a two-shot's short parts two stretches are enough, and fewer pieces: each is announced twice.
    lanes, pieces, least = (tuning.threads, tuning.write_pieces, 1) if parts == 1 else (2 * _WARP, 2, 2)
    columns = next(c for c in (8, 4, 2, 1) if c == 1 or vectors >= most * lanes * c)
    stretch = columns * _WARP * m.vector
    stretches = min(max(least, vectors // (most * pieces * columns * _WARP)), tuning.write_stretches)
    tiles = -(-chunk // (stretch * stretches * parts))
    return TileMap(stretch, stretches * parts, columns, 1, min(most, tiles))


def choose_push_tiles(m: Message, chunk: int, max_blocks: int, tuning: Tuning, num_bytes: int = 0) -> TileMap:
    """A tile is the ``num_bytes`` that one warp pushes at a time (0: a small row's group); as many blocks as tiles."""
    num_bytes = num_bytes or (FLOAT_GROUP if m.floats else INT_GROUP)
    tile = num_bytes // m.in_bytes
    tiles = -(-chunk // tile)
    blocks = min(tuning.blocks, max_blocks, tiles)
    return TileMap(tile, 1, num_bytes // (_WARP * 16), -(-tiles // blocks), blocks)


def choose_chunk(total: int, fits: int, tile: int) -> int:
    """Chunks of about equal size in whole tiles, none above ``fits``."""
    if fits < tile:
        raise ValueError(f"staging_bytes: a row's slot holds {fits} elements, but a tile has {tile}")
    most = fits // tile * tile
    return round_up(-(-total // -(-total // most)), tile)
