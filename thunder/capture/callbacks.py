"""Python code of the user's that native code would call: the call is refused.

Native code reaches the special methods of its arguments. Capture would not see the code that it runs there, and effects
would happen while the program is captured. Where it sorts or maps, that comes back to the machine
(`interpreter/standins.py`); keys that are hashed are asked by the machine.
"""

from __future__ import annotations

import collections
import functools
import random
import types
import weakref
from typing import NoReturn

import numpy

from thunder.capture.interface import Capture
from thunder.capture.native import MUTABLE, PRIMITIVE, in_library, slots
from thunder.capture.policy import folded, is_library
from thunder.capture.world import KEYS
from thunder.core.proxies import TensorProxy
from thunder.interpreter import NULL, decode, standins
from thunder.interpreter.attributes import BUILTINS, NATIVE_METHODS, parts_of, plain_attribute

_KINDS = {type, types.ModuleType, types.FunctionType}


def called_in(c: Capture, kind: type, f=None) -> str:
    """A special method of a class that the user wrote in Python and that native code `f` may call, or ""."""
    methods = c.known.called_in.get(kind)
    if methods is None:
        methods = c.known.called_in[kind] = _called_in(c, kind)
    if not methods or f is None:
        return next(iter(methods.values()), "")
    names = _names(f)
    return next((methods[n] for n in methods if names is None or n in names), "")


def check_functions(c: Capture, f, values) -> None:
    """Native code `f` is given values, and may call those that run Python code of the user's."""
    names = _names(f)
    if (names is None or "__call__" in names) and any(map(runs_python, values)):
        shown = plain_attribute(f, "__qualname__", f)
        c.refuse(f"{shown} is native code that may call a function, which thunder would not see", _REMEDY)


def copies(f) -> bool:
    """Whether native code `f` may copy or pickle what it is given, as no method of a container does."""
    names, owner = _names(f), _owner(f)
    if names is None:
        return not (isinstance(owner, type) and issubclass(owner, (tuple, *MUTABLE)))
    return _COPIED[0] in names


def _names(f):
    """The special methods that native code may call of its arguments; None for any."""
    names = folded(f).methods
    owner = f if isinstance(f, type) else _owner(f)
    if names is not None or owner is None:
        return names
    if owner in (object, type):
        return _OBJECTS_OWN.get(f.__name__, ())
    return _NOT_CALLED if issubclass(owner, _KEEPERS) else _of_builtins(owner, f.__name__)


def runs_python(f) -> bool:
    """Whether a call of a function or a method runs Python code of the user's."""
    while type(f) in (types.MethodType, functools.partial):
        f = f.__func__ if type(f) is types.MethodType else f.func
    return type(f) is types.FunctionType and _of_users(f)


def _owner(f):
    """The class that a method in C belongs to: `super()` may have passed over methods of the same name."""
    owner = plain_attribute(f, "__self__")
    if type(f) in BUILTINS and not isinstance(owner, (types.ModuleType, types.NoneType, type)):
        for base in type(owner).__mro__:
            method = base.__dict__.get(f.__name__)
            if method is not None and type(method) in NATIVE_METHODS and method.__get__(owner, type(owner)) == f:
                return base
    return plain_attribute(f, "__objclass__")


def reached(c: Capture, f, args, kwargs) -> bool:
    """Whether native code `f` would find, in containers, an object whose special methods the user wrote."""
    return any(called_in(c, type(v), f) for v in parts_of(*args, *kwargs.values()))


_COPIED = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
_NOT_CALLED = standins.CALLED - {"__call__"}
# they keep a function that they are given
_KEEPERS = (
    staticmethod, classmethod, property, functools._lru_cache_wrapper, types.GetSetDescriptorType,
    types.MemberDescriptorType,
)  # fmt: skip
# slots of object and type -> the methods that they call of their argument
_OBJECTS_OWN = {
    "__str__": ("__repr__",), "__format__": ("__str__", "__repr__"), "__ne__": ("__eq__",), "__dir__": _NOT_CALLED,
    "__reduce__": _COPIED, "__reduce_ex__": _COPIED, "__getattribute__": _NOT_CALLED, "__setattr__": _NOT_CALLED,
    "__delattr__": _NOT_CALLED, "__getstate__": _NOT_CALLED, "__call__": _NOT_CALLED,
    "__instancecheck__": ("__getattribute__",), "__subclasscheck__": ("__getattribute__",),
}  # fmt: skip


def _of_builtins(owner: type, name: str) -> tuple | None:
    """The methods that a slot of a builtin class calls of its operands: of most it looks at nothing but the class."""
    if (
        owner in _NUMBERS_OWN
        and name != "__format__"
        or owner in (str, bytes)
        and name in _BY_CLASS
        or owner in _SEQUENCES
        and name in ("__len__", "__iter__", "__add__")
    ):
        return ()
    if issubclass(owner, dict) and name in _OF_KEYS:
        return ()  # `check_hashed` sees the keys
    if name in ("index", "count", "remove"):
        return ("__eq__",)
    if issubclass(owner, set):
        return _COPIED if name == "__reduce__" else ()  # likewise the elements
    return ("__index__",) if owner in _SEQUENCES and name in ("__mul__", "__rmul__", "__getitem__") else None


_NUMBERS_OWN = (int, float, complex, bool)
_SEQUENCES = (list, tuple, str, bytes)
# methods of dicts that hash and compare keys, and call nothing of values
_OF_KEYS = frozenset(("__contains__", "__getitem__", "__delitem__", "__len__", "__iter__", "get", "pop", "setdefault"))
_BY_CLASS = standins.CALLED - {"__format__", "__contains__", "__getitem__", "__mul__", "__rmul__", "__mod__"}


def _called_in(c: Capture, kind: type) -> dict[str, str]:
    if kind in PRIMITIVE or kind in _KINDS or _of_library(kind.__module__):
        return {}
    methods: dict[str, str] = {}
    for base in kind.__mro__:
        for name in standins.CALLED & base.__dict__.keys():
            method = base.__dict__[name]
            if type(method) is types.FunctionType and not _of_library(method.__globals__.get("__name__")):
                methods.setdefault(name, f"{base.__qualname__}.{name}")
    return methods


def check_given(c: Capture, value, caller) -> None:
    """Native code is given an object, and may call its methods: the program depends on those that its class does not
    have."""
    kind = type(value)
    if called_in(c, kind, caller):
        refuse(c, value, caller)
    if issubclass(kind, _STATEFUL) and id(value) in c.world.sources:
        c.refuse(f"native code is given a {kind.__name__}, whose state is not watched", "call its methods")
    for base in kind.__mro__[:-1] if kind not in PRIMITIVE and kind not in _KINDS else ():
        if not _of_library(base.__module__):
            c.world.ask(c.world.const(base, base.__qualname__).attr("__dict__"), KEYS)


_REMEDY = "write this part in Python, or call it outside of the compiled function"
_STATEFUL = (random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)


def _of_library(module) -> bool:
    """Whether code of a module is taken to have no effects where native code calls it."""
    return in_library(module) or isinstance(module, str) and is_library(module)


def refuse(c: Capture, value, caller):
    """caller: native code, a callable or in words."""
    name, shown = called_in(c, type(value), caller), plain_attribute(caller, "__qualname__", caller)
    c.refuse(
        f"{shown} is native code that may call {name}, which thunder would not see",
        _REMEDY,
    )


# ---------------------------------------------------------------- hash tables

# instructions that write nothing and make nothing that can be changed
_LOOKS = {
    "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_GLOBAL_CALLABLE", "LOAD_DEREF", "COPY_FREE_VARS",
    "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "SUBSCRIPT", "COMPARE", "CONTAINS_OP", "IS_OP", "NOT", "TO_BOOL", "JUMP",
    "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "JUMP_IF_TRUE_OR_POP",
    "JUMP_IF_FALSE_OR_POP", "PUSH_NULL", "POP_TOP", "COPY", "SWAP", "CALL", "RETURN_VALUE", "RAISE_VARARGS",
    "FORMAT_VALUE", "BUILD_STRING",
}  # fmt: skip
_PURE_CALLS = {"hash", "isinstance", "type", "len", "tuple", "frozenset", "id", "str", "repr", "int", "bool", "super"}


def check_hashed(c: Capture, keys, others=()) -> None:
    """Keys are about to be hashed, and compared with others, by native code. A method of the user's is interpreted for
    its questions; where it might do something besides, the call is refused."""
    kinds = {kind for kind in set(map(type, others)) if issubclass(kind, _ASKED_BY_PARTS) or called_in(c, kind)}
    beside = [k for k in others if type(k) in kinds] if kinds else ()
    hashed_keys = [k for k in parts_of(*keys, *beside) if _hashed_in_python(c, k)]
    for k in hashed_keys:
        _interpret_hash(c, k)
    alike = collections.defaultdict(list)
    for k in (*keys, *others) if hashed_keys else ():
        alike[_hash(k)].append(k)
    for k in hashed_keys:
        for other in alike[hash(k)]:
            if other is not k:
                c.truth(c.compare("==", k, other))


_ASKED_BY_PARTS = tuple, frozenset, weakref.ref


def _hash(k):
    try:
        return hash(k)
    except TypeError:
        return None


def _hashed_in_python(c: Capture, k) -> bool:
    """Whether a method of the user's hashes or compares a key. Raises CaptureError where it might do something else."""
    if isinstance(k, weakref.ref):  # as its object
        return type(k()) is TensorProxy or _hashed_in_python(c, k())
    if not called_in(c, type(k)):
        return False
    methods = _hash_methods(c, k)
    hashing = c.slot(type(k), "__hash__")
    if c.effects.names(k) and methods:
        _refuse_hash(c, k)
    if not all(is_pure(m) or m is hashing and _only_remembers(c, k, m) for m in methods):
        _refuse_hash(c, k)
    return bool(methods)


def _hash_methods(c: Capture, k) -> list[types.FunctionType]:
    return [m for n in ("__hash__", "__eq__") if (m := c.slot(type(k), n)) is not None and _of_users(m)]


def _refuse_hash(c: Capture, k) -> NoReturn:
    methods = _hash_methods(c, k)
    name = plain_attribute(next((m for m in methods if not is_pure(m)), methods[0]), "__qualname__")
    c.refuse(f"a hash table is native code that may call {name}, which thunder would not see", _REMEDY)


def _interpret_hash(c: Capture, k) -> None:
    """Where the method keeps the hash in an attribute, it runs until it writes nothing more: native code repeats that
    run."""
    c.call(hash, [k], {})
    if all(map(is_pure, _hash_methods(c, k))):
        return
    attributes = _attributes(k)
    c.call(hash, [k], {})
    if c.effects.names(k) or _attributes(k) != attributes:
        _refuse_hash(c, k)


def _attributes(k) -> dict[str, int]:
    """The identities of an object's attributes."""
    in_slots = ((name, plain_attribute(k, name, NULL)) for name in slots(type(k)))
    return {name: id(value) for name, value in (*(plain_attribute(k, "__dict__") or {}).items(), *in_slots)}


def _only_remembers(c: Capture, k, method) -> bool:
    """Whether a method of `k` does nothing but look, and write attributes of `k`."""
    program = [(handler.__name__, argument) for handler, argument in decode(method.__code__).program]
    itself = "LOAD_FAST", method.__code__.co_varnames[0] if method.__code__.co_argcount else ""
    if not only_looks(method, "STORE_ATTR", *_OF_PURE) or ("STORE_FAST", itself[1]) in program:
        return False

    def is_allowed(i: int, name: str, argument) -> bool:
        if name == "STORE_ATTR":
            return program[i - 1] == itself
        if name == "LOAD_METHOD":
            if program[i - 1] == ("LOAD_GLOBAL", "object") and argument == "__setattr__":
                return program[i + 1] == itself
            in_c = type(c.slot(type(k), argument)) is not types.FunctionType
            return program[i - 1] == itself and argument in ("items", "keys", "values") and in_c
        return _is_pure_instruction(name, argument)

    return all(is_allowed(i, *instruction) for i, instruction in enumerate(program))


def _of_users(method) -> bool:
    return not _of_library(method.__globals__.get("__name__"))


def only_looks(function, *others: str) -> bool:
    """Whether a function's own instructions write nothing and make nothing that can be changed, but for `others`."""
    return {h.__name__ for h, _ in decode(function.__code__).program} <= _LOOKS.union(others)


def is_pure(method) -> bool:
    """Whether a function only looks at attributes and compares them."""
    program = [(handler.__name__, argument) for handler, argument in decode(method.__code__).program]
    return only_looks(method, *_OF_PURE) and all(_is_pure_instruction(*instruction) for instruction in program)


_OF_PURE = "BUILD_TUPLE", "BINARY"


def _is_pure_instruction(name: str, argument) -> bool:
    if name == "LOAD_GLOBAL_CALLABLE":
        return argument in _PURE_CALLS
    return name not in ("LOAD_METHOD", "LOAD_SUPER") and not (name == "BINARY" and argument[1].endswith("="))
