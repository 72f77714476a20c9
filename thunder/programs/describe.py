"""Objects as text: what an object is, said so that two processes say the same of objects that mean the same.

`Describer` says it in lists, numbers and strings, as JSON has them. `named` finds what has a name again: in modules
that are imported, by their tables, without running code. An object that has no name and no value (an instance of a
class) is known by its type and by the number of its first mention: where two processes ask the same questions in the
same order, equal numbers mean that it is one object in the one process where it is one in the other.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import enum
import functools
import hashlib
import importlib
import json
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.capture.classes import of_library
from thunder.capture.native import CONTAINERS, IMMUTABLE, slots
from thunder.capture.world import MISSING
from thunder.core.symbol import Symbol
from thunder.interpreter.attributes import cell_value

PLAIN = {type(None), bool, int, str}  # what JSON says as it is
PARTS = 200  # of an object of a library; one that leads to more is not described
_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_NUMBERED = (list, dict, set, torch.nn.Module, types.MappingProxyType, weakref.ref, *CONTAINERS)


class Unspeakable(Exception):
    """An object that text cannot say. The words say which."""


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    """What a code object does, wherever it stands: its instructions, constants and names."""
    parts = (
        [_constant(c) for c in code.co_consts], code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_name,
    )  # fmt: skip
    return digest(b"%d " % len(code.co_code) + code.co_code + code.co_exceptiontable + repr(parts).encode())


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # its order changes with the seed of hashes
        return f"frozenset{sorted(map(_constant, value))}"
    return f"({', '.join(map(_constant, value))})" if type(value) is tuple else f"{type(value).__name__} {value!r}"


def find_named(module: str, path: str) -> Any:
    """What stands in an imported module under a dotted name; MISSING where nothing does. Only tables are read; of
    modules, thunder's own are imported.

    `Class.name#fget` is a part of what stands there: the function of a property, what a decorator wraps.
    """
    if module.startswith("thunder.") and module not in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    value: Any = sys.modules.get(module, MISSING)
    path, *parts = path.split("#")
    for name in path.split("."):
        space = getattr(value, "__dict__", None) if isinstance(value, (types.ModuleType, type)) else None
        value = space.get(name, MISSING) if isinstance(space, (dict, types.MappingProxyType)) else MISSING
    for part in parts:
        value = dict(_parts(value)).get(part, MISSING)
    return value


def _parts(x: Any) -> list[tuple[str, Any]]:
    """The functions inside of a descriptor, of an operation or of a decorated function."""
    parts = [(name, getattr(x, name)) for name in _INSIDE.get(type(x), ())]
    if type(x) in (types.FunctionType, functools._lru_cache_wrapper) and "__wrapped__" in x.__dict__:
        parts.append(("__wrapped__", x.__dict__["__wrapped__"]))
    if type(x) is types.FunctionType and x.__closure__:
        cells = zip(x.__code__.co_freevars, x.__closure__, strict=True)
        parts += [(f"cell {name}", v) for name, cell in cells if type(v := cell_value(cell)) is types.FunctionType]
    return parts


_INSIDE: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"), staticmethod: ("__func__",), classmethod: ("__func__",),
    functools.cached_property: ("func",), Symbol: ("fn",),
}  # fmt: skip


def name_of(x: Any) -> tuple[str, str] | None:
    """The module and the name under which a class or a function is found; None where it is not."""
    module, path = getattr(x, "__module__", None), getattr(x, "__qualname__", getattr(x, "__name__", None))
    if isinstance(x, type):
        module, path = type.__getattribute__(x, "__module__"), type.__getattribute__(x, "__qualname__")
    if type(x) is types.BuiltinFunctionType:  # PyTorch's are methods of a class without a name
        path = x.__name__ if find_named(str(module), x.__name__) is x else path
    if not isinstance(module, str) or not isinstance(path, str) or "#" in path:
        return None
    if isinstance(x, type) and type(x) is type and x in _TYPES_BY_CLASS:  # which builtins does not have
        return "types", _TYPES_BY_CLASS[x]
    level = [(path, find_named(module, path))]
    for _ in range(_WRAPPED):
        for name, value in level:
            if value is x:
                return module, name
        level = [(f"{name}#{part}", inside) for name, value in level for part, inside in _parts(value)]
    return None


_TYPES_BY_CLASS: dict[Any, str] = {v: k for k, v in vars(types).items() if isinstance(v, type)}
_WRAPPED = 6  # decorators around a function


class Describer:
    """Says what objects are. One is used for all questions of a program, in order."""

    def __init__(self):
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._known: dict[int, Any] = {}  # classes and functions are mentioned again and again
        self._rules: dict[type, Callable[[Any], Any]] = {
            float: lambda x: ["float", repr(x)],
            complex: lambda x: ["complex", repr(x)],
            bytes: lambda x: ["bytes", x.hex()],
            type(...): lambda x: ["..."],
            type(NotImplemented): lambda x: ["NotImplemented"],
            type(MISSING): lambda x: ["nothing"],
            tuple: lambda x: ["tuple", *map(self, x)],
            torch.Size: lambda x: ["Size", *map(self, x)],
            frozenset: lambda x: ["frozenset", *sorted(map(self, x), key=json.dumps)],
            slice: lambda x: ["slice", self(x.start), self(x.stop), self(x.step)],
            range: lambda x: ["range", x.start, x.stop, x.step],
            torch.device: lambda x: ["device", str(x)],
            types.ModuleType: self._module,
            types.CodeType: lambda x: ["code", x.co_qualname, code_digest(x)],
            types.FunctionType: self._function,
            types.BuiltinFunctionType: self._builtin,
            types.MethodType: lambda x: ["method", self(x.__func__), self(x.__self__)],
            types.MethodWrapperType: lambda x: ["method wrapper", x.__name__, self(x.__self__)],
            types.GenericAlias: lambda x: ["generic", self(x.__origin__), self(x.__args__)],
            types.UnionType: lambda x: ["union", self(x.__args__)],
            types.CellType: lambda x: ["cell", self.number(x)],
            property: lambda x: ["property", self.number(x), *map(self, (x.fget, x.fset, x.fdel))],
            staticmethod: lambda x: ["staticmethod", self.number(x), self(x.__func__)],
            classmethod: lambda x: ["classmethod", self.number(x), self(x.__func__)],
            functools.partial: lambda x: ["partial", self(x.func), self._data(x.args), self._data(x.keywords)],
            functools._lru_cache_wrapper: lambda x: ["cached", self.number(x), self(x.__wrapped__)],
            contextvars.ContextVar: lambda x: ["context variable", self.number(x), x.name],
            logging.Logger: lambda x: ["logger", x.name],
            object: lambda x: ["object", self(object), self.number(x)],
        }  # fmt: skip

    def __call__(self, x: Any) -> Any:
        """Raises Unspeakable for what text cannot say."""
        t = type(x)
        if t in PLAIN:
            return x
        known = self._known.get(id(x))
        if known is not None:
            return known
        rule = self._rules.get(t)
        if rule is not None:
            return rule(x)
        if issubclass(t, type):
            return self._keep(x, self._class(x))
        if t in _OF_TORCH:
            return ["torch", str(x).removeprefix("torch.")]
        if t in _DESCRIPTORS:
            return ["descriptor", self(x.__objclass__), x.__name__]
        if isinstance(x, enum.Enum) or _is_member(x, t):
            return ["enum", self(t), x.name]
        if isinstance(x, types.ModuleType):
            return self._module(x)
        if isinstance(x, torch.Tensor):
            return ["tensor", self(t), self.number(x)]
        if isinstance(x, IMMUTABLE):
            return ["value", self(t), repr(x)]
        if isinstance(x, (compat.OpOverload, compat.OpOverloadPacket)):
            return ["operator", self(t), str(x)]
        return self._object(x, t)

    def number(self, x: Any) -> int:
        """The number of an object's first mention."""
        number = self._numbers.get(id(x))
        if number is None:
            number = self._numbers[id(x)] = len(self._numbers)
            self._alive.append(x)
        return number

    def _keep(self, x: Any, said: list) -> list:
        self._known[id(x)] = said
        self._alive.append(x)
        return said

    def _data(self, x: Any) -> Any:
        """What a partial function is given: a dict is what is in it."""
        if type(x) is dict:
            return ["dict", *([self(k), self._data(v)] for k, v in x.items())]
        return ["tuple", *map(self._data, x)] if type(x) is tuple else self(x)

    def _module(self, x: types.ModuleType) -> list:
        name = getattr(x, "__name__", None)
        return ["module", name] if sys.modules.get(name or "") is x else ["a module", str(name), self.number(x)]

    def _class(self, x: type) -> list:
        name = name_of(x)
        if name is not None:
            return ["class", *name]
        parts = (type.__getattribute__(x, n) for n in ("__module__", "__qualname__"))
        return ["a class", *map(str, parts), self.number(x)]

    def _function(self, x: types.FunctionType) -> list:
        name = name_of(x)
        kind = "function" if name is not None else "a function"
        named = name or (str(x.__module__), x.__qualname__)
        number = () if name is not None else (self.number(x),)
        return self._keep(x, [kind, *named, code_digest(x.__code__), *number])

    def _builtin(self, x: types.BuiltinFunctionType) -> list:
        name = name_of(x)
        if name is not None:
            return ["builtin", *name]
        owner = x.__self__
        return ["builtin of", None if owner is None else self(owner), x.__name__]

    def _object(self, x: Any, t: type) -> list:
        seen, said = id(x) in self._numbers, ["object", self(t), self.number(x)]
        # what a program knows of objects of the user's classes, of modules and of containers, it has asked
        if seen or isinstance(x, _NUMBERED) or not of_library(t):
            return said
        if _too_large(x):
            raise Unspeakable(
                f"it depends on an object of {t.__module__}.{t.__qualname__}, which refers to too many others"
            )
        return [*said, *self._contents(x, t)]

    def _contents(self, x: Any, t: type) -> list:
        """What is in an object of a library, which capture does not ask for."""
        own = getattr(x, "__dict__", None)
        names = [n for n in dict.fromkeys(slots(t)) if n not in ("__dict__", "__weakref__")]
        if isinstance(own, dict) or names:
            held = {n: object.__getattribute__(x, n) for n in names if _has(x, n)} | (own or {})
            return [[str(n), self(held[n])] for n in sorted(held, key=str)]
        try:
            reduced = copyreg.dispatch_table[t](x) if t in copyreg.dispatch_table else x.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 - whatever a library's object raises
            raise Unspeakable(
                f"it depends on an object of {t.__module__}.{t.__qualname__}, whose content cannot be compared"
            ) from None
        return [self(part) for part in reduced] if isinstance(reduced, tuple) else [str(reduced)]


def _too_large(x: Any) -> bool:
    pending, seen = [x], {id(x)}
    while pending and len(seen) <= PARTS:
        value = pending.pop()
        inside = [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, type) else []
        inside += value if isinstance(value, (tuple, list)) else []
        new = [v for v in inside if id(v) not in seen and not isinstance(v, (type, types.ModuleType))]
        seen.update(map(id, new))
        pending += new
    return len(seen) > PARTS


def _is_member(x: Any, t: type) -> bool:
    """Whether a value is one of an enumeration of C++."""
    members = t.__dict__.get("__members__") if t.__module__.startswith("torch.") else None
    return members is not None and getattr(x, "name", None) in getattr(t, "__members__", ())


def _has(x: Any, name: str) -> bool:
    try:
        object.__getattribute__(x, name)
    except AttributeError:
        return False
    return True


def named(said: Any) -> Any:
    """The object that a description says in full; MISSING where nothing like it is found here. Runs no code of
    anybody's."""
    if not isinstance(said, list):
        return said
    kind, *parts = said
    make = _MAKERS.get(kind)
    if make is None:
        return MISSING
    try:
        return make(*parts)
    except (AttributeError, KeyError, LookupError, RuntimeError, TypeError, ValueError):
        return MISSING


def _all(make: Callable) -> Callable:
    """Makes something of parts that are all found."""

    def rebuilt(*parts):
        values = [named(part) for part in parts]
        return MISSING if any(x is MISSING for x in values) else make(values)

    return rebuilt


def _torch_constant(name: str) -> Any:
    value = torch.__dict__.get(name, MISSING)
    return value if type(value) in _OF_TORCH else MISSING


def _a_number(number: float, kind: str) -> torch.Tensor:
    return torch.tensor(number, dtype=_torch_constant(kind.removeprefix("torch.")))


def _a_class(module: str, path: str) -> Any:
    value = find_named(module, path)
    return value if isinstance(value, type) else MISSING


def _a_function(module: str, path: str, code: str) -> Any:
    value = find_named(module, path)
    return value if type(value) is types.FunctionType and code_digest(value.__code__) == code else MISSING


def _a_builtin(module: str, path: str) -> Any:
    value = find_named(module, path)
    return value if type(value) is types.BuiltinFunctionType else MISSING


def _of_builtin(owner: Any, name: str) -> Any:
    owner = named(owner)
    if not isinstance(owner, type):
        return MISSING
    value = type.__getattribute__(owner, name)
    return value if type(value) is types.BuiltinFunctionType else MISSING


def _a_descriptor(owner: Any, name: str) -> Any:
    owner = named(owner)
    value = vars(owner).get(name, MISSING) if isinstance(owner, type) else MISSING
    return value if type(value) in _DESCRIPTORS else MISSING


def _a_member(kind: Any, name: str) -> Any:
    kind = named(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    return kind.__members__[name] if kind.__module__.startswith("torch.") else MISSING


def _a_module(name: str) -> Any:
    module = sys.modules.get(name, MISSING)
    return module if isinstance(module, types.ModuleType) else MISSING


def _a_dict(*items: Any) -> Any:
    table = {named(k): named(v) for k, v in items}
    return MISSING if any(v is MISSING for v in table.values()) else table


def _cache_of(wrapped: Any) -> Any:
    """The function behind functools.lru_cache, found where what it wraps is named."""
    inside = named(wrapped)
    cached = find_named(wrapped[1], wrapped[2].removesuffix("#__wrapped__")) if inside is not MISSING else MISSING
    return cached if type(cached) is functools._lru_cache_wrapper and cached.__wrapped__ is inside else MISSING


def _a_partial(function: Any, args: Any, keywords: Any) -> Any:
    function = named(function)
    known = isinstance(function, (types.FunctionType, functools._lru_cache_wrapper))
    return functools.partial(function, *named(args), **named(keywords)) if known else MISSING


_MAKERS: dict[str, Callable] = {
    "float": float, "complex": complex, "bytes": bytes.fromhex, "...": lambda: ..., "nothing": lambda: MISSING,
    "NotImplemented": lambda: NotImplemented,
    "tuple": _all(tuple), "Size": _all(torch.Size), "frozenset": _all(frozenset), "slice": _all(lambda x: slice(*x)),
    "range": range, "device": torch.device, "torch": _torch_constant, "module": _a_module, "class": _a_class,
    "function": _a_function, "builtin": _a_builtin, "builtin of": _of_builtin, "descriptor": _a_descriptor,
    "logger": lambda name: logging.root.manager.loggerDict.get(name, MISSING), "enum": _a_member, "dict": _a_dict,
    "partial": _a_partial, "cached": lambda number, wrapped: _cache_of(wrapped), "number": _a_number,
}  # fmt: skip
