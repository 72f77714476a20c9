"""Files of programs: a line that says what the rest is, with its hash, and the rest as JSON, a line for each part, so
that who needs some parts only parses those.

What is in a file becomes a program that runs. So a file is read only where it and its directory belong to this user (or
to the superuser) and nobody else may write to them, and only where its hash is that of its content. Files of the cache
are hashed with a key that only the user can read (`programs.key`), so that whoever else wrote one, by whatever way, did
not write that hash. A file is written under another name and renamed: processes share a directory without locks, and
whoever reads sees a whole file or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thunder.options import cache_directory
from thunder.programs.text import Damaged
from thunder.runtime import disk_cache

SUFFIX, REFUSED = ".program", ".refused"
_MAGIC = b"thunder program 2"
_GUARDED = ("codes", "regions")  # what cannot be looked into: only who has the key may say it
FOREIGN = "foreign"  # whether another user, or this one on another machine, wrote a document that `read` returns
_KEY = "programs.key"
LARGEST = 256 << 20  # bytes of a file


def directory() -> Path:
    return cache_directory() / "programs"


def key_of_user(make: bool = False) -> bytes | None:
    """The key of this user's cache; None where there is none that can be trusted. make: where there is none yet."""
    path = cache_directory() / _KEY
    for _ in range(2):
        try:
            if _is_of_others(path.parent):
                return None
            _check_owner(path, 0o077)
            key = path.read_bytes()
            return key if len(key) == 32 else None
        except (OSError, Damaged):
            if not make:
                return None
        make = False
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            try:
                with open(handle, "wb") as file:
                    file.write(os.urandom(32))
                os.link(name, path)  # of several processes one makes it
            finally:
                os.unlink(name)
    return None


def _is_of_others(path: Path) -> bool:
    """Whether a directory is there and other users may write to it."""
    try:
        _check_owner(path, 0o022)
    except OSError:
        return False
    except Damaged:
        return True
    return False


class _Document(Mapping[str, Any]):
    """The parts of a file, each parsed when it is first asked for."""

    def __init__(self, content: bytes, start: int):
        """start: where its JSON begins."""
        self._content, self._parsed = content, {}
        self._places: dict[str, tuple[int, int]] = {}
        end = len(content) - 2
        if content[start : start + 2] != b"{\n" or content[end:] != b"\n}":
            raise Damaged("it is no document")
        start += 2
        while start < end:
            stop, colon = content.find(b"\n", start), content.find(b":", start)
            self._places[content[start + 1 : colon - 1].decode()] = colon + 1, stop - (stop < end)  # without a comma
            start = stop + 1

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsed:
            start, stop = self._places[name]
            self._parsed[name] = json.loads(self._content[start:stop])
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def write(path: Path, document: Mapping[str, Any], key: bytes | None, signer: bytes | None = None) -> None:
    """Raises OSError where the directory cannot be written to, or its disk is full. signer: the key of the user who
    writes a file that other machines may read, so that `read` knows it as this user's own."""
    parts = {name: said for name, said in document.items() if key is not None or name not in _GUARDED}
    lines = [f"{json.dumps(name)}:{json.dumps(said, separators=(',', ':'))}" for name, said in parts.items()]
    content = ("{\n" + ",\n".join(lines) + "\n}").encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hashes = [_hash(content, key)] if signer is None else [_hash(content, key), _hash(content, signer)]
    disk_cache.write_whole(path, b" ".join((_MAGIC, *map(str.encode, hashes))) + b"\n" + content)


def read(path: Path, key: bytes | None, signer: bytes | None = None, trusted: bool = True) -> Mapping[str, Any]:
    """The document of a file. Raises Damaged, in words, where it is not whole or not to be trusted; OSError where it
    cannot be read. trusted: without it, a file that is not hashed with `key` has to be signed by `signer`."""
    _check_owner(path.parent, 0o022)
    _check_owner(path, 0o022)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        content = file.read(LARGEST)
    start = content.find(b"\n") + 1
    head = content[:start].split()
    said, signature = (*head[3:], b"", b"")[:2]
    if head[:3] != _MAGIC.split() or len(head) > 5:
        raise Damaged("it does not begin as a program of this version of thunder does")
    if not hmac.compare_digest(said, _hash(memoryview(content)[start:], key).encode()):
        raise Damaged("its hash is not that of its content: it is damaged, or another user wrote it")
    if key is not None:
        return _Document(content, start)
    own = signer is not None and hmac.compare_digest(signature, _hash(memoryview(content)[start:], signer).encode())
    if not own and not trusted:
        raise Damaged(
            "this user did not write it on this machine, or it was changed since: a program computes what its author "
            "wants, like a wheel. If you trust its author, say thunder.load(..., trusted=True)"
        )
    try:  # anybody can compute its hash, so all of it is looked at
        document = json.loads(content[start:])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise Damaged("it is no document")
    return {name: said for name, said in document.items() if name not in _GUARDED} | {FOREIGN: not own}


def _hash(content: bytes | memoryview, key: bytes | None) -> str:
    if key is None:
        return hashlib.sha256(content).hexdigest()
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _check_owner(path: Path, forbidden: int) -> None:
    """Raises Damaged where others may have written a file or a directory."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) and not stat.S_ISDIR(os.stat(path).st_mode):
        raise Damaged(f"{path.name} is a link")
    if stat.S_ISLNK(status.st_mode):
        status = os.stat(path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Damaged(f"{path.name} is neither a file nor a directory")
    if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & forbidden):
        raise Damaged(f"{path} belongs to another user, or others may write to it")
