"""A built library as a file: whether it is whole, what it was built from, and who could have written it.

The last bytes of a library are a seal: the SHA-256 of all that stands before it. (A loader of shared objects ignores
what follows the sections.) A file that was cut, altered or never finished has none that fits; loading such a file would
end the process with SIGBUS, or run something else.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_SEAL = b"\nshardsum-sha256:"
_SEAL_BYTES = len(_SEAL) + 64
_MARKER = b"shardsum-build:"


@dataclass(frozen=True)
class Record:
    """What the compiled-in record says: the hash of the sources, and the CUDA architectures."""

    sources: str
    archs: tuple[str, ...]


def seal(library: Path) -> None:
    """Append the seal to a library that was just linked; nobody but the owner can write it from then on."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    library.chmod(0o755)  # whatever the umask is: see untrusted_reason
    with library.open("ab") as file:
        file.write(_SEAL + digest.encode())
        file.flush()
        os.fsync(file.fileno())  # or a crash of the machine could leave a renamed, empty file


def read_record(library: Path) -> Record | None:
    """What a library was built from; None where the file is not a whole library of this project."""
    try:
        data = library.read_bytes()
    except OSError:
        return None
    body, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if tail != _SEAL + hashlib.sha256(body).hexdigest().encode():
        return None
    begin = body.find(_MARKER)
    if begin < 0:
        return Record("", ())
    sources, _, archs = body[begin + len(_MARKER) : body.index(b";", begin)].decode().partition(":")
    return Record(sources, tuple(filter(None, archs.split(","))))


def untrusted_reason(path: Path) -> str | None:
    """Why a file or folder could hold another user's code, in a few words; None where only this user or root can have
    put it there.

    The path must be no link, and nobody but its owner may write it. It and every folder above must belong to this user
    or to root. Other users may not write the folders above either, except where the sticky bit keeps them from
    replacing what is not theirs (/tmp), or the group is the owner's own (see :func:`_is_private_group`).
    """
    if path.is_symlink():
        return f"{path} is a link"
    real = path.resolve()
    for place in (real, *real.parents):
        info = place.stat()
        if info.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another user (uid {info.st_uid})"
        writers = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX:
            continue
        if writers and not (place != real and writers == stat.S_IWGRP and _is_private_group(info)):
            return f"other users can write {place} (mode {stat.S_IMODE(info.st_mode):o}; chmod go-w mends it)"
    return None


def _is_private_group(info: os.stat_result) -> bool:
    """Whether the group is its owner's own, without other members: many systems give every user such a group, and a
    umask that lets it write."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(info.st_uid), grp.getgrgid(info.st_gid)
    except KeyError:
        return False
    return owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name and set(group.gr_mem) <= {owner.pw_name}
