"""How a message travels and is launched: the way, the tile map, chunks, bytes that move. No tensors, no GPU.

Everything here is computed by every process from values that all share, so that all launch the same grid over the same
tiles. Counts are elements unless a name says bytes; an "element" of a movement is a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ...core.layout import ExchangePlan, Interval, intersect, length
from .layout import FLOAT_GROUP, INT_GROUP, STREAM_STRETCH, MemoryLayout, round_up

_WARP = 32
#: How rows cross the links: pushed, then summed; pushed while they are summed; written in two rounds; written to their
#: readers; read by them.
Way = Literal["push", "stream", "two-shot", "write", "read"]


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
        goes_on: sums start at accumulators of earlier rows, not at +0.0.
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
    goes_on: bool = False

    @property
    def vector(self) -> int:
        """Elements that a lane takes at a time."""
        return 16 // self.in_bytes if self.in_bytes > 1 or self.move else 8

    @property
    def total(self) -> int:
        """Elements of the flat range, at least one."""
        return max(1, self.size * self.width)


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


def describe_message(
    plan: ExchangePlan,
    width: int,
    in_bytes: int,
    out_bytes: int,
    move: bool,
    floats: bool = True,
    goes_on: bool = False,
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
    floats = floats and not move
    return Message(size, width, extent, longest, most, in_bytes, out_bytes, move, replicated, floats, goes_on)


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


def gap_of(plan: ExchangePlan, process: int) -> Interval:
    """Of two processes: the largest gap between positions that ``process`` wants; else an empty one."""
    if plan.world_size != 2:
        return 0, 0
    wanted = plan.wanted(process)
    gaps = [(a, b) for (_, a), (b, _) in pairwise(wanted)]
    return max(gaps, key=length, default=(0, 0))


def choose_way(m: Message, layout: MemoryLayout) -> Way:
    """How the rows of ``m`` cross the links."""
    if not m.goes_on:
        if not m.move and 0 < m.size * m.width * m.in_bytes <= layout.push_limit and m.in_bytes > 1:
            return "push"
        if not m.move and m.replicated and layout.tuning.pays_two_shot(layout.world_size, _saved(m, layout)):
            return "two-shot"
        if layout.streams and m.floats:
            return "stream"
    return "write" if layout.writes else "read"


def _saved(m: Message, layout: MemoryLayout) -> int:
    """Bytes that a two-shot all_reduce spares the busiest link, against every process reading every row."""
    others, rows = layout.world_size - 1, layout.rows_per_process * m.in_bytes
    elements = m.extent * m.width
    return others * rows * elements - others * (rows + m.out_bytes) * elements // layout.world_size


def choose_shape(m: Message, layout: MemoryLayout) -> Shape:
    """How to launch ``m``."""
    way, total = choose_way(m, layout), m.total
    if way == "push":
        return Shape(choose_push_tiles(m, total, layout), total, False, True, producers=0)
    if way == "stream":
        return choose_stream(m, layout)
    two_shot, write = way == "two-shot", way != "read"
    parts, fits = layout.world_size if two_shot else 1, (layout.row_bytes - 32) // m.in_bytes
    tiles = choose_tiles(m, total, parts, layout, write)
    producers = 1 if two_shot else choose_producers(m, layout) if write else layout.tuning.producer_warps
    if two_shot:
        fits = min(layout.part_bytes // m.in_bytes * parts - tiles.tile, layout.regions.reduced // m.out_bytes)
    chunk = total
    if (total if two_shot else m.longest * m.width) > fits:
        chunk = choose_chunk(total, fits, tiles.tile)
        tiles = choose_tiles(m, chunk, parts, layout, write)
    return Shape(tiles, chunk, two_shot, write=write, producers=producers)


def choose_stream(m: Message, layout: MemoryLayout) -> Shape:
    """A sum whose rows are pushed while they are summed."""
    total, tile = m.total, STREAM_STRETCH // m.in_bytes
    fits, chunk = layout.inbox_row_bytes // m.in_bytes, total
    if total > fits and m.needed * m.width + tile + m.vector > fits:
        chunk = choose_chunk(total, fits, tile)
    tiles = choose_push_tiles(m, chunk, layout, STREAM_STRETCH)
    return Shape(tiles, chunk, False, push=True, producers=choose_producers(m, layout))


def choose_producers(m: Message, layout: MemoryLayout) -> int:
    """Warps of a block that write or stream rows of one round."""
    tuning = layout.tuning
    return 1 if m.extent * m.width * m.in_bytes <= tuning.one_producer_bytes else tuning.producer_warps


def choose_tiles(m: Message, chunk: int, parts: int, layout: MemoryLayout, write: bool) -> TileMap:
    """The tile map of a chunk; ``parts`` is the number of processes in a two-shot, else 1."""
    if write:
        return choose_write_tiles(m, chunk, parts, layout)
    tuning, most = layout.tuning, layout.blocks
    warps, extent_bytes = tuning.threads // _WARP, m.extent * m.width * m.in_bytes
    small = extent_bytes <= tuning.small_bytes
    columns, stretches = tuning.columns, tuning.stretches
    if small:  # as many blocks as there is work for
        columns = 1 if extent_bytes <= most * warps * _WARP * 16 else 2
        stretches = warps
    stretch = columns * _WARP * m.vector
    tiles = -(-chunk // (stretch * stretches))
    blocks = min(most, tiles)
    return TileMap(stretch, stretches, columns, -(-tiles // blocks) if small else 1, blocks)


def choose_write_tiles(m: Message, chunk: int, parts: int, layout: MemoryLayout) -> TileMap:
    """Every block gets work for its warps, then stretches of more columns, then larger pieces."""
    tuning, most, vectors = layout.tuning, layout.blocks, -(-m.extent * m.width // (m.vector * parts))
    # Of a two-shot's short parts two stretches are enough, and fewer pieces: each is announced twice.
    lanes, pieces, least = (tuning.threads, tuning.write_pieces, 1) if parts == 1 else (2 * _WARP, 2, 2)
    columns = next(c for c in (8, 4, 2, 1) if c == 1 or vectors >= most * lanes * c)
    stretch = columns * _WARP * m.vector
    stretches = min(max(least, vectors // (most * pieces * columns * _WARP)), tuning.write_stretches)
    tiles = -(-chunk // (stretch * stretches * parts))
    return TileMap(stretch, stretches * parts, columns, 1, min(most, tiles))


def choose_push_tiles(m: Message, chunk: int, layout: MemoryLayout, num_bytes: int = 0) -> TileMap:
    """A tile is the ``num_bytes`` that one warp pushes at a time (0: a small row's group); as many blocks as tiles."""
    num_bytes = num_bytes or (FLOAT_GROUP if m.floats else INT_GROUP)
    tile = num_bytes // m.in_bytes
    tiles = -(-chunk // tile)
    blocks = min(layout.blocks, tiles)
    return TileMap(tile, 1, num_bytes // (_WARP * 16), -(-tiles // blocks), blocks)


def choose_chunk(total: int, fits: int, tile: int) -> int:
    """Chunks of about equal size in whole tiles, none above ``fits``."""
    if fits < tile:
        raise ValueError(f"staging_bytes: a row's slot holds {fits} elements, but a tile has {tile}")
    most = fits // tile * tile
    return round_up(-(-total // -(-total // most)), tile)


def predict(
    plan: ExchangePlan,
    layout: MemoryLayout,
    width: int,
    in_bytes: int,
    out_bytes: int,
    move: bool,
) -> tuple[Way, tuple[int, ...], tuple[int, ...]]:
    """The way, and by process the bytes of rows and results from it to others, and from them to it.

    What is read is what its reader wants. What is pushed or written is the hull of what others want of a row, and
    goes to all of them; between two processes, unless it is small, without the largest gap in what the other wants
    (up to a few KiB at its ends)."""
    way = choose_way(describe_message(plan, width, in_bytes, out_bytes, move), layout)
    if way == "two-shot":
        return way, *_two_shot(plan, width * in_bytes, width * out_bytes)
    if way == "read":
        sent = tuple(plan.egress(p) * width * in_bytes for p in range(plan.world_size))
        return way, sent, tuple(plan.ingress(p) * width * in_bytes for p in range(plan.world_size))
    parts = []
    for r, held in enumerate(plan.sources):
        hull, gap = needed(plan, r, held), gap_of(plan, 1 - plan.source_owners[r]) if way != "push" else (0, 0)
        parts.append((length(hull) - length(intersect(hull, gap))) * width * in_bytes)
    given = [sum(parts[r] for r in plan.hosted_sources(p)) for p in range(plan.world_size)]
    return way, tuple(n * (plan.world_size - 1) for n in given), tuple(sum(given) - n for n in given)


def _two_shot(plan: ExchangePlan, row_bytes: int, result_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``row_bytes``, ``result_bytes``: of one position."""
    world_size = plan.world_size
    shared = length(plan.sinks[0]) / world_size * (world_size - 1) * result_bytes
    held = [sum(length(plan.sources[r]) for r in plan.hosted_sources(p)) * row_bytes for p in range(world_size)]
    egress = tuple(int(h * (world_size - 1) / world_size + shared) for h in held)
    return egress, tuple(int((sum(held) - h) / world_size + shared) for h in held)
