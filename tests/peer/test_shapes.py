"""The arithmetic of the peer transport: shapes of launches, regions of the workspace, predicted bytes; on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsum.core.layout import ExchangePlan, intervals_of, owners_of, split_evenly
from shardsum.transports.peer import shapes as peer_plan
from shardsum.transports.peer.layout import (
    FLOAT_GROUP,
    INT_GROUP,
    MAX_RANKS,
    STREAM_STRETCH,
    MemoryLayout,
    bounded_staging,
    choose_regions,
    default_staging,
    round_up,
)
from shardsum.transports.peer.shapes import Message, TileMap
from shardsum.transports.peer.transport import PeerTransport
from shardsum.transports.peer.tuning import Tuning


def layout_of(
    world_size: int, rows: int, staging: int = 1 << 20, blocks: int = 128, tuning: Tuning | None = None
) -> MemoryLayout:
    tuning, ranks = tuning or Tuning(), world_size * rows
    return MemoryLayout(choose_regions(ranks, world_size, blocks, rows, tuning, staging), ranks, rows, tuning)


def number_of_tiles(tiles: TileMap, chunk: int) -> int:
    return -(-chunk // tiles.tile)


def number_of_pieces(tiles: TileMap, chunk: int) -> int:
    return -(-number_of_tiles(tiles, chunk) // (tiles.blocks * tiles.tiles_per_piece))


def rounds(two: bool) -> dict[str, Any]:
    """The tuning of sums that every process gets in one round, or in two, at any size."""
    return dict(push_bytes={0: 0}, two_shot_bytes={0: -(1 << 60) if two else 1 << 60})


@st.composite
def messages(draw: st.DrawFn, two_shot: bool = False) -> tuple[Message, MemoryLayout]:
    """``two_shot``: only what can go in two rounds, that is sums that every process gets."""
    world_size, rows = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    move, replicated = (False, True) if two_shot else (draw(st.booleans()), draw(st.booleans()))
    in_bytes = 1 if move else draw(st.sampled_from([1, 2, 4, 8]))
    out_bytes = {1: 8, 2: draw(st.sampled_from([2, 4, 8])), 4: draw(st.sampled_from([2, 4])), 8: 8}[in_bytes]
    size, width = draw(st.integers(int(two_shot), 30000)), draw(st.sampled_from([1, 3, 8, 100, 1000]))
    extent = size if replicated else draw(st.integers(0, size))
    longest = size if replicated else draw(st.integers(0, size))
    floats = not move and in_bytes > 1 and draw(st.booleans())
    needed = size if replicated else draw(st.integers(0, longest))
    message = Message(
        size, width, extent, longest, needed, in_bytes, 1 if move else out_bytes, move, replicated, floats
    )
    staging = draw(st.sampled_from([2 << 20, 8 << 20, 64 << 20]))
    writes, streams = draw(st.booleans()), draw(st.booleans())
    forced = True if two_shot else draw(st.sampled_from([None, False, True]))
    tuning = Tuning(
        draw(st.sampled_from([128, 256] if writes else [96, 128, 256])), draw(st.sampled_from([1, 7, 128])), 1,
        **(dict(push_bytes={0: 1 << 16}) if forced is None else rounds(forced)), write_processes=9 * writes,
        stream_processes=9 * streams,
    )  # fmt: skip
    return message, layout_of(world_size, rows, staging, draw(st.sampled_from([3, 132])), tuning)


@settings(deadline=None, max_examples=300)
@given(messages())
def test_a_shape_covers_the_message_and_fits_the_memory(case: tuple) -> None:
    m, layout = case
    shape, tuning = peer_plan.choose_shape(m, layout), layout.tuning
    tiles, total = shape.tiles, m.size * m.width
    parts = layout.world_size if shape.two_shot else 1
    assert not shape.two_shot or (m.replicated and not m.move)
    assert tiles.blocks <= layout.blocks and tiles.stretches_per_tile % parts == 0
    assert tiles.stretch * m.in_bytes % 16 == 0  # rows are read in whole vectors
    assert shape.chunk >= total or shape.chunk % tiles.tile == 0
    if shape.two_shot:  # a process's part of a chunk lies inside its slot, and the whole sum in its area
        assert number_of_tiles(tiles, shape.chunk) * (tiles.tile // parts) * m.in_bytes <= layout.part_bytes
        assert min(shape.chunk, total) * m.out_bytes <= layout.regions.reduced
        assert layout.num_ranks * layout.part_bytes <= layout.regions.staging
    elif shape.push:  # its words lie inside its inbox
        small = shape.producers == 0
        unit = (FLOAT_GROUP if m.floats else INT_GROUP) if small else STREAM_STRETCH
        units = -(-min(shape.chunk, max(1, total)) * m.in_bytes // unit)
        words = units * (unit if m.floats else 2048)
        if not small:  # from the stretch on in which what is needed begins
            words = min(words, m.needed * m.width * m.in_bytes + STREAM_STRETCH + 16)
        assert words <= layout.inbox_row_bytes and m.in_bytes > 1
        assert shape.chunk >= total if small else m.floats and layout.streams
        assert tiles.tile * m.in_bytes == unit and tiles.blocks == min(units, layout.blocks)
    else:  # a row's part of a chunk, filled up to whole vectors at both ends, lies inside its slot
        assert min(m.longest * m.width, shape.chunk) * m.in_bytes + 32 <= layout.row_bytes
    assert shape.write == (shape.two_shot or (layout.writes and not shape.push))
    assert (0 if shape.push else 1) <= shape.producers <= tuning.producer_warps


@settings(deadline=None, max_examples=200)
@given(
    messages(two_shot=True)
)  # not an assumption: three of four examples would be thrown away, and a health check fail
def test_written_parts_lie_side_by_side_in_their_slot(case: tuple) -> None:
    """The addresses of csrc/peer/parts.cuh: `slot_origin` + `tile_shift` + an element, from the slot's begin."""
    m, layout = case
    total, world_size = m.size * m.width, layout.world_size
    shape = peer_plan.choose_shape(m, layout)
    assert shape.two_shot
    tile, part = shape.tiles.tile, shape.tiles.tile // world_size
    for begin in {0, (total - 1) // shape.chunk * shape.chunk}:  # the first and the last launch
        end, covered = min(begin + shape.chunk, total), 0
        assert begin * m.in_bytes % 16 == 0 and begin * m.out_bytes % 16 == 0
        for process in range(world_size):
            origin, free = -(begin + process * part) * m.in_bytes, 0
            for t in range(number_of_tiles(shape.tiles, end - begin)):
                lo = begin + t * tile + process * part
                hi = min(lo + part, end)
                if lo < hi:
                    at = origin + t * (part - tile) * m.in_bytes
                    assert at % 16 == 0 and at + lo * m.in_bytes == free
                    free, covered = at + round_up(hi * m.in_bytes, 16), covered + hi - lo
            assert free <= layout.part_bytes
        assert covered == end - begin


def test_every_tile_has_one_block_and_one_piece() -> None:
    m = Message(5000, 100, 5000, 5000, 5000, 2, 2, False, True)
    reads = Tuning(blocks=5, small_bytes=1000, push_bytes={0: 0}, write_processes=0, stream_processes=0)
    shape = peer_plan.choose_shape(m, layout_of(2, 1, tuning=reads))
    tiles = shape.tiles
    seen = set()
    for block in range(tiles.blocks):  # as the kernel walks them
        for piece in range(number_of_pieces(tiles, shape.chunk)):
            for j in range(tiles.tiles_per_piece):
                tile = block + (piece * tiles.tiles_per_piece + j) * tiles.blocks
                assert tile not in seen
                seen.add(tile)
    assert seen >= set(range(number_of_tiles(tiles, shape.chunk))) and number_of_pieces(tiles, shape.chunk) > 1


@pytest.mark.parametrize("world_size, rows, writes", [(2, 1, True), (3, 2, False), (8, 1, True), (16, 4, False)])
def test_regions_of_the_symmetric_block_are_apart_and_aligned(world_size: int, rows: int, writes: bool) -> None:
    tuning = Tuning(push_bytes={0: 1 << 16}, write_processes=16 * writes, stream_processes=0)
    layout = layout_of(world_size, rows, tuning=tuning)
    at = layout.regions
    began = at.abort_at + 8
    ends = [
        0, at.stages_at, at.abort_at, began, began + 8 * world_size, at.staging_at, at.reduced_at, at.inbox_at,
        at.total_bytes,
    ]  # fmt: skip
    assert ends == sorted(ends)
    assert at.stages_at == 2 * at.max_blocks * MAX_RANKS * 32
    assert at.abort_at - at.stages_at == 2 * at.max_blocks * world_size * 16
    assert at.reduced_at - at.staging_at == 2 * at.staging and at.inbox_at - at.reduced_at == 2 * at.reduced
    assert at.total_bytes - at.inbox_at == 2 * at.inboxes
    assert at.staging >= (world_size if writes else 1) * rows * layout.row_bytes  # one-shot
    assert at.staging >= world_size * rows * layout.part_bytes and layout.part_bytes % 256 == 0  # two-shot
    assert layout.row_bytes * rows >= 1 << 20 and layout.part_bytes * world_size * rows >= 1 << 20
    assert all(n % 256 == 0 for n in (at.staging_at, at.staging, layout.row_bytes, at.reduced_at, at.reduced))
    assert at.inbox_at % 256 == 0 and layout.inbox_row_bytes % 256 == 0
    peers_rows = (world_size - 1) * rows  # those that are pushed to one process, in slots by rank or by place
    assert layout.inbox_rows >= peers_rows and layout.inbox_rows * layout.inbox_row_bytes <= at.inboxes
    assert layout.push_limit == 1 << 16 and layout.inbox_row_bytes >= round_up(1 << 16, INT_GROUP) // INT_GROUP * 2048


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_groups_of_other_numbers_of_ranks_share_regions(world_size: int) -> None:
    """Whoever came first: slots fit, and rows are nearly as long as in regions of their own."""
    tuning, staging = Tuning(), default_staging(world_size)
    for first in (1, 4):
        regions = choose_regions(first * world_size, world_size, 132, first, tuning, staging)
        for rows in (1, 2, 3, 8):
            layout = MemoryLayout(regions, rows * world_size, rows, tuning)
            slots = layout.num_ranks if layout.writes else rows
            assert slots * layout.row_bytes <= regions.staging
            assert layout.num_ranks * layout.part_bytes <= regions.staging
            assert layout.inbox_rows * layout.inbox_row_bytes <= regions.inboxes
            assert layout.row_bytes > staging // rows - 256
            assert layout.push_limit == tuning.push_limit(world_size) or world_size * rows > 12
            if layout.streams:
                assert layout.inbox_row_bytes > staging // rows - 256


def test_a_bound_on_the_workspace_holds_and_is_used() -> None:
    for world_size, rows in ((2, 1), (2, 8), (4, 1), (8, 4)):
        group = (world_size * rows, world_size, 132, rows, Tuning())
        for bound in (100 << 20, 300 << 20):
            total = choose_regions(*group, bounded_staging(*group, bound)).total_bytes
            assert 0.98 * bound < total <= bound
        whole = choose_regions(*group, default_staging(world_size))
        assert bounded_staging(*group, 1 << 40) == default_staging(world_size)
        assert bounded_staging(*group, whole.total_bytes) == default_staging(world_size)
        with pytest.raises(ValueError, match=r"workspace_bytes: 1000 bytes are too few.*it takes at least"):
            bounded_staging(*group, 1000)


def reduced(world_size: int, num_bytes: int, tuning: Tuning | None = None, rows: int = 1) -> bool:
    m = Message(num_bytes // 2, 1, num_bytes // 2, num_bytes // 2, num_bytes // 2, 2, 2, False, True)
    return peer_plan.choose_shape(m, layout_of(world_size, rows, 256 << 20, tuning=tuning)).two_shot


def unused(owners: tuple[int, ...], world_size: int) -> PeerTransport:
    """One that is asked for predictions alone."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: world_size)
    return PeerTransport(group, owners, torch.device("cpu"), timeout=1.0, gather=lambda value: [value])


@pytest.mark.parametrize("world_size, rows", [(2, 1), (2, 8), (4, 1), (4, 2), (8, 1)])
def test_what_is_predicted_is_what_is_launched(world_size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardsum.transports.peer.transport.available", lambda *args: None)
    owners = owners_of(world_size * rows, world_size, "contiguous")
    peers = unused(owners, world_size)
    limit = Tuning().push_limit(world_size)
    layout = layout_of(world_size, rows, 64 << 20)
    for size in (1 << 10, limit, limit + 1024, 64 << 20):
        sources, sinks = ((0, size // 2),) * len(owners), ((0, size // 2),) * world_size
        plan = ExchangePlan(sources, owners, sinks, tuple(range(world_size)), world_size)
        shape = peer_plan.choose_shape(peer_plan.describe_message(plan, 1, 2, 2, False), layout)
        two_shot, egress, _ = peers.predict(plan, 1, 2, 2, False)
        assert two_shot == shape.two_shot and (shape.push and shape.producers == 0) == (size <= limit)
        if shape.push:  # every peer gets every row
            assert egress == ((world_size - 1) * rows * size,) * world_size


def test_bytes_that_are_predicted_are_those_that_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed and written: the hull of what others want, of two without the gap, to all; read: what each wants."""

    def predicted(world_size: int, owners: tuple[int, ...], size: int, move: bool = False) -> Any:
        monkeypatch.setattr("shardsum.transports.peer.transport.available", lambda *args: None)
        peers = unused(owners, world_size)
        sinks = intervals_of(split_evenly(size, len(owners)))
        plan = ExchangePlan(((0, size),) * len(owners), owners, tuple(sinks), owners, world_size)
        return peers.predict(plan, 1, 2, 2, move)

    # Process 0 wants both ends of process 1's rows, that one the middle of the other's.
    assert predicted(2, (0, 1, 1, 0), 4000) == (False, (2 * 4000, 2 * 8000), (2 * 8000, 2 * 4000))
    assert predicted(2, (0, 1, 1, 0), 4 << 20) == (False, (8 << 20, 8 << 20), (8 << 20, 8 << 20))  # without the middle
    # Three others want three fourths; of inner rows the hull is all.
    sent = (3 * 2 * 3000, 3 * 2 * 4000, 3 * 2 * 4000, 3 * 2 * 3000)
    assert predicted(4, (0, 1, 2, 3), 4000) == (False, sent, (2 * 11000, 2 * 10000, 2 * 10000, 2 * 11000))
    assert predicted(4, (0, 1, 2, 3), 4 << 20) == (False, (6 << 20,) * 4, (6 << 20,) * 4)


def test_two_shot_where_it_spares_the_links() -> None:
    assert not any(reduced(2, n) for n in (1 << 10, 1 << 20, 64 << 20))  # two processes: the same bytes either way
    assert not reduced(8, 64 << 10) and reduced(8, 4 << 20)
    assert not reduced(4, 256 << 10) and reduced(4, 8 << 20)
    assert reduced(2, 16 << 20, rows=4)  # two processes of four rows each: it saves three rows of eight halves
    assert reduced(8, 256 << 10, Tuning(two_shot_bytes={0: 1 << 60, 8: 0}))
    assert not reduced(4, 8 << 20, Tuning(two_shot_bytes={0: 1 << 60, 8: 0}))


@given(st.data())
def test_needed_is_the_hull_of_what_others_read(data: st.DataObject) -> None:
    interval = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p)))
    sources, sinks = (tuple(data.draw(st.lists(interval, min_size=4, max_size=4))) for _ in range(2))
    owners = (0, 1, 1, 2)
    plan = ExchangePlan(sources, owners, sinks, owners, 3)
    for r, (begin, end) in enumerate(sources):
        others = [o for o, owner in zip(sinks, owners) if owner != owners[r]]
        read = [j for j in range(begin, end) if any(lo <= j < hi for lo, hi in others)]
        found = peer_plan.needed(plan, r, (begin, end))
        assert found == ((read[0], read[-1] + 1) if read else (0, 0))


def test_small_sums_are_pushed() -> None:
    def pushed(num_bytes: int, move: bool = False, limit: int = 1 << 16) -> bool:
        n, width = num_bytes // 2, 1 if move else 2
        m = Message(n, 1, n, n, n, width, width, move, True)
        return peer_plan.choose_shape(m, layout_of(4, 1, tuning=Tuning(push_bytes={0: limit}))).push

    assert pushed(1 << 10) and pushed(1 << 16) and not pushed((1 << 16) + 2)
    assert not pushed(1 << 10, move=True) and not pushed(0)
    assert not pushed(1 << 10, limit=0)
    assert Tuning(push_bytes={0: 5, 2: 7}).push_limit(2) == 7 and Tuning(push_bytes={0: 5, 2: 7}).push_limit(3) == 5


def test_two_processes_push_floats_and_write_the_rest() -> None:
    def shape_of(num_bytes: int, world_size: int = 2, move: bool = False, floats: bool = True) -> peer_plan.Shape:
        n = num_bytes if move else num_bytes // 2
        m = Message(n, 1, n, n, n, 1 if move else 2, 1 if move else 2, move, True, floats and not move)
        return peer_plan.choose_shape(m, layout_of(world_size, 1, 256 << 20))

    assert shape_of(512 << 10).push and shape_of(512 << 10).producers == 0
    streamed = [shape_of(n << 20) for n in (1, 8, 16, 64)]
    assert all(s.push and s.tiles.columns == 8 and s.tiles.blocks == 128 for s in streamed)
    assert [s.producers for s in streamed] == [1, 1, 2, 2]
    written = [shape_of(n << 20, floats=False) for n in (4, 16, 64)]
    assert all(s.write and s.tiles.columns == 8 and s.tiles.blocks == 128 for s in written)
    assert [s.producers for s in written] == [1, 2, 2] and shape_of(1 << 10, move=True).write
    assert [number_of_pieces(s.tiles, s.chunk) for s in written] == [4, 8, 32]
    assert not shape_of(4 << 20, 4).write or shape_of(4 << 20, 4).two_shot


def test_four_processes_push_or_write_in_two_rounds() -> None:
    def shape_of(num_bytes: int) -> peer_plan.Shape:
        m = Message(num_bytes // 2, 1, num_bytes // 2, num_bytes // 2, num_bytes // 2, 2, 2, False, True)
        return peer_plan.choose_shape(m, layout_of(4, 1, 128 << 20))

    assert shape_of(512 << 10).push
    shapes = {n: shape_of(n << 20) for n in (1, 4, 16, 64, 256)}
    assert all(s.two_shot and s.write and s.producers == 1 and s.tiles.blocks == 128 for s in shapes.values())
    assert {n: number_of_pieces(s.tiles, s.chunk) for n, s in shapes.items()} == {1: 1, 4: 1, 16: 2, 64: 8, 256: 16}
    assert [s.tiles.columns for s in shapes.values()] == [2, 8, 8, 8, 8] and shapes[256].chunk == 64 << 20


def test_bad_tuning_is_refused() -> None:
    for bad in (
        dict(threads=100),
        dict(threads=512),
        dict(producer_warps=8),
        dict(blocks=0),
        dict(producer_warps=6),
        dict(producer_warps=7, write_processes=1),
        dict(two_shot_bytes={2: 1}),
    ):
        with pytest.raises(ValueError):
            Tuning(**bad)
