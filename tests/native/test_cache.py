"""The cache of built libraries: damage is repaired, what others could have written is refused, odd places work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardsum.native.artifact import read_record, seal
from tests.native.children import run
from tests.native.tiny import build_tiny, build_tiny_and_listen, compiled

DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte altered": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "never sealed": lambda data: data[:-81],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_library_is_built_again(name, tiny, tmp_path):
    path = run(tiny, build_tiny)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[name](whole))
    assert read_record(path) is None
    calls = len(compiled(tmp_path))
    assert run(tiny, build_tiny) == path and read_record(path) is not None
    assert len(compiled(tmp_path)) == 2 * calls
    assert run(tiny, build_tiny) == path and len(compiled(tmp_path)) == 2 * calls


def test_a_seal_lets_nobody_else_write(tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(b"code")
    library.chmod(0o777)
    seal(library)
    assert library.stat().st_mode & 0o777 == 0o755 and read_record(library) is not None


def make_link(path: Path) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


REFUSED = {
    "folder for all": (lambda cache, library: cache.chmod(0o777), "other users can write"),
    "folder for a group": (lambda cache, library: cache.chmod(0o770), "other users can write"),
    "library for all": (lambda cache, library: library.chmod(0o757), "other users can write"),
    "library for a group": (lambda cache, library: library.chmod(0o775), "other users can write"),
    "folder above for all": (lambda cache, library: cache.parent.chmod(0o777), "other users can write"),
    "folder is a link": (lambda cache, library: make_link(cache), "is a link"),
    "library is a link": (lambda cache, library: make_link(library), "is a link"),
    "library is a link to nothing": (
        lambda cache, library: (library.unlink(), library.symlink_to("nothing")),
        "is a link",
    ),
}
if os.geteuid() == 0:
    REFUSED |= {
        "another user's folder": (lambda cache, library: os.chown(cache, 12345, 0), "another user (uid 12345)"),
        "another user's library": (lambda cache, library: os.chown(library, 12345, 0), "another user (uid 12345)"),
        "another user's folder above": (lambda cache, library: os.chown(cache.parent, 12345, 0), "another user"),
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_others_could_have_written_is_refused(name, tiny, tmp_path):
    change, reason = REFUSED[name]
    library = run(tiny, build_tiny)
    calls = len(compiled(tmp_path))
    change(library.parent, library)
    path, error, _ = run(tiny, build_tiny_and_listen)
    assert path is None and len(compiled(tmp_path)) == calls
    assert error.startswith("the cache of the native library is not trusted, for a library is code: ")
    assert reason in error and "\n" not in error


def test_a_folder_with_the_sticky_bit_serves_all_users(tiny):
    cache = Path(tiny["SHARDSUM_CACHE"])
    cache.mkdir()
    cache.chmod(0o1777)
    assert run(tiny, build_tiny).parent == cache


def test_a_new_cache_is_this_users_alone(tiny):
    assert run(tiny, build_tiny).parent.stat().st_mode & 0o777 == 0o700


def test_a_library_in_a_cache_is_used_without_writing_there(tiny, tmp_path):
    path = run(tiny, build_tiny)
    (path.parent / f"{path.name}.lock").unlink()
    before = sorted(path.parent.iterdir())
    path.parent.chmod(0o500)
    assert run(tiny, build_tiny) == path and sorted(path.parent.iterdir()) == before


def test_a_tilde_is_the_home(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = run({**tiny, "SHARDSUM_CACHE": "~/x", "HOME": str(tmp_path / "home")}, build_tiny)
    assert path.parent == tmp_path / "home" / "x" and not (tmp_path / "~").exists()


def test_the_default_is_in_the_home(tiny, tmp_path):
    path = run({**tiny, "SHARDSUM_CACHE": None, "HOME": str(tmp_path / "home")}, build_tiny)
    assert path.parent == tmp_path / "home" / ".cache" / "shardsum"


def build_without_a_home() -> tuple[Path | None, str, str]:
    import pwd

    del os.environ["HOME"]

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    pwd.getpwuid = nobody
    return build_tiny_and_listen()


def test_no_home_is_named(tiny):
    path, error, _ = run({**tiny, "SHARDSUM_CACHE": None}, build_without_a_home)
    assert path is None and error.endswith("set SHARDSUM_CACHE")
    assert run(tiny, build_without_a_home)[0] is not None


@pytest.mark.parametrize("place", ["/proc/shardsum", "/dev/null/cache"])
def test_a_place_that_cannot_be_written_is_named(place, tiny):
    path, error, _ = run({**tiny, "SHARDSUM_CACHE": place}, build_tiny_and_listen)
    assert path is None and f"cannot be put into {place}" in error and error.endswith("set SHARDSUM_CACHE")
