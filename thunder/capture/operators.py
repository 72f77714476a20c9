"""Operators, items, iteration, text and tests of types, where a tensor, a number that stays symbolic or something from
outside is an operand.

CPython's algorithms stand in `thunder.interpreter`: `operators`, `sequences` and `text`. The functions here run
before them (a container is about to be read) and in the place of native code. Functions take the capture first.
"""

from __future__ import annotations

import abc
import builtins
import collections
import functools
import operator
import types
from typing import Any

import numpy
import torch

from thunder import compat
from thunder.capture import (
    arrays,
    callbacks,
    changing,
    containers,
    host_lines,
    items,
    native_calls,
    numpy_values,
    opaque_values,
    operations,
    settings,
)
from thunder.capture.classes import PROXIES, ask_bases, of_library
from thunder.capture.examples import checked
from thunder.capture.expose import as_text, expose, is_for_library, with_numbers
from thunder.capture.identities import Id, real_id, told_apart
from thunder.capture.interface import Capture
from thunder.capture.library import distributions, gradients
from thunder.capture.native import CONTAINERS, DICT_VIEWS, MUTABLE, PRIMITIVE
from thunder.capture.policy import is_library, is_watched
from thunder.capture.reads import look_at
from thunder.capture.watched import check_watched
from thunder.compat.names import DISTRIBUTION_CHECK
from thunder.core.host_calls import HostProxy
from thunder.core.numbers import application
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, Size, TensorProxy
from thunder.interpreter import NULL, Host, operators, sequences
from thunder.interpreter.attributes import in_python, name_in_errors, type_attribute
from thunder.interpreter.host import UNARY
from thunder.interpreter.instructions import PLAIN
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS
from thunder.ops.tensor_values import fixed_value
from thunder.ops.torch_types import to_torch_dtype

# ---------------------------------------------------------------- arithmetic and comparisons


def binary(c: Capture, symbol, a, b):
    """`a + b` and the like."""
    if type(a) in _COMPUTED and type(b) in _COMPUTED:  # a tensor and another or a number have no special methods
        return _recorded(c, ARITHMETIC[symbol], a, b)
    if type(a) is TensorProxy and symbol not in ("@", "@=") and computes(c, a, b):
        return native_binary(c, symbol, a, b)
    if not (symbol == "+=" and type(a) is list):  # which appends, and looks at nothing
        c.materialize(a)
    c.materialize(b)
    _beside_tensor(c, a, b)
    if symbol.endswith("="):
        arrays.refuse_array(c, a)
    return operators.binary(c, symbol, *_beside_python(c, symbol, a, b))


def _beside_tensor(c: Capture, a, b) -> None:
    """PyTorch asks a list or a tuple beside a tensor for its length, when it says why it does not take it."""
    if (type(a) is TensorProxy) is not (type(b) is TensorProxy):
        other = b if type(a) is TensorProxy else a
        if isinstance(other, (list, tuple)) and in_python(c.lookup(type(other), "__len__")):
            callbacks.refuse(c, other, len)


def _beside_python(c: Capture, symbol: str, a, b) -> tuple:
    """The operands of an operator, with the value of one of the host's beside an object with a method in Python: the
    value's own method may come first."""
    if (type(a) is HostProxy) is (type(b) is HostProxy):
        return a, b
    other, named = type(b) if type(a) is HostProxy else type(a), operators.COMPARE_METHOD.get(symbol)
    name = operators.METHOD_OF.get(symbol.removesuffix("="))
    names = (
        (f"__{name}__", f"__r{name}__")
        if named is None
        else (named, operators.COMPARE_METHOD[operators.REFLECTED[symbol]])
    )
    if not any(in_python(c.lookup(other, n)) for n in names):
        return a, b
    return changing.settled(c, a), changing.settled(c, b)


_COMPUTED = {TensorProxy, int, float, bool}


def natively(c: Capture, function, *operands):
    """Native code would call special methods of the user's."""
    kinds = " and ".join(type(x).__name__ for x in operands)
    c.refuse(f"operator.{function.__name__} of {kinds} calls special methods natively", "write this part in Python")


def computes(c: Capture, a, b) -> bool:
    """Whether a tensor's own method takes the other operand, or asks it: a number, also of the user's class, what says
    so, and what answers for any attribute."""
    if type(a) is not TensorProxy and type(b) is not TensorProxy:
        return False
    other = b if type(a) is TensorProxy else a
    number = issubclass(type(other), (int, float, complex)) and type(other) is not Id
    return number or _overrides(other) or c.slot(type(other), "__getattr__") is not None


def native_binary(c: Capture, symbol, a, b):
    """A binary operator that native code answers."""
    a, b = _with_number(c, a, b)
    if type(b) is HostProxy and b.kind in changing.TEXTS and issubclass(type(a), _GROWING.get(symbol, ())):
        b = changing.settled(c, b)
    ta, tb = type(a), type(b)
    if tb is HostProxy and symbol.endswith("=") and issubclass(ta, MUTABLE):
        return _changed_by_host(c, symbol, a, b)
    if ta is HostProxy or tb is HostProxy or _is_numpys(ta, tb):
        return host_lines.operate(c, ARITHMETIC[symbol], a, b)
    if type(a) is str and symbol == "%":
        return operations.formatted_text(c, a, b)
    if symbol == "%" and issubclass(ta, (bytes, bytearray)):
        return c.call(ta.__mod__, [a, b], {})
    if ta is AnyProxy or tb is AnyProxy:
        if symbol.endswith("=") and ta in (AnyProxy, TensorProxy):
            c.refuse(f"{symbol} with a tensor that is sparse, nested or of a subclass", f"write a = a {symbol[:-1]} b")
        return opaque_values.apply(c, ARITHMETIC[symbol], operations.all_lifted(c, (a, b)), {})
    if symbol.endswith("="):
        items.check_iterators(c, b)
        if tb is TensorProxy and issubclass(ta, _GROWING.get(symbol, ())):
            return Host.native_binary(c, symbol, a, c.steps(b))
    if ta is TensorProxy or tb is TensorProxy or isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _of_tensors(c, symbol, a, b)
    return _without_tensors(c, symbol, a, b)


def _changed_by_host(c: Capture, symbol: str, a, b: HostProxy):
    """`a += b` of a container that the program holds and a value of the host: the program changes the container."""
    if symbol == "+=" and hasattr(b.kind, "__radd__"):  # `list += array` is the array's way of adding
        return host_lines.operate(c, operator.add, a, b)
    base = next((base for base in MUTABLE if isinstance(a, base)), list)
    method = _CHANGES.get(symbol, "")
    if not hasattr(base, method) or base is set and not issubclass(b.kind, (set, frozenset)):
        c.refuse(f"{symbol} changes a {type(a).__name__} by a value of the host", f"write a = a {symbol[:-1]} b")
    c.call(getattr(base, method).__get__(a), [b], {})
    return a


def _without_tensors(c: Capture, symbol, a, b):
    kinds = {type(a), type(b)}
    if not kinds.isdisjoint(DICT_VIEWS):
        changing.settle_inside(c, a, b)
    if symbol in ("+", "+=") and isinstance(a, tuple) and isinstance(b, tuple) and kinds & {torch.Size, Size}:
        return operations.size((*a, *b))
    if is_for_library(a, b):
        return _in_library(c, ARITHMETIC[symbol], a, b)
    return Host.native_binary(c, symbol, a, b)


def _in_library(c: Capture, function, a, b):
    """An operator that a library's class in C computes."""
    a, b = with_numbers(c, a, b)
    of_host = host_lines.holds_host_values(c, a, b) or not (is_watched(a) and is_watched(b))
    return host_lines.operate(c, function, a, b) if of_host else function(a, b)


def _of_tensors(c: Capture, symbol, a, b):
    """A binary operator with a tensor: recorded, or (`[0] * n`) a sequence repeated."""
    repeated = a if type(b) is TensorProxy else b if symbol == "*" else None  # no sequence behind `*=`
    if symbol in ("*", "*=") and isinstance(repeated, _REPEATED) and not _overrides(repeated):
        return ARITHMETIC[symbol](*(operator.index(x) if type(x) is TensorProxy else x for x in (a, b)))
    if not _is_no_operand(c, a, b, symbol):
        return _recorded(c, ARITHMETIC[symbol], a, b)
    if symbol not in ("/", "/=") or type(b) is not TensorProxy:
        return _as_python_does(ARITHMETIC[symbol], a, b)
    result = c.enter(torch.Tensor.__rtruediv__, [b, a], {})  # written in Python: it may call `a.__rmul__`
    if result is NotImplemented:
        raise TypeError(f"unsupported operand type(s) for {symbol}: '{type(a).__name__}' and 'Tensor'")
    return result


_REPEATED = (*sequences.INDEXED, collections.deque)


def _with_number(c: Capture, a, b) -> tuple:
    """The operands of an operator, with the number that a number of NumPy's is for a tensor beside it."""
    if type(a) is TensorProxy:
        return a, numpy_values.as_number(c, b)
    return (numpy_values.as_number(c, a), b) if type(b) is TensorProxy else (a, b)


def _is_numpys(ta: type, tb: type) -> bool:
    """Whether a tensor meets an array, which NumPy computes with the tensor's values."""
    return TensorProxy in (ta, tb) and (issubclass(ta, numpy.ndarray) or issubclass(tb, numpy.ndarray))


def _is_no_operand(c: Capture, a, b, symbol: str) -> bool:
    """Whether PyTorch's operators do not know the other operand of a tensor, so that Python goes on and raises."""
    check_override(c, a, b)
    tensor, other = (a, b) if isinstance(a, PROXIES) else (b, a)
    if isinstance(other, _OPERANDS):
        return False
    return type(tensor) is TensorProxy


_CHANGES = {
    "+=": "extend", "|=": "update", "&=": "intersection_update", "-=": "difference_update",
    "^=": "symmetric_difference_update",
}  # fmt: skip
_GROWING = {"+=": (list, collections.deque), "|=": dict}  # these iterate over the other operand
_OPERANDS = (int, float, complex, torch.Tensor, numpy.generic, numpy.ndarray, *PROXIES)


def check_override(c: Capture, *operands) -> None:
    """Refuse an object of the user's that PyTorch's operators would ask, by its `__torch_function__`."""
    for x in operands:
        if _overrides(x):
            c.refuse(f"a {type(x).__name__} goes into an operation", "give it tensors and numbers")
        if type(x) not in PRIMITIVE and not issubclass(type(x), (torch.Tensor, *PROXIES)):
            operations.check_asked(c, type(x))


def _overrides(x) -> bool:
    if type(x) in PRIMITIVE or issubclass(type(x), (torch.Tensor, *PROXIES)):
        return False
    return type_attribute(type(x), "__torch_function__") is not NULL


def _as_python_does(function, a, b):
    with compat.DisableTorchFunction():
        return function(_tensor_like(a), _tensor_like(b))


def _tensor_like(x):
    if type(x) is not TensorProxy:
        return x
    return torch.empty((1,) if x.shape == (1,) else (2,), dtype=to_torch_dtype(x.dtype))


def _recorded(c: Capture, function, a, b):
    c.synchronize()
    operands = _operand(c, a), _operand(c, b)
    return checked(c, function, operands, {}, lambda: function(*operands))


def _operand(c: Capture, v):
    """An operand beside a tensor, where PyTorch takes a bool of numpy's for a float, and numbers of the user's classes
    for their values."""
    if type(v) not in PRIMITIVE and type(v) is not Id:
        base = next((t for t in (int, float, complex) if issubclass(type(v), t)), None)
        v = v if base is None else getattr(base, f"__{base.__name__}__")(v)
    return float(v) if isinstance(v, numpy.bool_) else operations.lifted(c, v)


def unary(c: Capture, symbol, a):
    c.materialize(a)
    return operators.unary(c, symbol, a)


def native_unary(c: Capture, symbol, a):
    if type(a) is AnyProxy:
        return opaque_values.apply(c, opaque_values.SIGNS[symbol], (a,), {})
    if type(a) is HostProxy:
        return host_lines.operate(c, UNARY[symbol], a)
    if type(a) is TensorProxy:
        c.synchronize()
    return UNARY[symbol](a)


def compare(c: Capture, symbol, a, b):
    """`a < b` and the like."""
    if c.dispatch.reading is not None:
        look_at(c, a)
        look_at(c, b)
    if type(a) is Id and type(b) is Id:
        told_apart(c, a, (b,))
    elif type(a) is TensorProxy and computes(c, a, b):
        return native_compare(c, symbol, a, b)
    elif c.outside.ids:
        a, b = real_id(c, a), real_id(c, b)
    for x in (a, b):
        if isinstance(x, (tuple, frozenset, *MUTABLE)):
            expose(c, x)
    _beside_tensor(c, a, b)
    return operators.compare(c, symbol, *_beside_python(c, symbol, a, b))


def native_compare(c: Capture, symbol, a, b):
    """A comparison that native code answers."""
    a, b = _with_number(c, a, b)
    if type(a) is HostProxy or type(b) is HostProxy or _is_numpys(type(a), type(b)):
        return host_lines.operate(c, COMPARISONS[symbol], a, b)
    if type(a) is AnyProxy or type(b) is AnyProxy:
        return opaque_values.apply(c, COMPARISONS[symbol], operations.all_lifted(c, (a, b)), {})
    if type(a) is TensorProxy or type(b) is TensorProxy:
        if _is_no_operand(c, a, b, symbol):
            return _as_python_does(COMPARISONS[symbol], a, b)
        return _recorded(c, COMPARISONS[symbol], a, b)
    if symbol in ("==", "!=") and operators.by_identity(c, a, b):
        return c.same(a, b) is (symbol == "==")
    for x in (a, b):
        if type(x) not in PRIMITIVE and is_library(type(x).__module__):
            expose(c, x)
    return _in_library(c, COMPARISONS[symbol], a, b) if is_for_library(a, b) else COMPARISONS[symbol](a, b)


def native_index(c: Capture, value):
    symbolic = isinstance(value, NumberProxy) and value.python_type is int
    return value if symbolic else operator.index(value)  # pyright: ignore[reportArgumentType]


def type_name(c: Capture, value) -> str:
    return name_in_errors(operations.type_of(c, value))


def converted(c: Capture, function, kind, name, result, *more):
    """Numbers that stay symbolic are numbers."""
    if isinstance(result, NumberProxy) and function is not bool or type(result) is HostProxy and result.kind is str:
        return result
    return c.truth(result) if type(result) is Condition else Host.converted(c, function, kind, name, result, *more)


# ---------------------------------------------------------------- items and iteration


def getitem(c: Capture, o, k):
    t = type(o)
    if t is TensorProxy or t in CONTAINERS and t is not list:
        return items.getitem(c, o, k)
    if c.containers.lazy and id(o) in c.containers.lazy and in_python(c.lookup(t, "__missing__")):
        c.materialize(o)
    return sequences.getitem(c, o, k)


def native_delitem(c: Capture, o, k):
    if type(o) is HostProxy:
        host_lines.run(c, operator.delitem, (o, k))
        return
    c.materialize(o)
    owner: Any = gradients.A_TENSOR if type(o) is TensorProxy else o  # a tensor raises
    del owner[changing.settled(c, k) if isinstance(o, dict) else k]
    containers.write_attributes(c, o)


def sum_of_numbers(c: Capture, numbers: list):
    if not any(isinstance(n, NumberProxy) for n in numbers):
        return sum(numbers[1:], numbers[0])
    if not any(c.pattern_type(n) is float for n in numbers):
        return functools.reduce(functools.partial(binary, c, "+"), numbers)
    return application("total", *numbers)


def native_next(c: Capture, iterator):
    items.check_iterators(c, iterator)
    if type(iterator) is not types.GeneratorType:
        return builtins.next(iterator)
    try:
        return builtins.next(iterator)
    finally:
        c.follow_settings(builtins.next, iterator)  # of a context manager of PyTorch's


def native_len(c: Capture, o):
    """`len(o)` that native code answers."""
    if type(o) is HostProxy:
        return host_lines.operate(c, len, o)
    if c.containers.lazy and id(o) in c.containers.lazy and isinstance(o, (list, collections.deque)):
        return containers.length(c, o)
    c.materialize(o)
    if type(o) is TensorProxy:
        shape = c.recorder.latest(o).shape
        return shape[0] if shape else len(o)
    if (state := host_lines.outside_state(c, o)) is not None:
        return host_lines.operate(c, len, state)
    check_watched(c, o, "__len__", f"the length of a {type(o).__name__}")
    return len(o)


def truth(c: Capture, o):
    if type(o) is TensorProxy:  # which has no special methods
        return native_truth(c, o)
    if c.dispatch.reading is not None:
        look_at(c, o)
    c.materialize(o)
    return sequences.truth(c, o)


def native_truth(c: Capture, o):
    if type(o) is HostProxy:
        return host_lines.truth(c, o)
    if type(o) is TensorProxy and (o.numel_value != 1) is True:
        count = "more than one value" if (o.numel_value != 0) is True else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {count} is ambiguous")
    if type(o) is TensorProxy and _in_distributions(c.stack_of_frames[-1].fn) and fixed_value(o) is None:
        return True if distributions.is_check(c, o) else bool(o)
    return bool(o)


def _in_distributions(function) -> bool:
    """Whether a function may be one of `torch.distributions` that checks arguments."""
    return (function.__module__ or "").startswith("torch.distributions.") or function.__qualname__ == DISTRIBUTION_CHECK


def unpack(c: Capture, value, before, after=None):
    known = c.lookup(type(value), "__iter__") is not NULL or c.lookup(type(value), "__getitem__") is not NULL
    if type(value) in (TensorProxy, HostProxy) or known and (c.containers.lazy or id(value) in c.outside.iterators):
        steps = (x for x in c.steps(value))  # unpacking asks for no length
        value = [*steps] if type(value) in CONTAINERS else steps  # of which it asks for one element too many
    return Host.unpack(c, value, before, after)


# ---------------------------------------------------------------- text and types


def native_text(c: Capture, function, value, *spec):
    if type(value) in PLAIN and all(type(s) is str for s in spec):
        return function(value, *spec)
    expose(c, value)
    if isinstance(value, BaseException) and (text := _text_of_exception(c, function, value)) is not None:
        return text
    if operations.is_unknown_text(c, value, *spec):
        return host_lines.text(c, function, value, *spec)
    return native_calls.call_native(c, function, [as_text(c, value, function), *spec], {})


def _text_of_exception(c: Capture, function, value: BaseException):
    """What BaseException and KeyError make of the arguments of an exception; None where other native code does it."""
    kind, args, one = type(value), value.args, len(value.args) == 1
    if function is str and kind.__str__ in (BaseException.__str__, KeyError.__str__):
        inner = repr if one and kind.__str__ is KeyError.__str__ else str
        return c.call(inner, [args[0] if one else args], {}) if args else ""
    if function is repr and kind.__repr__ is BaseException.__repr__ and args:
        inside = ("(", c.call(repr, [args[0]], {}), ")") if one else (c.call(repr, [args], {}),)
        return c.join([kind.__name__, *inside])
    return None


def native_isinstance(c: Capture, o, cls):
    """`isinstance(o, cls)` as user code sees it: a proxy has the class of its tensor or number."""
    if type(o) is TensorProxy:
        return issubclass(operations.kind_of(c, o), cls) or (
            o in c.tensors.real and isinstance(c.tensors.real[o][0], cls)
        )
    if isinstance(o, NumberProxy):
        return issubclass(o.python_type, cls)
    if type(o) is Condition:
        return issubclass(bool, cls)
    if type(o) is HostProxy:
        return issubclass(o.kind, cls)
    return type(o) is Size and cls is torch.Size or _checked(c, type(o), cls, isinstance(o, cls))


def native_issubclass(c: Capture, kind, cls) -> bool:
    answer = issubclass(kind, cls)
    return _checked(c, kind, cls, answer) if issubclass(type(kind), type) else answer


def _checked(c: Capture, kind: type, cls, answer: bool) -> bool:
    """An answer about a class. An abstract base class may answer otherwise later, once one is registered."""
    ask_bases(c, kind)
    if not answer and issubclass(type(cls), abc.ABCMeta) and not (of_library(cls) and of_library(kind)):
        settings.asked_again(c, issubclass, [kind, cls], {}, lambda f: answer)
    return answer


def asks_in_python(c: Capture, hook, value) -> bool:
    """Whether `__instancecheck__` is to be interpreted: the user's is. A library's answers of classes, and sees proxies
    as the objects that they stand for."""
    if not in_python(hook):
        return False
    return type(hook) is not types.FunctionType or not is_library(hook.__globals__.get("__name__"))
