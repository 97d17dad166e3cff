"""Launch shapes and switch points of the peer transport, measured on H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_WARP = 32
_STREAM_WARPS = 8  # of a block that streams, whatever ``threads``


@dataclass(frozen=True)
class Tuning:
    """What each field means: docs/engineering/peer.md, "Thresholds". Every process must use the same.

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
