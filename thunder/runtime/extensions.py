"""The extension in C++ (`native/`), which this machine's compiler builds once, kept on disk by content.

It runs the host side of warm calls without Python: the key of modes, the check of many tensors, and launch
loops. Compiling takes 15 s of a processor, so that a process with the least priority does it, when a program
has many tensors or was called a few times; programs load it when it is there. Without a compiler, or where it fails,
Python and PyTorch do the same.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import types
from pathlib import Path

import torch

import thunder.compat.batch_checks
import thunder.compat.modes
from thunder.options import CXX_COMPILER, cache_directory, environment_of_children
from thunder.runtime import disk_cache

MANY = 64  # tensors of a program for which the extension is built
_NAME = "thunder_native"
_SOURCES = Path(__file__).with_name("native")
_PATIENCE = 600  # seconds after which a build that has left nothing is taken for dead


_known: list[types.ModuleType | None] = []  # the extension, or that there will be none; empty while it is built


def loaded_extension() -> types.ModuleType | None:
    """The extension, where a process has built it. Where none has, a process begins to, and later calls look again."""
    if not _known:
        _look()
    return _known[0] if _known else None


def is_awaited() -> bool:
    """Whether a later call of `loaded_extension` may return what this one did not."""
    return not _known


def _look() -> None:
    """Loads the native extension from the disk cache, or begins to build it."""
    compiler = _compiler()
    if compiler is None:
        _known.append(None)
    elif (stored := disk_cache.load(_key(compiler))) is None:
        _begin(compiler)
    elif stored[0].get("failed"):
        _known.append(None)
    else:
        module = loaded(stored[1])
        thunder.compat.batch_checks.compiled = module.check_of
        thunder.compat.modes.compile_modes_key(module.modes_key_of)
        _known.append(module)


def _compiler() -> str | None:
    if not sys.platform.startswith("linux") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    return shutil.which(CXX_COMPILER.value or "g++") or shutil.which("clang++")


@functools.cache
def _key(compiler: str) -> str:
    return disk_cache.key_of(_NAME, *_source(), sys.version, torch.__version__, torch.__file__, compiler)


def _source() -> list[bytes]:
    return [file.read_bytes() for file in sorted(_SOURCES.iterdir()) if file.suffix in (".h", ".cpp")]


def _begin(compiler: str) -> None:
    """Starts the process that builds, which outlives this one; none where another one is at it."""
    if not _claimed(_key(compiler)):
        return
    command = [sys.executable, "-m", __name__, compiler]
    detached = ["/bin/sh", "-c", 'nice -n 19 "$@" >/dev/null 2>&1 </dev/null &', "sh", *command]
    try:
        subprocess.run(detached, env=environment_of_children(), start_new_session=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return


def _claimed(key: str) -> bool:
    path = cache_directory() / f"{key}.building"
    try:
        if path.exists() and time.time() - path.stat().st_mtime > _PATIENCE:
            path.unlink()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True


def build(compiler: str) -> bytes | None:
    """The shared library; None where the compiler makes none."""
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", "-w", *(f"-I{folder}" for folder in folders)]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    with disk_cache.scratch_directory() as directory:
        library = Path(directory, "library.so")
        try:
            command = [compiler, *flags, abi, str(_SOURCES / "module.cpp"), "-o", str(library), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
            return library.read_bytes()
        except (OSError, subprocess.SubprocessError):
            return None


def loaded(library: Path) -> types.ModuleType:
    """The module that a shared library is."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    specification = importlib.util.spec_from_file_location(_NAME, str(library), loader=loader)
    assert specification is not None, "a loader was given"
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module


def main(compiler: str) -> None:
    """Builds the library and leaves it, or that it cannot be built, on disk."""
    key = _key(compiler)
    try:
        library = build(compiler)
        disk_cache.store(key, {"failed": library is None}, library or b"-")
    finally:
        (cache_directory() / f"{key}.building").unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
