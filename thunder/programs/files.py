"""Files of programs: a line that says what the rest is, with its hash, and the rest as JSON.

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
from pathlib import Path

from thunder.options import cache_directory
from thunder.programs.text import Damaged
from thunder.runtime import disk_cache

SUFFIX, REFUSED = ".program", ".refused"
_MAGIC = b"thunder program 1"
_KEY = "programs.key"
LARGEST = 256 << 20  # bytes of a file


def directory() -> Path:
    return cache_directory() / "programs"


def key_of_user(make: bool = False) -> bytes | None:
    """The key of this user's cache; None where there is none that can be trusted. make: where there is none yet."""
    path = cache_directory() / _KEY
    for _ in range(2):
        try:
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


def write(path: Path, document: dict, key: bytes | None) -> None:
    """Raises OSError where the directory cannot be written to, or its disk is full."""
    document = _trusted(document, key)
    content = json.dumps(document, separators=(",", ":")).encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk_cache.write_whole(path, b" ".join((_MAGIC, _hash(content, key).encode())) + b"\n" + content)


def read(path: Path, key: bytes | None) -> dict:
    """The document of a file. Raises Damaged, in words, where it is not whole or not to be trusted; OSError where it
    cannot be read."""
    _check_owner(path.parent, 0o022)
    _check_owner(path, 0o022)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        head, _, content = file.read(LARGEST).partition(b"\n")
    magic, _, said = head.rpartition(b" ")
    if magic != _MAGIC:
        raise Damaged("it does not begin as a program of this version of thunder does")
    if not hmac.compare_digest(said, _hash(content, key).encode()):
        raise Damaged("its hash is not that of its content: it is damaged, or another user wrote it")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise Damaged("it is no document")
    return _trusted(document, key)


def _trusted(document: dict, key: bytes | None) -> dict:
    """A document without what only who has the key may say, since it cannot be looked into: compiled code, kernels."""
    return document if key is not None else {k: said for k, said in document.items() if k not in ("codes", "regions")}


def _hash(content: bytes, key: bytes | None) -> str:
    if key is None:
        return hashlib.sha256(content).hexdigest()
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _check_owner(path: Path, forbidden: int) -> None:
    """Raises Damaged where others may have written a file or a directory."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and not stat.S_ISDIR(os.stat(path).st_mode):
        raise Damaged(f"{path.name} is a link")
    if stat.S_ISLNK(found.st_mode):
        found = os.stat(path)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise Damaged(f"{path.name} is neither a file nor a directory")
    if hasattr(os, "getuid") and (found.st_uid not in (os.getuid(), 0) or found.st_mode & forbidden):
        raise Damaged(f"{path} belongs to another user, or others may write to it")
