"""The folder of a run: who may write it, and how a file is replaced so that a crash leaves the old or the new one.

Files are never written through links, neither the files themselves nor the unfinished ones beside them: a link is
replaced by a file. One run at a time writes a folder; the lock that says so ends with the process that holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import time
from pathlib import Path

_UNFINISHED = ".unfinished"


class RunFolder:
    """A run folder as its one writer sees it (process 0 of the run). The others only know its path.

    Every method raises OSError with a sentence that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def claim(self) -> None:
        """Create the folder if it is missing, lock it, and remove what killed writers left unfinished.

        Raises:
            OSError: it cannot be created or read, or another run is writing it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self.release()
                raise OSError(
                    f"folder: another run is writing {self.path}; wait for it or name another folder"
                ) from None
            # A file system without locks: go on without one.
        for leftover in self.path.glob(f".*{_UNFINISHED}"):
            leftover.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def replace(self, name: str, data: bytes, keep: str | None = None) -> None:
        """Make ``data`` the whole of a file: on the disk when this returns, else the file is as it was.

        Args:
            keep: the name that the file's former content gets. A crash in between leaves that name alone.
        """
        path, unfinished = self.path / name, self.path / f".{name}.{os.getpid()}{_UNFINISHED}"
        try:
            unfinished.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(unfinished, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and os.path.lexists(path):
                os.replace(path, self.path / keep)
            os.replace(unfinished, path)
            self._sync()
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{path} cannot be written: {_reason(error)}") from error

    def keep_steps(self, name: str, last: int) -> None:
        """Keep the lines of a JSON file whose "step" is at most ``last``, none that a crash cut."""
        try:
            lines = read_file(self.path / name).splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        self.replace(name, b"".join(line for line in lines if _step(line) <= last))

    def append(self, name: str, line: str) -> None:
        """Append a line to a file that :meth:`keep_steps` made."""
        path = self.path / name
        try:
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), "ab", 0) as file:
                data = line.encode()
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(f"{path} cannot be written: {_reason(error)}") from error

    def _sync(self) -> None:
        """Names are on the disk only when their folder is."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot
                raise
        finally:
            os.close(folder)


def read_file(path: Path) -> bytes:
    """All bytes of a regular file, not mapped.

    Raises:
        FileNotFoundError: there is none, or a link or a device in its place.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(f"{path} is not a regular file") from None
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{path} is not a regular file")
        return file.read()


def new_folder(parent: Path) -> Path:
    """Create ``parent``/<the time> with a name that no other run has."""
    name, number = time.strftime("%Y%m%d-%H%M%S"), 0
    while True:
        path = parent / (f"{name}-{number}" if number else name)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            if not parent.is_dir():
                raise OSError(f"folder: {parent} is not a folder") from None
            number += 1


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
