"""The cache of programs on disk: which file a call looks for, and what is kept of a program that was compiled.

A file's name begins with a hash of all that a program depends on beyond what it asks: the function, the modes of the
call, versions, the machine, options, executors and passes (`metadata`). Of the files of that name, the questions of
each say whether it fits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import os
import platform
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from thunder import version
from thunder.cache.entry import CacheEntry
from thunder.capture import checks
from thunder.errors import CollectiveError, ProgramFileWarning, warn_user
from thunder.extend import FUEL_LEVEL
from thunder.options import CACHE_OPTIONS, KEEP_PROGRAMS, SHARP_EDGES_OPTIONS, JitOptions, compile_option
from thunder.pipeline import PASSES
from thunder.programs import files
from thunder.programs.describe import Describer, Unspeakable, code_digest, digest
from thunder.programs.entry import begins_with, document_of, entry_of, key_of_missing
from thunder.programs.questions import Mismatch
from thunder.programs.regions import LATER, Regions
from thunder.programs.text import Damaged, written_text

KEEP = compile_option(
    "keep_programs", bool, None,
    "programs are kept on disk, and the next process takes them from there in the place of capturing them; "
    "where it is not given, THUNDER_KEEP_PROGRAMS says it",
    owner="programs",
)  # fmt: skip
MOST_PROGRAMS = 64  # programs of one key; what more are made is not kept


def wanted(options: JitOptions) -> bool:
    """Whether programs of a function are looked for on disk, and kept there."""
    option = options.get(KEEP)
    return KEEP_PROGRAMS.value if option is None else option


def prepare(options: JitOptions) -> None:
    """What looking for a program needs of this process and not of a call, before the first call."""
    if wanted(options):
        checks.prepare()
        versions(False)
        importlib.import_module("thunder.compat.autograd")  # which connects programs


# --------------------------------------------------------------------------------------------------------- metadata


def metadata(fn: Any, options: JitOptions, modes: tuple, anywhere: bool = False) -> dict[str, Any]:
    """What a program depends on beyond what it asks, in words. anywhere: in words that other machines find as well.

    Raises Unspeakable where text cannot say it.
    """
    return {
        "function": _function(fn),
        "code": _code(fn),
        "modes": _modes(modes),
        "options": _options(options),
        "versions": dict(versions(anywhere)),
        "machine": dict(machine()),
    }


def key_of(said: dict[str, Any]) -> str:
    return digest(json.dumps(said, sort_keys=True))


def _function(fn: Any) -> str:
    kind = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{kind.__module__}.{kind.__qualname__}"


def _code(fn: Any) -> str:
    """The code of a function is no question of its programs: it is what is compiled."""
    function = getattr(fn, "__func__", fn)
    return code_digest(function.__code__) if type(function) is types.FunctionType else ""


def _modes(modes: tuple) -> str:
    if modes[4] is not None:
        raise Unspeakable("it is called under a torch-function mode")
    before, data_parallel, behind = modes[:5], modes[5], modes[6:]
    if data_parallel is not None:  # how often parameters were placed is of this process
        _, skipped, gathered = data_parallel
        if not isinstance(skipped, bool) or gathered:
            raise Unspeakable("it is called under no_sync")
        data_parallel = (skipped,) if skipped else None
    return json.dumps(Describer()((*before, data_parallel, *behind)))


def _options(options: JitOptions) -> dict[str, str]:
    """The options that a program on disk depends on, as text. Raises Unspeakable for those that a file cannot hold."""
    if options.rules:
        raise Unspeakable("thunder.jit was given rules")
    if options.passes is not PASSES:
        raise Unspeakable("thunder.jit was given a list of passes")
    if options.device is not None:
        raise Unspeakable("it is compiled for a device without data, and never runs")
    if options.cache in (CACHE_OPTIONS.NO_CACHING, CACHE_OPTIONS.SAME_INPUT):
        raise Unspeakable(f"with cache={options.cache.value!r} no guard says whether a program fits")
    for executor in options.executors:
        _check_executor(executor)
    said = {
        name: str(getattr(value := getattr(options, name), "value", value))
        for name in ("cache", "numbers_may_change", "dynamic", "fallback", "disable_torch_autograd", "numerics", "rng",
                     "tiers", "default_executors", "debug")
    }  # fmt: skip
    said["sharp_edges"] = str(options.sharp_edges is SHARP_EDGES_OPTIONS.ERROR)
    other_options = {n: v for n, v in options.compile_options.items() if n != KEEP.name}
    return said | {
        "transforms": str([_transform(t) for t in options.transforms]),
        "executors": str([(e.name, e.version) for e in options.executors]),
        "others": str(sorted(other_options.items())),
    }


def _transform(transform: Any) -> str:
    """A transform of thunder's by its class and its options. Others may do something else in another process."""
    kind, values = type(transform), sorted(vars(transform).items())
    if not kind.__module__.startswith("thunder."):
        raise Unspeakable(
            f"thunder.jit was given the transform {kind.__qualname__}, which is not one of thunder's, and may do "
            "something else in another process: compile without it, or let each process capture the program"
        )
    for name, value in values:
        if not _is_plain(value):
            raise Unspeakable(
                f"the transform {kind.__qualname__} has {name}={value!r}, which is no number, string or tuple of "
                "these: another process could not compare it"
            )
    options = ", ".join([f"{name}={value!r}" for name, value in values])
    return f"{kind.__module__}.{kind.__qualname__}({options})"


def _is_plain(value: Any) -> bool:
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("thunder."):
        return all(map(_is_plain, vars(value).values()))
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def _check_executor(executor: Any) -> None:
    """Raises Unspeakable for an executor with code of a user's, or with fuel."""
    if executor._fuel is not FUEL_LEVEL.UNLIMITED:
        raise Unspeakable(f"the executor {executor.name} stops after a number of regions (its fuel)")
    for implementation in executor.implmap.values():
        for rule in (implementation.checker, implementation.execution_transform, implementation.grad_transform):
            if rule is not None and not (getattr(rule, "__module__", None) or "thunder.").startswith("thunder."):
                raise Unspeakable(
                    f"the executor {executor.name} has an implementation from {rule.__module__}, not from thunder"
                )
    for one in executor.rules:
        if one.is_of_user:
            raise Unspeakable(f"the executor {executor.name} has {one!r}")


@functools.cache
def versions(anywhere: bool) -> tuple:
    return (
        ("thunder", f"{version.VERSION} {_sources(anywhere)}"),
        ("python", f"{platform.python_implementation()} {sys.version}"),
        ("torch", f"{torch.__version__} {torch.version.git_version}"),
        ("numpy", numpy.__version__),
    )


def _sources(anywhere: bool) -> str:
    """A hash of thunder's own files: while it is worked on, its version stays. On one machine it is of their times and
    sizes, since reading them takes a tenth of a small program's first step."""
    root = os.path.dirname(version.__file__)
    hashed = hashlib.sha256(b"" if anywhere else root.encode())
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("__") and name != "tests")
        hashed.update(directory[len(root) :].encode())
        for name in sorted(name for name in names if name.endswith(".py")):
            path = f"{directory}/{name}"
            if anywhere:
                with open(path, "rb", 0) as file:
                    content = file.read()
            else:
                stat = os.stat(path)
                content = b"%d %d" % (stat.st_mtime_ns, stat.st_size)
            hashed.update(name.encode() + content)
    return hashed.hexdigest()[:16]


@functools.cache
def machine() -> tuple:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return (
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("gpus", ", ".join(gpus)),
    )


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what differs between what a program was made for and what is here."""
    lines = []
    for part in sorted({*was, *now}):
        a, b = was.get(part), now.get(part)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += [f"{part}: {n} was {a.get(n)}, is {b.get(n)}" for n in sorted({*a, *b}) if a.get(n) != b.get(n)]
        elif a != b:
            lines.append(f"{part} was {a}, is {b}" if part != "code" else "the code of the function changed")
    return lines


# ------------------------------------------------------------------------------------------------------ find, keep


def find(
    fn: Any,
    options: JitOptions,
    modes: tuple,
    args: tuple,
    kwargs: dict,
    overrides: tuple,
    documents: tuple,
    why: list[str],
    path: tuple = (),
) -> CacheEntry | None:
    """The entry of a program on disk that fits a call; None where there is none. documents: those that the user loaded.
    why: gets, in words, what was wrong with those that were looked at. path: the decisions that it begins with."""
    try:
        said = metadata(fn, options, modes, anywhere=bool(documents))
    except Unspeakable as error:
        why.append(f"programs of it cannot be kept: {error}")
        return None

    def fitting(document: Mapping, file: Path | None = None) -> CacheEntry | None:
        return _fitting(document, modes, fn, args, kwargs, overrides, why, options.transforms, path, file)

    for document in documents:
        if reasons := differences(document["metadata"], said):
            why.append("; ".join(reasons))
        elif (entry := fitting(document)) is not None:
            return entry
    if not wanted(options):
        return None
    said = metadata(fn, options, modes) if documents else said
    key, secret = key_of(said), files.key_of_user()
    for file in sorted(files.directory().glob(f"{key}-*{files.SUFFIX}")) if secret is not None else ():
        document = _read(file, secret) if _version(file) not in _retired else None
        if document is not None and document["metadata"] == said:
            entry = fitting(document, file)
            if entry is not None:
                return entry
    return None


_retired: set = set()  # versions of files whose kernels are not those that this process needs


def _version(path: Path | None) -> tuple | None:
    """Names a file as it is now."""
    try:
        return None if path is None else (str(path), path.stat().st_mtime_ns)
    except OSError:
        return None


def _read(path: Path, secret: bytes) -> Mapping | None:
    try:
        return files.read(path, secret)
    except (Damaged, OSError) as error:
        _warn_of(path, error)
        return None


def _warn_of(path: Path | None, error: Exception) -> None:
    where = "a loaded program" if path is None else str(path)
    _warn_once(f"{where} is not used: {error}. `python -m thunder cache rm` removes files that cannot be used")


def _warn_once(text: str) -> None:
    if not _warned:
        _warned.append(text)
        warn_user(text, ProgramFileWarning)


_warned: list[str] = []


def _fitting(
    document: Mapping, modes: tuple, fn: Any, args: tuple, kwargs: dict, overrides: tuple, why: list[str],
    transforms: tuple, decisions: tuple, path: Path | None = None,
) -> CacheEntry | None:  # fmt: skip
    """The entry of a document that fits a call; None, with the reason in `why` or a warning, where it does not.
    decisions: those that its program begins with."""
    try:
        if not begins_with(document, decisions):
            return None
        return entry_of(document, modes, fn, args, kwargs, overrides, transforms, lambda: _retired.add(_version(path)))
    except CollectiveError:
        raise
    except Mismatch as error:
        why.append(str(error))
    except Exception as error:  # noqa: BLE001 - whatever a file says that no document says
        _warn_of(path, error if isinstance(error, Damaged) else Damaged(f"{type(error).__name__}: {error}"))
    return None


def keep(entry: CacheEntry, fn: Any, options: JitOptions, modes: tuple) -> None:
    """Writes a program whose capture is still open. What cannot be written, or where it cannot, says a file or a
    warning; the program runs all the same."""
    said: dict[str, Any] = {}
    regions = Regions(options)
    try:
        said = metadata(fn, options, modes)
        document = {"metadata": said, **document_of(entry, options, regions)}
    except (Unspeakable, Damaged) as error:
        refused(said or {"function": _function(fn)}, str(error))
        return
    except Exception as error:  # noqa: BLE001 - the program runs all the same
        refused(said or {"function": _function(fn)}, f"writing it raised {type(error).__name__}: {error}")
        return
    differs = json.dumps([document["questions"], document["facts"]["path"]])
    name = f"{key_of(said)}-{digest(differs)[:16]}{files.SUFFIX}"
    kept_program = _OnDisk(document, files.directory() / name, regions)
    if regions.has_kernels:
        LATER.add(kept_program.write_what_is_new)
    else:
        kept_program.write()
    if entry.connection is not None and not entry.connection.names:  # with numbers it may be for some sizes only
        entry.connection.variants.notice = kept_program.add_backward


class _OnDisk:
    """A program that is written, and written again when more of it is known. A thread writes it as well."""

    def __init__(self, document: dict, path: Path, regions: Regions):
        self.document, self.path, self.regions = document, path, regions
        self._lock, self._written = threading.Lock(), ""

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        self.document["regions"] = said = self.regions.said()
        self._written = json.dumps(said)
        _store(self.path, self.document)

    def write_what_is_new(self) -> None:
        with self._lock:
            if json.dumps(self.regions.said()) != self._written:
                self._write()

    def add_backward(self, missing: tuple[int, ...], trace: Any) -> None:
        """Adds the backward for missing cotangents."""
        with self._lock:
            try:
                self.regions.add((trace,))
                text = written_text(trace, self.document["codes"], self.regions.functions)
            except (Unspeakable, Damaged):
                return  # PyTorch differentiates the program in this case
            self.document["without"][key_of_missing(missing)] = text
            if self.regions.has_kernels:
                self._written = ""
            else:
                self._write()


def document_for(compiled: Any, modes: tuple, args: tuple, kwargs: dict, path: tuple = ()) -> tuple[dict, CacheEntry]:
    """The document of the program that a compiled function runs at a call, and its entry. path: its first decisions.
    Raises Unspeakable, Damaged and what capture raises."""
    said = metadata(compiled.fn, compiled.options, modes, anywhere=True)
    none = Regions(compiled.options, allowed=False)

    def document(entry: CacheEntry) -> dict:
        if entry.captured.computation.info.communicates:
            raise Unspeakable("ranks communicate in it: keep_programs=True writes it, and each start loads it")
        return {"metadata": said, **document_of(entry, compiled.options, none)}

    return compiled.with_open_capture(modes, args, kwargs, document, path)


def _store(path: Path, document: Mapping) -> None:
    try:
        key = files.key_of_user(make=True)
        if key is None:
            raise OSError(f"the key that signs them cannot be written to {path.parent.parent}")
        others = path.parent.glob(f"{path.name.partition('-')[0]}-*{files.SUFFIX}")
        if len(list(others)) < MOST_PROGRAMS or path.exists():
            files.write(path, document, key)
    except OSError as error:
        _warn_once(f"programs are not kept: {error}. THUNDER_CACHE_DIR names the directory")


def refused(said: dict[str, Any], reason: str) -> None:
    """Notes for `python -m thunder cache explain` why a program was not kept."""
    path = files.directory() / f"{key_of(said)}{files.REFUSED}"
    try:
        key = files.key_of_user(make=True)
        files.write(path, {"metadata": said, "reason": reason}, key)
    except OSError:
        return  # no program would be kept there either
