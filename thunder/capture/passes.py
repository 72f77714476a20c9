"""Passes: one call that looks up many things which stand in objects that stay, and compares identities.

Prologues call these functions as attributes of this module. Where a C compiler and Python's headers are found, those of
`passes.c` replace them, which do the same in a third of the time. A thread builds them when a machine's first program
is made, and the disk cache keeps them for the next processes.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import operator
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
from itertools import repeat
from pathlib import Path

from thunder.options import C_COMPILER
from thunder.runtime import disk_cache

GONE = (AttributeError, LookupError, ValueError)  # raised where there is no value; the last by an empty cell


def entries_are(tables: tuple, keys: tuple, expected: list) -> bool:
    """Whether each table holds the expected object under its key."""
    try:
        return all(map(operator.is_, map(operator.getitem, tables, keys), expected))
    except GONE:
        return False


def holds(table: dict, keys: tuple, expected: list, missing) -> bool:
    """Whether one table holds the expected objects under these keys: `missing` for none."""
    return all(map(operator.is_, map(table.get, keys, repeat(missing)), expected))


def attributes_are(objects: tuple, names: tuple, expected: list) -> bool:
    try:
        return all(map(operator.is_, map(getattr, objects, names), expected))
    except GONE:
        return False


def types_are(objects: tuple, expected: list) -> bool:
    return all(map(operator.is_, map(type, objects), expected))


def none_in(tables: tuple, keys: tuple) -> bool:
    """Whether no table has its key."""
    return True not in map(operator.contains, tables, keys)


def read_entries(tables: tuple, keys: tuple, missing) -> tuple:
    """The values of tables under their keys, `missing` where there is none."""
    try:
        return tuple(map(operator.getitem, tables, keys))
    except GONE:
        return tuple(table.get(key, missing) for table, key in zip(tables, keys, strict=True))


def keys_are(table: dict, expected: tuple) -> bool:
    """Whether a dict has these keys, texts, in this order."""
    return tuple(table) == expected


def any_filled(containers: list) -> bool:
    """Whether one of many containers is not empty."""
    return any(containers)


FUNCTIONS = (entries_are, holds, attributes_are, types_are, none_in, read_entries, keys_are, any_filled)


# ---------------------------------------------------------------- compiled

_SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def prepare() -> None:
    """Puts the compiled functions in the place of those above, where this machine has them. Where it could, a thread
    begins to build them."""
    compiler = C_COMPILER.value or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name != "posix" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return
    key = disk_cache.key_of("passes", _SOURCE.read_bytes(), sys.version, compiler)
    files = disk_cache.load(key)
    if files is not None:
        _use(files[1])
    else:  # no daemon: a short program would never finish it
        threading.Thread(target=_build, args=(compiler, key), name="thunder_passes").start()


def _build(compiler: str, key: str) -> None:
    library = build(compiler)
    if library is not None:
        _use(disk_cache.store(key, {}, library))


def build(compiler: str) -> bytes | None:
    """The shared library that a C compiler makes of the functions, None where it cannot."""
    with disk_cache.scratch_directory() as directory:
        library = Path(directory, "passes.so")
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        options = ["-O2", "-fPIC", *shared, f"-I{sysconfig.get_path('include')}"]
        try:
            subprocess.run([compiler, *options, _SOURCE, "-o", library], check=True, capture_output=True, timeout=60)
            return library.read_bytes()
        except (OSError, subprocess.SubprocessError):
            return None


def _use(library: Path) -> None:
    module = loaded(library)
    globals().update({f.__name__: getattr(module, f.__name__) for f in FUNCTIONS})


def loaded(library: Path) -> types.ModuleType:
    """The module that a shared library of the functions is."""
    loader = importlib.machinery.ExtensionFileLoader("thunder_passes", str(library))
    specification = importlib.util.spec_from_file_location("thunder_passes", str(library), loader=loader)
    assert specification is not None, "a loader was given"
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module
