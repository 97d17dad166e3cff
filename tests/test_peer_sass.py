"""The memory order of the peer kernel, read in its machine code (needs a library with CUDA kernels, and cuobjdump)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from shardsum import native


@pytest.fixture(scope="module")
def instructions() -> list[str]:
    """Opcodes of the peer kernel and the functions it calls, in the order of their addresses."""
    status = native.status()
    tool = shutil.which("cuobjdump")
    if status.library is None or tool is None:
        pytest.skip("needs the native library and cuobjdump")
    listing = subprocess.run([tool, "-sass", str(status.library)], capture_output=True, text=True, check=True).stdout
    parts = [part for part in listing.split("Function : ")[1:] if "peer_kernel" in part.splitlines()[0]]
    if not parts:
        pytest.skip("the library has no CUDA part")
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", parts[0])


def test_every_flag_is_released_after_a_barrier(instructions: list[str]) -> None:
    flags, released = 0, False
    for opcode in instructions:
        if opcode.startswith("BAR"):
            released = False
        elif opcode == "MEMBAR.ALL.SYS":
            released = True
        elif re.fullmatch(r"STG\.E\.(64|128)\.STRONG\.SYS", opcode):
            flags += 1
            assert released, "a flag is stored after a block-wide barrier without a fence at system scope"
    assert flags >= 5  # rows, staged, reduced, done, abort


def test_flags_are_acquired(instructions: list[str]) -> None:
    acquired = [i for i, opcode in enumerate(instructions) if opcode == "CCTL.IVALL"]
    polls = [i for i, opcode in enumerate(instructions) if re.fullmatch(r"LDG\.E\.(64|128)\.STRONG\.SYS", opcode)]
    assert acquired and any(0 < i - p < 40 for i in acquired for p in polls)


def test_peer_data_is_never_read_through_a_cache_that_may_be_stale(instructions: list[str]) -> None:
    wide = {opcode for opcode in instructions if re.match(r"LDG?\.E.*\.128", opcode)}
    assert "LDG.E.128.STRONG.SYS" in wide
    # The caller's own shard, and the kernel's parameters.
    assert wide <= {"LDG.E.128.STRONG.SYS", "LDG.E.NA.128.CONSTANT", "LD.E.128"}, wide


def test_no_multicast(instructions: list[str]) -> None:
    assert not [opcode for opcode in instructions if "MULTIMEM" in opcode or opcode.startswith(("LDGMC", "REDG.MC"))]
