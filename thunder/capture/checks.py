"""Functions of prologues that check many facts in one call, and say after a miss which one it was.

The first of them look up many things that stand in objects that stay, and compare identities. Prologues call these as
attributes of this module: where a C compiler and Python's headers are found, those of `checks.c` replace them, which do
the same in a third of the time. A thread builds them when a machine's first program is made, and the disk cache keeps
them for the next processes.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import itertools
import operator
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import torch

from thunder.capture.native import PRIMITIVE
from thunder.capture.world import (
    IDENTITY,
    MISSING,
    TYPE,
    VALUE,
    Question,
    Source,
    expression,
    same_value,
    say,
    spell,
    was_is,
)
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
    key = disk_cache.key_of("checks", _SOURCE.read_bytes(), sys.version, compiler)
    files = disk_cache.load(key)
    if files is not None:
        _use(files[1])
    else:  # no daemon: a short program would never finish it
        threading.Thread(target=_build, args=(compiler, key), name="thunder_checks").start()


def _build(compiler: str, key: str) -> None:
    library = build(compiler)
    if library is not None:
        _use(disk_cache.store(key, {}, library))


def build(compiler: str) -> bytes | None:
    """The shared library that a C compiler makes of the functions, None where it cannot."""
    with disk_cache.scratch_directory() as directory:
        library = Path(directory, "checks.so")
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
    loader = importlib.machinery.ExtensionFileLoader("thunder_checks", str(library))
    specification = importlib.util.spec_from_file_location("thunder_checks", str(library), loader=loader)
    assert specification is not None, "a loader was given"
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module


_VALUES = {*PRIMITIVE, tuple}  # the defaults of a function are a tuple


class Rows:
    """Facts that are checked in one pass, each (container, key, expected, source, question). Called after a miss: the
    reason in words.

    Where a fact is a value, another object of the same type and value is no reason: the answer is None, and the next
    call looks for that object first.
    """

    def __init__(self, rows: list[tuple], get: Callable, parameters: tuple[str, ...]):
        self.containers, self.keys, expected, self.sources, self.questions = zip(*rows, strict=True)
        self.expected, self.get, self.parameters = list(expected), get, parameters

    def __call__(self) -> str | None:
        return self._first(self.containers)

    def of(self, table: dict) -> str | None:
        """The same where all rows are entries of one table that is known only now."""
        return self._first(itertools.repeat(table))

    def _first(self, containers) -> str | None:
        for i, (container, key, want) in enumerate(zip(containers, self.keys, self.expected, strict=False)):
            now = self.get(container, key)
            if now is want:
                continue
            if not (self.questions[i] is VALUE or type(want) in _VALUES) or not same_value(now, want):
                return self.reason(self.sources[i], self.questions[i], want, now)
            self.expected[i] = now
        return None

    def reason(self, source: Source, question: Question, want, now) -> str:
        """In words: the answer to a question about a source was `want` and is `now`."""
        path = source.describe(self.parameters)
        if question is TYPE:
            return TYPE.words.format(path=path, was=say(want), now=say(now))
        if source.step == "attr" and source.key in _FUNCTION_PARTS:
            owner = source.base.describe(self.parameters)
            return f"{_FUNCTION_PARTS[source.key]} of {owner} changed: was {say(want)}, is {say(now)}"
        if want is MISSING:
            return f"{path} exists now"
        if now is MISSING:
            return f"{path} is gone"
        has_value = question is VALUE or type(want) in PRIMITIVE
        if has_value:
            return was_is(path, say(want), now)
        return IDENTITY.words.format(path=path, was=say(want), now=say(now))

    def guards(self, reason: str) -> Iterator[str]:
        """For reading: what the pass compares, each fact as an expression with its value."""
        for source, question, want in zip(self.sources, self.questions, self.expected, strict=True):
            path = expression(source.describe(self.parameters))
            by_value = (question is VALUE or type(want) in _VALUES) and type(want) not in (bool, type(None))
            left = f"type({path})" if question is TYPE else path
            yield f"if {left} {'!=' if by_value else 'is not'} {spell(want)}: return {reason}"


def get(table, key):
    return table.get(key, MISSING)


def attribute(owner, name: str):
    try:
        return getattr(owner, name)
    except GONE:
        return MISSING


_FUNCTION_PARTS = {"__code__": "the code", "__defaults__": "a default argument"}


class Tensors:
    """After a miss: which tensor has changed, and how."""

    def __init__(self, expected: list[tuple[Source, dict]], parameters: tuple[str, ...]):
        self.expected, self.parameters = expected, parameters

    def guards(self, reason: str) -> Iterator[str]:
        """For reading: what the batch compares."""
        for source, was in self.expected:
            path, usual = expression(source.describe(self.parameters)), {"layout": torch.strided}
            sizes = "".join("any, " if n is None else f"{n}, " for n in was["shape"])
            facts = [f"type({path}) is {was['type'].__name__}", f"{path}.shape == ({sizes.rstrip()})"]
            others = {name: value for name, value in was.items() if name not in ("type", "shape")}
            always = ("dtype", "device", "requires_grad")
            facts += [f"{path}.{n} == {spell(v)}" for n, v in others.items() if n in always or v != usual.get(n, False)]
            yield f"if not ({' and '.join(facts)}): return {reason}"

    def __call__(self, values: tuple) -> str | None:
        for (source, was), value in zip(self.expected, values, strict=True):
            path = source.describe(self.parameters)
            if not isinstance(value, torch.Tensor):
                return f"{path} was a tensor, is {say(value)}"
            if type(value) is not was["type"]:
                return f"{path} was a {was['type'].__name__}, is a {type(value).__name__}"
            if len(value.shape) != len(was["shape"]):
                return f"{path} had {len(was['shape'])} dimensions, has {len(value.shape)}"
            for i, (a, b) in enumerate(zip(was["shape"], value.shape, strict=True)):
                if a is not None and a != b:
                    return f"{path}.shape[{i}] was {a}, is {b}"
            for name, now in metadata(value).items():
                if was[name] != now:
                    return f"{path}.{name} was {was[name]}, is {now}"
            if "stride()" in was and was["stride()"] != value.stride():
                return f"{path}.stride() was {was['stride()']}, is {value.stride()}"
        return None  # the batched check wants tensors to be distinct; one tensor in two places is fine


class Distinct:
    """After a miss: which two of n different objects have become one."""

    def __init__(self, sources: list[Source], kind: str, parameters: tuple[str, ...]):
        self.sources, self.kind, self.parameters = sources, kind, parameters

    def __call__(self, values: tuple) -> str:
        first: dict[int, Source] = {}
        for source, value in zip(self.sources, values, strict=True):
            other = first.setdefault(id(value), source)
            if other is not source:
                two = f"{other.describe(self.parameters)} and {source.describe(self.parameters)}"
                return f"{two}, which were two {self.kind}, became one object"
        raise AssertionError("the objects are different ones")


def metadata(tensor: torch.Tensor) -> dict:
    """The properties of tensors that are checked besides class and shape, as people write them."""
    return {
        "dtype": tensor.dtype, "device": tensor.device, "requires_grad": tensor.requires_grad,
        "is_conj()": tensor.is_conj(), "is_neg()": tensor.is_neg(), "is_inference()": tensor.is_inference(),
        "layout": tensor.layout,
    }  # fmt: skip


class Apart:
    """Whether tensors that are written to have memory of their own. Those of modules, which stay where they are, are
    looked at again when one has moved."""

    __slots__ = ("places", "fixed", "fine")

    def __init__(self):
        self.places, self.fixed, self.fine = None, frozenset(), True

    def __call__(self, written_fixed: tuple, written: tuple, fixed: tuple, others: tuple) -> bool:
        places = [*map(torch.Tensor.data_ptr, written_fixed), None, *map(torch.Tensor.data_ptr, fixed)]
        if places != self.places:
            own = [t.untyped_storage().data_ptr() for t in written_fixed if t.numel()]
            self.fixed = frozenset(own)
            self.fine = len(self.fixed) == len(own) and self.fixed.isdisjoint(
                t.untyped_storage().data_ptr() for t in fixed
            )
            self.places = places
        if not self.fine:
            return False
        if not written and not others:
            return True
        own = [t.untyped_storage().data_ptr() for t in written if t.numel()]
        apart = {*own}
        if len(apart) != len(own) or not apart.isdisjoint(self.fixed):
            return False
        rest = {t.untyped_storage().data_ptr() for t in others}
        return rest.isdisjoint(self.fixed) and (
            not apart or rest.isdisjoint(apart) and apart.isdisjoint(t.untyped_storage().data_ptr() for t in fixed)
        )
