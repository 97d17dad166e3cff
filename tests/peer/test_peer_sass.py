"""The memory order of the peer kernels, read in their machine code (needs a CUDA library and cuobjdump)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from shardsum.native import loader as native

Opcodes = list[str]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Opcodes]:
    """Opcodes of each peer kernel and the functions it calls, in the order of their addresses; kernels that exist for
    each pair of dtypes with their mangled arguments."""
    status = native.status()
    tool = shutil.which("cuobjdump")
    if status.library is None or tool is None:
        pytest.skip("needs the native library and cuobjdump")
    listing = subprocess.run([tool, "-sass", str(status.library)], capture_output=True, text=True, check=True).stdout
    found = {}
    for part in listing.split("Function : ")[1:]:
        name = re.search(
            r"peer_(?:push|stream|two_shot|one_shot|fold)_kernel(?:I\w+?LNS_5DTypeE\d)?", part.splitlines()[0]
        )
        if name is not None and name[0] not in found:
            found[name[0]] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", part)
    if not found:
        pytest.skip("the library has no CUDA part")
    return found


def released(opcodes: Opcodes, bits: int) -> list[bool]:
    """Of every strong store of so many bits, whether a fence at system scope lies between it and a barrier before."""
    flags, fenced = [], False
    for opcode in opcodes:
        if opcode.startswith("BAR"):
            fenced = False
        elif opcode == "MEMBAR.ALL.SYS":
            fenced = True
        elif opcode == f"STG.E.{bits}.STRONG.SYS":
            flags.append(fenced)
    return flags


def test_every_flag_is_released_after_a_barrier(kernels: dict[str, Opcodes]) -> None:
    for opcodes in kernels.values():
        assert all(released(opcodes, 64)), "a flag is stored after a block-wide barrier without a fence at system scope"
    assert len(released(kernels["peer_one_shot_kernel"], 64)) >= 3  # staged, began, abort
    # Rows that are read; the bounds of those that are written vouch for nothing.
    assert sum(released(kernels["peer_one_shot_kernel"], 128)) >= 2


def test_flags_are_acquired(kernels: dict[str, Opcodes]) -> None:
    for opcodes in kernels.values():
        acquired = [i for i, opcode in enumerate(opcodes) if opcode == "CCTL.IVALL"]
        polls = [i for i, opcode in enumerate(opcodes) if re.fullmatch(r"LDG\.E\.(64|128)\.STRONG\.SYS", opcode)]
        assert acquired and any(0 < i - p < 40 for i in acquired for p in polls)


def test_a_pushed_word_is_one_access(kernels: dict[str, Opcodes]) -> None:
    pushing = {name: opcodes for name, opcodes in kernels.items() if "push" in name or "stream" in name}
    assert len([name for name in pushing if "stream" in name]) == 11  # pairs of float dtypes
    assert len([name for name in pushing if "push" in name]) == 11 + 3  # and integers of 2, 4 and 8 bytes
    for name, opcodes in pushing.items():
        sent = (
            4 if re.search(r"kernelI[sil]", name) else 2
        )  # words of a lane: of integers (short, int, long), or floats
        if "push" in name:  # a lane's words are sent, those of one or two rows emptied, and the bounds sent
            rows = 1 if re.search(r"kernelI[dsil]", name) else 2
            assert opcodes.count("STG.E.128.STRONG.SYS") == sent + rows * sent + 2, name
            assert opcodes.count("LDG.E.128.STRONG.SYS") == rows * sent + 2, name
        strong = {opcode for opcode in opcodes if re.match(r"STG\.E.*STRONG", opcode)}
        assert strong <= {"STG.E.64.STRONG.SYS", "STG.E.128.STRONG.SYS"}, strong


def test_peer_data_is_never_read_through_a_cache_that_may_be_stale(kernels: dict[str, Opcodes]) -> None:
    for opcodes in kernels.values():
        wide = {opcode for opcode in opcodes if re.match(r"LDG?\.E.*\.128", opcode)}
        assert "LDG.E.128.STRONG.SYS" in wide
        # The caller's own shard, and the kernel's parameters.
        assert wide <= {"LDG.E.128.STRONG.SYS", "LDG.E.NA.128.CONSTANT", "LD.E.128"}, wide


def test_no_multicast(kernels: dict[str, Opcodes]) -> None:
    for opcodes in kernels.values():
        assert not [opcode for opcode in opcodes if "MULTIMEM" in opcode or opcode.startswith(("LDGMC", "REDG.MC"))]
