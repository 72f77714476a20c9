"""Operators: arithmetic, comparisons, signs and conversions to numbers (Objects/abstract.c, object.c).

Special methods written in Python are interpreted, in CPython's order. Where none takes part, the host's
`native_binary`, `native_compare` or `native_unary` computes.
"""

from __future__ import annotations

import math
import operator
import types
import weakref
from typing import Any, cast

from thunder.interpreter.attributes import call_special, in_python
from thunder.interpreter.binding import of
from thunder.interpreter.instructions import NULL, PLAIN
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS

METHOD_OF = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
COMPARE_METHOD = {"<": "__lt__", "<=": "__le__", "==": "__eq__", "!=": "__ne__", ">": "__gt__", ">=": "__ge__"}
REFLECTED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}
UNARY_METHOD = {"-": "__neg__", "+": "__pos__", "~": "__invert__"}
# Their `+` and `*` are tried after the other operand's reflected method, as CPython does for sequences.
SEQUENCES = (list, tuple, str, bytes, bytearray)


def binary(host, symbol, a, b):
    """`a + b` and `a += b`: the in-place method, then the operands' methods (binary_op1)."""
    plain, shown = symbol.removesuffix("="), {"**": "** or pow()"}.get(symbol, symbol)
    name = METHOD_OF[plain]
    method = host.lookup(type(a), f"__i{name}__") if plain != symbol else NULL
    if in_python(method):
        result = call_special(host, method, a, [b], f"__i{name}__")
        if result is not NotImplemented:
            return result
        if host.lookup(type(a), f"__{name}__") is NULL and host.lookup(type(b), f"__r{name}__") is NULL:
            raise TypeError(f"unsupported operand type(s) for {shown}: '{host.type_name(a)}' and '{host.type_name(b)}'")
        symbol = plain
    if method is not NULL and symbol != plain:
        if in_python(host.lookup(type(b), f"__r{name}__")):
            return host.natively(ARITHMETIC[symbol], a, b)
        return host.native_binary(symbol, a, b)
    if plain == "*" and (_repeats(host, a, b) or _repeats(host, b, a)):
        return host.natively(ARITHMETIC[symbol], a, b)
    return by_methods(host, name, a, b, shown, lambda: host.native_binary(symbol, a, b))


def _repeats(host, sequence, factor) -> bool:
    """Whether a factor of a sequence has methods in Python, which come before the sequence's own way."""
    kind = type(factor)
    methods = ("__index__", "__mul__", "__rmul__") if issubclass(type(sequence), SEQUENCES) else ()
    return any(in_python(host.lookup(kind, name)) for name in methods)


def by_methods(host, name, a, b, shown, natively):
    """`__name__` of a, `__rname__` of b; a subclass's own reflected method comes first."""
    kind_a, kind_b = type(a), type(b)
    forward, reflected = f"__{name}__", f"__r{name}__"
    left, right = host.lookup(kind_a, forward), host.lookup(kind_b, reflected)
    if not in_python(left) and not (kind_a is not kind_b and in_python(right)):
        return natively()
    steps = [(left, a, b, forward)]
    if kind_a is not kind_b:
        steps.append((right, b, a, reflected))
        if derives(kind_b, kind_a) and right is not host.lookup(kind_a, reflected):
            steps.reverse()
        elif (
            issubclass(type(a), SEQUENCES)
            and name == "add"
            and not any(map(in_python, (left, host.lookup(kind_a, reflected))))
        ):
            steps.reverse()  # its own way of adding comes last
    for method, x, y, called in steps:
        if method is not NULL and (result := call_special(host, method, x, [y], called)) is not NotImplemented:
            return result
    if host.computes(a, b):
        return natively()
    raise TypeError(f"unsupported operand type(s) for {shown}: '{host.type_name(a)}' and '{host.type_name(b)}'")


def derives(kind, base) -> bool:
    """PyType_IsSubtype: the metaclass is not asked."""
    return any(k is base for k in type.__dict__["__mro__"].__get__(kind))


def unary(host, symbol, a):
    """`-a`, `+a`, `~a`."""
    name = UNARY_METHOD[symbol]
    method = host.lookup(type(a), name)
    return call_special(host, method, a, [], name) if in_python(method) else host.native_unary(symbol, a)


def compare(host, symbol, a, b):
    """Rich comparison (do_richcompare): a subclass's reflected method, forward, reflected, identity."""
    kind_a, kind_b = type(a), type(b)
    forward, reflected = COMPARE_METHOD[symbol], COMPARE_METHOD[REFLECTED[symbol]]
    if not (_compares_in_python(host, kind_a, forward) or _compares_in_python(host, kind_b, reflected)):
        if (
            symbol in ("==", "!=") and issubclass(type(a), weakref.ref) and issubclass(type(b), weakref.ref)
        ):  # weakref_richcompare
            x, y = host.call(a, [], {}), host.call(b, [], {})
            return host.native_compare(symbol, a, b) if x is None or y is None else host.compare(symbol, x, y)
        return compare_items(host, symbol, a, b) if _by_items(host, symbol, a, b) else host.native_compare(symbol, a, b)
    steps = [(a, forward, b), (b, reflected, a)]
    if kind_a is not kind_b and derives(kind_b, kind_a):
        steps.reverse()
    for x, name, y in steps:
        result = _compare_one(host, x, name, y)
        if result is not NotImplemented:
            return result
    if host.computes(a, b):
        return host.native_compare(symbol, a, b)
    if symbol in ("==", "!="):
        return host.same(a, b) is (symbol == "==")
    raise TypeError(f"{symbol!r} not supported between instances of '{host.type_name(a)}' and '{host.type_name(b)}'")


def _compares_in_python(host, kind, name):
    method = host.lookup(kind, name)
    return in_python(method) or method is object.__ne__ and in_python(host.lookup(kind, "__eq__"))


def _compare_one(host, a, name, b):
    method = host.lookup(type(a), name)
    if method is NULL or method is object.__eq__:
        return NotImplemented
    if method is object.__ne__:  # the opposite of `__eq__`
        result = _compare_one(host, a, "__eq__", b)
        return result if result is NotImplemented else not host.truth(result)
    return call_special(host, method, a, [b], name)


_CONTAINERS = (list, tuple, dict)


def _by_items(host, symbol, a, b) -> bool:
    """Whether two lists, tuples or dicts hold something that compares in Python, or other containers."""
    base = cast(Any, next((c for c in _CONTAINERS if issubclass(type(a), c) and issubclass(type(b), c)), None))
    if base is None or base is dict and symbol not in ("==", "!="):
        return False
    name = COMPARE_METHOD[symbol]
    if host.lookup(type(a), name) is not getattr(base, name) or host.lookup(type(b), name) is not getattr(base, name):
        return False
    items: Any = dict.values if base is dict else base.__iter__
    inside = set(map(type, (*items(a), *items(b)))) - PLAIN
    names = "__eq__", name, COMPARE_METHOD[REFLECTED[symbol]]
    return any(
        issubclass(t, _CONTAINERS) or host.compares(t) or any(in_python(host.lookup(t, n)) for n in names)
        for t in inside
    )


def compare_items(host, symbol, a, b):
    """list_richcompare and dict_equal: items that are one object are equal; the first that are not decide."""
    if issubclass(type(a), dict):
        equal = len(a) == len(b)
        for k, x in [*dict.items(a)]:  # which a comparison may change
            equal = equal and _equal(host, x, dict.get(b, k, NULL))
        return equal is (symbol == "==")
    base = cast(Any, list if issubclass(type(a), list) else tuple)
    n, m = base.__len__(a), base.__len__(b)
    if n != m and symbol in ("==", "!="):
        return symbol == "!="
    for x, y in zip(base.__iter__(a), base.__iter__(b), strict=False):
        if not _equal(host, x, y):
            return symbol == "!=" if symbol in ("==", "!=") else host.compare(symbol, x, y)
    return COMPARISONS[symbol](base.__len__(a), base.__len__(b))  # which a comparison may have changed


def _equal(host, x, y) -> bool:
    return x is y or y is not NULL and host.truth(host.compare("==", x, y))


def by_identity(host, a, b) -> bool:
    """Whether `==` and `!=` of two objects ask for their identity: neither class says anything of its own."""
    return host.lookup(type(a), "__eq__") is object.__eq__ and host.lookup(type(b), "__eq__") is object.__eq__


# ---------------------------------------------------------------- numbers


def index(host, value):
    """operator.index: an int, or a value that the host takes for one."""
    method = host.lookup(type(value), "__index__")
    if not in_python(method) or issubclass(type(value), int):  # which is one, whatever its class says
        return host.native_index(value)
    result = call_special(host, method, value, [], "__index__")
    return result if type(result) is int else host.converted(operator.index, type(value), "__index__", result)


def _number(kind, *names):
    """`int(x)`, `float(x)`, `complex(x)`: by the first special method that the class has."""

    def run(host, function, args, kwargs):
        if kind is complex and len(args) == 1 and issubclass(type(args[0]), str):  # whose methods it does not ask
            args = [str.__str__(args[0])]
        for name in names if len(args) == 1 and not kwargs else ():
            method = host.lookup(type(args[0]), name)
            if in_python(method):
                result = call_special(host, method, args[0], [], name)
                return result if type(result) is kind else host.converted(kind, type(args[0]), name, result)
            if method is not NULL:
                break
        return host.call_native(function, args, kwargs)

    return run


def _through(name):
    """A builtin of one or more arguments that returns the result of one special method of the first."""

    def run(host, function, args, kwargs):
        method = host.lookup(type(args[0]), name) if args and not kwargs else NULL
        if not in_python(method) or method is None:
            return host.call_native(function, args, kwargs)
        return call_special(host, method, args[0], args[1:], name)

    return run


def _hash(host, function, args, kwargs):
    if len(args) == 1 and issubclass(type(args[0]), weakref.ref):
        hashed = host.call(args[0], [], {})
        if in_python(host.lookup(type(hashed), "__hash__")):
            return host.call(function, [hashed], kwargs)
    method = host.lookup(type(args[0]), "__hash__") if len(args) == 1 and not kwargs else NULL
    if type(method) is not types.FunctionType:
        return host.call_native(function, args, kwargs)
    result = host.call(method, args, {})
    return host.converted(hash, type(args[0]), "__hash__", result)


def _divmod(host, function, args, kwargs):
    def natively():
        return host.call_native(function, args, kwargs)

    if len(args) != 2 or kwargs:
        return natively()
    return by_methods(host, "divmod", args[0], args[1], "divmod()", natively)


def _as_function(method, *symbol):
    """A function of the module `operator`."""
    return of(_ARITY[method])(lambda host, *args: getattr(host, method)(*symbol, *args))


_ARITY = {
    "binary": 2, "compare": 2, "unary": 1, "truth": 1, "same": 2, "contains": 2, "getitem": 2, "setitem": 3,
    "delitem": 2,
}  # fmt: skip
_NAMES = {"and": "and_", "or": "or_"}
_UNARY_NAMES = {"-": ("neg",), "+": ("pos",), "~": ("invert", "inv")}

CALLS = {
    int: _number(int, "__int__", "__index__"),
    float: _number(float, "__float__", "__index__"),
    complex: _number(complex, "__complex__", "__float__", "__index__"),
    abs: _through("__abs__"), round: _through("__round__"),
    math.floor: _through("__floor__"), math.ceil: _through("__ceil__"), math.trunc: _through("__trunc__"),
    hash: _hash, divmod: _divmod, pow: _as_function("binary", "**"),
    operator.index: of(1)(index), operator.abs: _through("__abs__"),
    **{getattr(operator, _NAMES.get(n, n)): _as_function("binary", s) for s, n in METHOD_OF.items()},
    **{getattr(operator, f"i{n}"): _as_function("binary", f"{s}=") for s, n in METHOD_OF.items()},
    **{getattr(operator, n): _as_function("compare", s) for s, n in COMPARE_METHOD.items()},
    **{getattr(operator, n): _as_function("unary", s) for s, names in _UNARY_NAMES.items() for n in names},
    **{getattr(operator, n): _as_function(n) for n in ("truth", "contains", "getitem", "setitem", "delitem")},
    operator.is_: _as_function("same"),
    operator.not_: lambda host, function, args, kwargs: not host.truth(*args),
    operator.is_not: lambda host, function, args, kwargs: not host.same(*args),
}  # fmt: skip
