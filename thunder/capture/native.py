"""Tables: which code runs natively during capture, and which values need no tracking."""

from __future__ import annotations

import array
import ast
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import os
import pathlib
import string
import sys
import threading
import types
import typing
import weakref
from typing import Any

import numpy
import torch
import torch.utils.checkpoint

from thunder.compat.names import READ_MODULES
from thunder.interpreter import NULL
from thunder.interpreter.attributes import BUILTINS, plain_attribute, type_attribute

# values that are compared by value and never tracked
PRIMITIVE = {
    int, float, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.Size,
        torch.memory_format, torch.layout, range, slice,
    type(NotImplemented),
}  # fmt: skip
# values that are compared by identity
IDENTICAL = {
    types.FunctionType, *BUILTINS, types.ModuleType, type, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType,
    types.GenericAlias, types.UnionType, functools._lru_cache_wrapper, object, torch.Generator,
}  # fmt: skip
CONTAINERS = {list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter}


def container_base(kind: type) -> Any:
    """The builtin container that a class is, or derives from."""
    if kind in _BUILTIN:
        return kind
    return next(
        (base for base in (collections.OrderedDict, dict, list, set, collections.deque) if issubclass(kind, base)), None
    )


_BUILTIN = {list, dict, set, collections.OrderedDict, collections.deque}


def plain_base(kind: type) -> Any:
    """The builtin type of numbers or text that a class is, or derives from."""
    return next((base for base in (int, float, complex, str, bytes) if issubclass(kind, base)), None)


def slots(kind: type) -> list[str]:
    """The names of the slots of a class and its bases."""
    names = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"
        for n in (own,) if isinstance(own, str) else own:
            if not n.startswith("__"):
                names.append(n)
            elif not n.endswith("__"):
                names.append(private + n)
    return names


# compared by value, like numbers
IMMUTABLE = (
    numpy.generic, pathlib.PurePath, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.timedelta, datetime.timezone,
    typing.ParamSpecArgs, typing.ParamSpecKwargs,  # made anew for whoever asks
)  # fmt: skip

# Python code of these packages runs natively unless it gets a tracked object or a function of the user's
_NATIVE = {
    "typing", "inspect", "re", "logging", "warnings", "functools", "abc", "enum", "importlib",
    "types", "math", "torch", "numpy", "operator",
    "threading", "contextvars", "random", "time", "traceback", "linecache", "packaging", "posixpath", "genericpath",
    "typing_extensions", "collections",
    "dataclasses", "builtins", "_thread", "ast", "tokenize", "textwrap", "json", "pathlib", "huggingface_hub",
    "thunder", "itertools", "string", "os", "sys",
    "optree", "contextlib", "numbers", "decimal", "fractions", "heapq", "bisect", "io", "codecs", "tempfile",
    "pickle",
}  # fmt: skip
_INTERPRETED = (
    "torch.nn.modules", "torch.nn.functional", "torch.functional", "torch.utils.checkpoint",
    "torch.nn.utils.parametrize", "contextlib",
    "thunder.tests", "torch.nn.utils.rnn", "torch.nn.init", "torch.nn.attention", "torch.distributions", "torch.random",
    "torch.signal", "torch.optim",
    "torch.nn.utils.clip_grad", "torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler", *READ_MODULES,
)  # fmt: skip


@functools.cache
def native_module(name: str | None) -> bool:
    """Whether functions of a module are library code that runs natively by default."""
    if name is None:
        return False
    return name.split(".")[0] in _NATIVE and not name.startswith(_INTERPRETED)


def class_of_library(kind: type) -> bool:
    """Whether a class is one of library code that runs natively. A class that Python's own code has made of a user's
    says that it stands there."""
    module = kind.__module__
    if module in ("abc", "types"):
        return vars(sys.modules[module]).get(kind.__qualname__) is kind
    return native_module(module)


@functools.cache
def read_of_library(name: str | None) -> bool:
    """Whether functions of a module are the standard library's, and are read as the user's are, but for those that may
    wait for what the program does later."""
    top = (name or "").split(".")[0]
    return top in sys.stdlib_module_names and top not in _WAITING and not native_module(name)


_WAITING = {"queue", "concurrent", "asyncio", "sched"}


KNOWN: set = set()  # code of functions of the standard library, and classes, whose calls are one host call each


def is_known(c, what: Any) -> bool:
    """Whether calls of a class, or of functions of this code, run as a whole: in all programs, or in this one."""
    return what in KNOWN or what in c.whole


def learn_class(c, cls: type, known: set, made_here: bool = False) -> bool:
    """Whether calls of a class of the standard library run as a whole from now on, and did not. made_here: since the
    call of the class nothing has run on the host. Otherwise it is one host call more than before, where others were
    counted: none may have had an effect, and no other path counts them."""
    module = cls.__module__
    if not isinstance(module, str) or module.split(".")[0] not in sys.stdlib_module_names or is_known(c, cls):
        return False
    if module == "builtins" or not made_here and (c.path.log.effects or c.path.expected):
        return False
    known.add(cls)
    c.path.needs_whole = True
    return True


# outside state that lives in a library object
_TRACKED = {
    type(os.environ), threading.local, types.SimpleNamespace, collections.UserDict, collections.UserList,
    collections.ChainMap, torch.nn.Module,
    BaseException, string.Template,
    contextlib._GeneratorContextManagerBase, contextlib.ExitStack, threading.Condition, threading.Semaphore,
    threading.Event, threading.Barrier, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, ast.AST, io.IOBase.__base__,
}  # fmt: skip


def is_tracked(kind: type) -> bool:
    """Whether objects of a library's class are read like the user's. Their bases say so: an abstract base class would
    ask each class that comes from it."""
    return not _TRACKED.isdisjoint(kind.__mro__)


ITERATING = {
    list, tuple, set, frozenset, zip, enumerate, map, filter, sorted, sum, any, all, min, max, iter, reversed,
    functools.reduce, collections.deque, dict.fromkeys,
}  # fmt: skip
ITERATING |= {str.join, "".join}
# which hand on the elements that they iterate over
_HANDING_ON = {
    itertools.cycle, itertools.islice, itertools.pairwise, itertools.product, itertools.permutations,
    itertools.combinations, itertools.combinations_with_replacement, itertools.zip_longest, itertools.starmap,
    itertools.takewhile, itertools.dropwhile, itertools.filterfalse,
}  # fmt: skip
ITERATING |= _HANDING_ON
# native callables that keep or compare their arguments but never look inside them
HARMLESS = {
    isinstance, issubclass, id, hash, callable, iter, next, zip, enumerate, list, tuple, dict, set, frozenset, reversed,
    collections.OrderedDict, collections.deque,
    repr, types.MethodType, functools.partial, map, filter, functools.reduce,
    object.__new__, __import__, torch.nn.Module.__init__, weakref.ref, type, contextlib.nullcontext,
    itertools.chain, itertools.accumulate, itertools.compress, *_HANDING_ON,
}  # fmt: skip


def among(f, table) -> bool:
    """Whether a callable is one of a table; one that cannot be hashed is in none."""
    try:
        return f in table
    except TypeError:
        return False


def is_iterator(value) -> bool:
    """Whether a value of a library's type is used up by reading it."""
    return type_attribute(type(value), "__next__") is not NULL


BUFFERS = (bytearray, array.array)  # compared by value with a copy
_TABLES = ({}, collections.OrderedDict())
DICT_VIEWS = {type(getattr(table, n)()): n for table in _TABLES for n in ("keys", "values", "items")}
_CHANGING = {"random", "_random", "time", "secrets", "uuid", "numpy.random"}  # give another value at each call
_CHANGING_FUNCTIONS = {
    ("datetime", "now"), ("datetime", "today"), ("datetime", "utcnow"), ("posix", "urandom"), ("posix", "getrandom"),
}  # fmt: skip
# of the process
_OUTSIDE = {
    "posix", "nt", "_io", "io", "tempfile", "shutil", "glob", "subprocess", "socket", "_socket", "select", "signal",
}  # fmt: skip
# but these
_INSIDE = {
    "fspath", "getpid", "cpu_count", "struct_time", "_path_normpath", "_path_splitroot_ex", "StringIO", "BytesIO",
}  # fmt: skip
_FILES = {  # methods of paths that look at files
    "read_text", "read_bytes", "write_text", "write_bytes", "open", "exists", "is_file", "is_dir", "stat", "lstat",
    "iterdir", "glob", "rglob",
    "mkdir", "unlink", "touch", "rename", "cwd", "home", "resolve",
}  # fmt: skip
_ASKING_FILES = {
    "exists", "lexists", "isfile", "isdir", "islink", "getsize", "getmtime", "getatime", "getctime", "samefile",
}  # fmt: skip
_LOGGED = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
CHANGES = "gives another value at each call"
_ONCE = "runs while the program is captured and not again"


def impure(f) -> str | None:
    """Why one call of `f` at capture is not the same as a call each time, or None."""
    owner = plain_attribute(f, "__self__")
    kind = owner if isinstance(owner, type) else type(owner)
    module = plain_attribute(f, "__module__") or kind.__module__
    reason = _ONCE if f is print or f is input or f is open else _impure(module, plain_attribute(f, "__name__", ""))
    function = plain_attribute(f, "__func__", f)
    if reason is None and type(function) is types.FunctionType:
        reason = _ONCE if _names_system(function.__code__, function.__globals__.get("__name__")) else None
    if reason is None or issubclass(kind, (io.StringIO, io.BytesIO)):
        return None
    return f"{plain_attribute(f, '__qualname__', f)}() {reason}"


@functools.lru_cache(maxsize=1000)
def _impure(module: str, name: str) -> str | None:
    if name in _INSIDE:
        return None
    if module in _CHANGING or module.startswith("numpy.random") or (module, name) in _CHANGING_FUNCTIONS:
        return CHANGES
    if module == "torch.serialization" and name in ("save", "load"):
        return _ONCE
    if module == "logging" and name in _LOGGED:
        return _ONCE
    if module in ("genericpath", "posixpath", "ntpath") and name in _ASKING_FILES:
        return _ONCE
    if module in _OUTSIDE or module.startswith("pathlib") and name in _FILES:
        return _ONCE
    return None


@functools.lru_cache(maxsize=1000)
def _names_system(code: types.CodeType, module: str | None) -> bool:
    """Whether a function of the standard library names, in its code or in that of functions beside it, one that works
    with the operating system. It is known by its code: a closure would stay alive here."""
    if module is None or not native_module(module) or module.split(".")[0] not in sys.stdlib_module_names:
        return False
    own = vars(type(os.environ)).get(code.co_name)
    if getattr(own, "__code__", None) is code or module not in sys.modules:  # whose items capture watches
        return False
    space, pending, seen = vars(sys.modules[module]), [code], set[Any]()
    while pending:
        names = pending.pop().co_names
        found = [open if n == "open" else space.get(n, sys.modules.get(n)) for n in names]
        found += [vars(v).get(n) for v in found if isinstance(v, types.ModuleType) for n in names]
        if any(v is os.environ for v in found):
            return True
        for v in found:
            if not isinstance(v, (types.BuiltinFunctionType, types.FunctionType, type)) or v in seen:
                continue
            if v is open or _impure(v.__module__ or "", v.__name__) == _ONCE:
                return True
            seen.add(v)
            if isinstance(v, types.FunctionType) and v.__module__ == module:
                pending.append(v.__code__)
    return False


ENUM = enum.Enum
