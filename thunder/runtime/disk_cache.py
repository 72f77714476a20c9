"""The cache on disk: files that processes share, named by a hash of all that their contents depend on.

The directory is that of THUNDER_CACHE_DIR, otherwise `thunder` in the user's cache directory. It may be removed at any
time. There are no locks: a file is written under another name and renamed. A file with damaged content counts as
missing and is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thunder.errors import warn_user
from thunder.options import cache_directory

LIMIT = 1 << 30  # bytes; beyond it the files that were not read for longest go, when a process writes its first


def key_of(*parts: Any) -> str:
    """The key of contents that depend on `parts` alone: numbers, strings and tuples of them."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load(key: str) -> tuple[dict, Path] | None:
    """The facts and the file of the content under a key; None where they are missing or damaged."""
    content = _directory() / f"{key}.bin"
    try:
        facts = json.loads(content.with_suffix(".json").read_bytes())
        if _hash(content.read_bytes()) != facts.pop("sha256"):
            return None
        for file in (content, content.with_suffix(".json")):
            os.utime(file)  # read last: the last to go
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return facts, content


def store(key: str, facts: dict, content: bytes) -> Path:
    """Keeps `content`, and facts that JSON can say. Returns the file of the content, which is in a temporary directory
    where none can be written."""
    for directory in (_directory(), _temporary()):
        path = directory / f"{key}.bin"
        try:
            write_whole(path, content)
            write_whole(path.with_suffix(".json"), json.dumps({**facts, "sha256": _hash(content)}).encode())
        except OSError:
            continue
        _prune_once(directory)
        return path
    raise OSError(
        f"thunder can write neither to {_directory()} nor to {_temporary()}: set THUNDER_CACHE_DIR to a directory of "
        "yours"
    )


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _directory() -> Path:
    return _trusted(cache_directory())


@functools.cache
def _trusted(directory: Path) -> Path:
    """The directory, created where it is missing; a temporary one where other users may write to it, since its files
    are executed."""
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        status = directory.stat()
    except OSError:
        return _temporary()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        warn_user(
            f"the cache directory {directory} is not used, since it belongs to another user or others may write to it: "
            "set THUNDER_CACHE_DIR to a directory that only you can write to",
            UserWarning,
        )
        return _temporary()
    return directory


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="thunder")


def _after_fork() -> None:
    """The directory is another process's, which removes it: a child that ends leaves it, and has one of its own."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.Lock()
    if _temporary_directory.cache_info().currsize:
        weakref.finalize.detach(_temporary_directory()._finalizer)  # type: ignore[attr-defined]
        _OF_PARENTS.append(_temporary_directory())
        _temporary_directory.cache_clear()
        _trusted.cache_clear()


_OF_PARENTS: list[tempfile.TemporaryDirectory] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _temporary() -> Path:
    with _ONE_AT_A_TIME:  # what a second thread makes meanwhile would be removed while it is written to
        return Path(_temporary_directory().name)


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """A directory for the time of the block. A process that is forked meanwhile does not remove it, as it would a
    `tempfile.TemporaryDirectory` when it ends."""
    directory = tempfile.mkdtemp(prefix="thunder")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it: who reads sees a whole file or none. Raises OSError where the
    directory cannot be written to, or its disk is full."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@functools.cache
def _prune_once(directory: Path) -> None:
    """Removes the least recently read files until half of LIMIT is left, where there is more than LIMIT."""
    entries = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):  # another process removes as well
                entries.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    if total <= LIMIT:
        return
    for _, size, path in sorted(entries):
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
        if total <= LIMIT // 2:
            return
