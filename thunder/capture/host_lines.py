"""Host lines: Python code that capture cannot run once for all calls is a bound symbol of the program
(`thunder.core.host_calls`): impure code, code that takes data-dependent values, the text of a tensor.
"""

from __future__ import annotations

import collections
import decimal
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from thunder import compat
from thunder.capture import arrays, callbacks, changing, lending
from thunder.capture.examples import is_tried
from thunder.capture.expose import expose, is_written, keeps, settle_keys
from thunder.capture.interface import Capture
from thunder.capture.library import printed_nodes
from thunder.capture.native import IMMUTABLE, PRIMITIVE, among, is_hashable, is_tracked
from thunder.capture.policy import (
    Eager,
    Host,
    class_of_library,
    is_constant,
    is_library,
    is_of_constant,
    is_watched,
    native_row,
    read_of_library,
)
from thunder.capture.remade import UNCHANGING
from thunder.capture.world import tensor_of
from thunder.core.host_calls import (
    CONTAINERS,
    Frames,
    HostProxy,
    call_function,
    call_method,
    host_call,
    kind_of,
    name_of,
    next_or_end,
    warn_at,
)
from thunder.core.numbers import made_number
from thunder.core.proxies import (
    Condition,
    FloatProxy,
    IntegerProxy,
    NumberProxy,
    Proxy,
    Size,
    TensorProxy,
    concrete,
    map_structure,
    proxies_in,
)
from thunder.core.symbol import current_recorder
from thunder.core.unbacked import fresh_size
from thunder.errors import CaptureError
from thunder.interpreter import NULL, format_location
from thunder.interpreter.attributes import BUILTINS, NATIVE_METHODS, parts_of, plain_attribute, type_attribute
from thunder.interpreter.tables import ARITHMETIC
from thunder.ops.infer import fake
from thunder.ops.registry import inplace_of
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype
from thunder.options import SHARP_EDGES_OPTIONS

# functions whose results are of one type: they are not run at capture unless their value is asked for
_KINDS: dict[Any, type] = {
    int: int, float: float, bool: bool, format: str, repr: str, str: str, ascii: str, torch.Size: torch.Size,
    warn_at: type(None),
}  # fmt: skip
FIXED = (str, bytes, int, float, bool, complex, type(None), torch.Size, *IMMUTABLE)  # values that no effect can change


class HostMethod:
    """A method of a value that a host call gives, which the program has not called yet."""

    __slots__ = ("proxy", "name")

    def __init__(self, proxy: HostProxy, name: str):
        self.proxy, self.name = proxy, name


def run(c: Capture, function: Callable, args, kwargs=None, *, pure: bool = False, effect: str = "") -> Any:
    """A call on the host, as a bound symbol. pure: it gives an equal value whenever it is repeated, and has no effect.
    effect: its effect that others see, see `taken_from_log`.

    Returns a number, a tensor, None, or a HostProxy. Raises CaptureError where it cannot stand in a program.
    """
    kwargs = kwargs or {}
    if (known := changing.known_result(c, function, args, kwargs, effect)) is not NULL:
        return known
    function = tensor_of if function is torch.from_numpy else function
    function = function if is_hashable(function) else function.__call__  # a function of ctypes
    name = plain_attribute(function, "__qualname__", type(function).__qualname__)
    called = lending.called(function, args)
    reads = lending.only_reads(c, called, args)
    effect = effect or arrays.effect_of_writes(c, called, args, kwargs, reads)
    # a text or a number of these depends on settings, which the program may change
    pure = pure and not any(isinstance(p, HostProxy) and issubclass(p.kind, decimal.Decimal) for p in args)
    is_held = not c.path.held.isdisjoint(proxies_in((args, kwargs), []))
    shared = _effect_on_shared(c, function, name, args, pure, is_held)
    effect = effect or shared
    _check_place(c, name, effect)
    _check_owner(c, function, name, args)
    args = tuple(operand(c, a, reads) for a in args)
    kwargs = {k: operand(c, v, reads) for k, v in kwargs.items()}
    lent, frames = lending.lent(args, kwargs, reads), _frames(c, function, kwargs)
    kind = _known_kind(function, args, kwargs)
    pure = pure and (kind is None or issubclass(kind, FIXED))
    _check_library(c, name, effect, pure)
    index = None if pure else c.dispatch.host_calls
    value, any_size, decision = None, [], None
    if kind is None:
        value = _run_now(c, name, index, function, args, kwargs, effect, lent, frames)
        kind = type(value)
        if pure and not issubclass(kind, FIXED):  # others may be changed, and are one object on all paths
            pure, index = False, c.dispatch.host_calls
            c.dispatch.log.keep(index, function, args, value)
        any_size = arrays.any_size(c, name, value) if issubclass(kind, torch.Tensor) else []
        decision = c.path.take_kind(name, kind_of(value, any_size))
    if index is not None:
        c.dispatch.count_host_call()
    _check_gradient(c, name, kind, args, kwargs)
    out, result = typed(c, name, kind, value, any_size, False)
    if is_held:
        c.path.hold(result)
    c.path.note_text(result, pure, (args, kwargs))
    described = kind.__qualname__ if decision is None else str(kind_of(value, any_size))
    call = (index, function, args, kwargs, described, decision, *lending.without_nothing(effect, lent, frames))
    host_call.record(c.recorder, call, {}, out)
    _share_result(c, out, value, decision, (args, kwargs))
    return result


def _share_result(c: Capture, out: Any, value: Any, decision: Any, given_values: tuple) -> None:
    """Notes what the result of a call may share with its arguments, and a number that the program was decided by."""
    if decision is not None and isinstance(out, Proxy):
        c.path.knows(out, value)
    share(c, out, given_values)


def _effect_on_shared(c: Capture, function: Callable, name: str, args: Sequence, pure: bool, is_held: bool) -> str:
    """The effect of a call on objects that others see. is_held: whether an object that an eager function gave is among
    the arguments. Raises CaptureError where only that function may change it."""
    if is_held and function in _UNCALLED:
        c.refuse(f"{name}() changes an object that an eager call has returned", "do it in that function")
    is_shared = is_held or any(is_outside(c, a) or _is_used_up(a) for a in args)
    return "outside" * (not pure and function not in _LOOKING and is_shared)


def _is_used_up(value: Any) -> bool:
    """Whether a value is an iterator that a host call gives, which goes on where it stands."""
    return type(value) is HostProxy and hasattr(value.kind, "__next__")


def _check_gradient(c: Capture, name: str, kind: type, args: tuple, kwargs: dict) -> None:
    """A tensor of the host has no gradient."""
    if issubclass(kind, torch.Tensor) and _connects(c, args, kwargs):
        c.refuse(f"a gradient would have to pass through {name}(), which runs on the host", "detach its arguments")


def _connects(c: Capture, args: tuple, kwargs: dict) -> bool:
    """Whether a tensor with a gradient is among the arguments."""
    if not c.recorder.context.grad_enabled:
        return False
    return any(type(p) is TensorProxy and p.requires_grad for p in proxies_in((args, kwargs), []))


def _check_library(c: Capture, name: str, effect: str, repeated: bool) -> None:
    """repeated: whether it may run again."""
    if not repeated and effect != "random" and c.dispatch.library is not None and c.note_library(c.dispatch.library):
        c.refuse(f"a function of the standard library calls {name}()")  # captured again, it runs as a whole


def _check_place(c: Capture, name: str, effect: str) -> None:
    if current_recorder() is not c.recorder or c.recording.outer:
        c.refuse(f"{name}() runs on the host inside of a transform of functions", "call it outside of the transform")
    if effect and c.recorder.context.checkpoint and torch.is_grad_enabled():
        c.refuse(f"{name}() is called in a checkpoint, whose backward calls it again", "call it outside of that")


def _frames(c: Capture, function: Callable, kwargs: dict) -> Frames:
    """The frames of the program that a function looks at which writes down its caller."""
    answer = native_row(function).answer
    if type(answer) is not Host or not answer.names_caller:
        return ()
    if c.exc is not None and (kwargs.get("exc_info") or function.__name__ == "exception"):
        c.refuse("the program logs the exception that it handles", "call it outside of the compiled function")
    level, frames = kwargs.get("stacklevel", 1), c.stack_of_frames
    if type(level) is not int or not 0 < level <= len(frames):
        c.refuse("a log record names a caller of the compiled function", "call it outside of the compiled function")
    places = (format_location((frame.fn.__code__, frame.ip)) for frame in frames[-1 : -level - 1 : -1])
    return tuple((frame[0], frame[1], frame[4].rpartition(".")[2]) for frame in places)


def _run_now(
    c: Capture, name: str, index: int | None, function: Callable, args: tuple, kwargs: dict, effect: str, lent: tuple,
    frames: Frames,
):  # fmt: skip
    """The result of a host call in the call that is captured. An exception that the program may handle is refused."""
    try:
        return c.path.run_host_call(index, function, args, kwargs, effect, lent, frames)
    except Exception as error:  # noqa: BLE001 - whether the program may handle it decides
        if isinstance(error, CaptureError) or not is_tried(c):
            raise
        c.refuse(
            f"{name}() raises {type(error).__name__} in a `try` of the program, and need not when it runs again",
            "call it outside of the compiled function",
        )


def _check_owner(c: Capture, function: Callable, name: str, args) -> None:
    """A method of an object that the program made at capture would change that one object at each call. Operations
    alone overwrite a tensor's value."""
    if (inplace_of(function) is not None or function in _OPERATORS) and TensorProxy in map(type, args):
        c.refuse(
            f"{name}() overwrites a tensor with the result of a host call", "convert the result to a number: float(...)"
        )
    owner = plain_attribute(function, "__self__")
    if type(function) not in BUILTINS or owner is None or id(owner) in c.world.sources or id(owner) in c.world.origins:
        return
    steady = isinstance(owner, (type, types.ModuleType, tuple, *FIXED, *UNCHANGING)) or type(owner) in _TEXT_OF
    if not steady and _effect(function) != "random":
        c.refuse(
            f"{name}() puts data-dependent values into a {type(owner).__name__} that the program made",
            "collect such values in a list",
        )


# functions that look at an object and change nothing
_LOOKING = {getattr, iter, len, operator.getitem, operator.contains, operator.truth, operator.is_}
_OPERATORS = {f for symbol, f in ARITHMETIC.items() if symbol.endswith("=")}
_TEXT_OF = (list, dict, set, frozenset)  # their methods that make text


def _known_kind(function, args: tuple, kwargs: dict) -> type | None:
    if any(isinstance(a, (TensorProxy, HostProxy)) for a in (*args, *kwargs.values())):
        return None
    answer = native_row(function).answer
    kind = answer.gives if type(answer) is Host else _KINDS[function] if among(function, _KINDS) else None
    if kind in (int, float) and not {*map(type, (*args, *kwargs.values()))} <= _NUMBERS:
        return None
    return None if function == numpy.random.rand and len(args) + len(kwargs) else kind


_NUMBERS = {int, float, bool, str, IntegerProxy, FloatProxy}


def typed(c: Capture, name: str, kind: type, value, any_size: Sequence[int], requires_grad: bool) -> tuple[Any, Any]:
    """The output of the bound symbol, and the value for the program. any_size: see `arrays.any_size`. requires_grad: of
    a tensor."""
    if kind is type(None):
        return None, None
    if kind in (bool, int, float):
        return made_number(c.recorder, kind, f"the result of {name}()")
    if issubclass(kind, torch.Tensor):
        with compat.DisableTorchFunction():  # the result is none of the program's tensors
            unusual = value.layout is not torch.strided or value.is_nested or value.requires_grad
            if kind is not torch.Tensor or unusual:
                c.refuse(
                    f"{name}() gives a {kind.__name__}, which a trace cannot describe", "make it outside and pass it in"
                )
            out = TensorProxy(
                shape=tuple(fresh_size() if i in any_size else n for i, n in enumerate(value.shape)),
                dtype=from_tensor_dtype(value.dtype), device=from_tensor_device(value.device),
                requires_grad=requires_grad,
            )  # fmt: skip
        return out, out
    proxy = HostProxy(c.recorder.context.names.make("h"), kind, lambda: c.path.value_of(proxy))
    return proxy, proxy


def share(c: Capture, out, arguments) -> None:
    """A tensor that Python code gives may be one that it was given, or a view of it."""
    if type(out) is TensorProxy:
        for p in proxies_in(arguments, []):
            if type(p) is TensorProxy:
                c.recorder.memory.share(out, p)
            elif type(p) is HostProxy:
                c.path.watch(out)
                c.path.share(p.example)


def operand(c: Capture, value, reads: bool):
    """An argument, as the bound symbol holds it. reads: containers stay as they are."""
    t = type(value)
    if t is Condition:
        return bool(value)
    if t is TensorProxy:
        return c.recorder.latest(value)
    if t is torch.Size or t is Size:  # which is a tuple in the text of a program
        return run(c, torch.Size, (tuple(value),), pure=True)
    if isinstance(value, (Proxy, NumberProxy)) or t in PRIMITIVE:
        return value
    if issubclass(t, FIXED) and not callbacks.called_in(c, t):  # whose methods the program would not see
        return value
    if isinstance(value, torch.Tensor):
        return c.lift(value)
    if t is numpy.ndarray and value.flags.writeable and id(value) not in c.outside.arrays:
        return arrays.refuse_given(c, value)
    if t in (*CONTAINERS, tuple) or reads and t is collections.OrderedDict:
        return _given_container(c, value, reads)
    if t is HostMethod:
        return run(c, getattr, (value.proxy, value.name), pure=True)
    if (own := _is_of_program(c, value)) or keeps((value,), (Proxy, NumberProxy)):
        if own and id(value) not in c.world.sources:
            c.note_class(t)
        c.refuse(
            f"code that runs on the host is given a {t.__name__}, which the program may have written to",
            "give it tensors, numbers and text",
        )
    return value


def _given_container(c: Capture, value, reads: bool):
    """A container as host code gets it: a copy, which must not be one from outside where it may be changed."""
    t = type(value)
    if not reads and t is not tuple:
        if id(value) in c.containers.looks or id(value) in c.world.sources:
            c.refuse(
                "code that runs on the host is given a container from outside, which it may change",
                "give it a copy, made inside",
            )
        c.path.lend(value)
    expose(c, value)
    settle_keys(value, concrete)
    if t is collections.OrderedDict:  # as state dicts are, with their attributes
        return run(c, _ordered, (tuple(value.items()), tuple(vars(value).items())), pure=True)
    if t is dict:
        return {operand(c, k, reads): operand(c, v, reads) for k, v in value.items()}
    return t(operand(c, v, reads) for v in value)


def _is_of_program(c: Capture, value) -> bool:
    """Whether an object may be written to by the program or hold what it has computed. A library's class, and an object
    of one that comes from outside, is where the program has written to it."""
    t = type(value)
    if isinstance(value, type) and (is_library(value.__module__) or read_of_library(value.__module__)):
        return is_written(c, value)
    if isinstance(value, BaseException) or not class_of_library(t) or callable(value):
        return True
    if id(value) in c.containers.looks:  # a snapshot, which may be empty
        return True
    if id(value) in c.world.sources:
        return is_tracked(t) or is_written(c, value)
    if id(value) in c.world.origins or isinstance(value, (frozenset, numpy.ndarray, *UNCHANGING)) or is_constant(value):
        return False
    return not any(x is value for x in vars(sys.modules[t.__module__]).values())  # the library's own generator


def _ordered(items: tuple, attributes: tuple) -> collections.OrderedDict:
    ordered = collections.OrderedDict(items)
    ordered.__dict__.update(attributes)
    return ordered


def run_impure(c: Capture, function, args, kwargs):
    """A call of code that runs on the host in each call of the program."""
    warn_of(c, function)
    return run(c, function, args, kwargs, effect=_effect(function))


def warn_of(c: Capture, function) -> None:
    """Code that runs on the host is a sharp edge, under sharp_edges="error"."""
    if c.request.options.sharp_edges is SHARP_EDGES_OPTIONS.ERROR:
        row = native_row(function)
        c.sharp(f"{plain_attribute(function, '__qualname__', function)}() runs on the host: {row.why}")


def _effect(function) -> str:
    answer = native_row(function).answer
    return answer.effect if type(answer) is Host else ""


def is_outside(c: Capture, value) -> bool:
    """Whether a value of the host is an object from outside that others may see changes of."""
    return type(value) is HostProxy and c.path.source_of(value) is not None and not is_watched(value.example)


def outside_state(c: Capture, o):
    """The value of the host that stands for an object from outside whose state is not watched; None for others."""
    source = c.world.sources.get(id(o)) or c.world.origins.get(id(o))
    return None if source is None or is_watched(o) else changing.read(c, c.world.value_at(source), source)


def refuse(c: Capture, function) -> None:
    """Refuses a call that a function around it may make, as the policy says."""
    name = plain_attribute(function, "__qualname__", function)
    c.refuse(f"{name}() {native_row(function).why}", "call it outside of the compiled function")


def of_outside(c: Capture, function, receiver, args, kwargs):
    """A method in C of an object from outside whose state is not watched; NULL for others."""
    if (value := outside_state(c, receiver)) is None:
        return NULL
    args = args[1:] if type(function) in NATIVE_METHODS else args
    return run(c, call_method, (value, function.__name__, *args), kwargs)


def native(c: Capture, function, args, kwargs):
    """A call of native code that is made by each call of the program; NULL where capture makes it for all."""
    if function is next and len(args) in (1, 2) and type(args[0]) is HostProxy:
        return _next(c, *args)
    if type(native_row(function).answer) is Eager:
        refuse(c, function)
    answer, takes_tensors = native_row(function).answer, TensorProxy in map(type, (*args, *kwargs.values()))
    if type(answer) is Host and not is_of_constant(function, args):
        return of_foreign(c, function, args, kwargs) if takes_tensors else run_impure(c, function, args, kwargs)
    if takes_tensors and _is_of_numpy(function):
        return of_numpy(c, function, args, kwargs)
    if takes(c, function, args, kwargs):
        return run(c, function, args, kwargs)
    return NULL


# ------------------------------------------------------------------------------------- values that a host call gave


def holds_host_values(c: Capture, *values, numbers: bool = True) -> bool:
    """Whether values are or hold results of host calls or data-dependent numbers. The path decides keys of dicts."""
    if _NAMES.isdisjoint(c.recorder.context.names.counters):
        return False
    return any(
        type(v) in (HostProxy, HostMethod)
        or numbers
        and (type(v) is Condition or isinstance(v, NumberProxy))
        and bool(v.unbacked)
        for v in parts_of(*values, keys=False)
    )


def to_numpy(c: Capture, p: TensorProxy) -> HostProxy:
    """`p.numpy()`: values, for programs that write neither to them nor later to the tensor, whose memory they share."""
    if p.requires_grad:
        with compat.DisableTorchFunction():
            fake(p).requires_grad_().numpy()  # PyTorch refuses
    c.path.watch(p)
    values = run(c, arrays.values_of, (p,))
    c.path.values_of[values] = p
    return values


def of_numpy(c: Capture, function, args, kwargs):
    """A function of NumPy's that is given tensors. Two classes are Python's as well, and ask an argument for its text,
    or its number, before they take it for an array."""
    operands = [a for a in (*args, *kwargs.values()) if type(a) is TensorProxy]
    has_number = function is numpy.float64 and all(math.prod(p.shape) == 1 for p in operands)
    if has_number or function is numpy.str_:
        return run(c, function, *printed(c, (args, kwargs)))
    args = [to_numpy(c, a) if type(a) is TensorProxy else a for a in args]
    return run(c, function, args, {k: to_numpy(c, v) if type(v) is TensorProxy else v for k, v in kwargs.items()})


def _is_of_numpy(function) -> bool:
    return (plain_attribute(function, "__module__") or "").startswith("numpy") and not isinstance(function, numpy.ufunc)


def of_foreign(c: Capture, function, args, kwargs):
    differentiable = [p for p in proxies_in((args, kwargs), []) if type(p) is TensorProxy and p.requires_grad]
    if differentiable and c.recorder.context.grad_enabled:
        c.refuse(
            f"a gradient may have to pass through {name_of(function)}(), native code that thunder cannot analyze",
            "detach its arguments, or make it a torch.library.custom_op",
        )
    return run_impure(c, function, args, kwargs)


def takes(c: Capture, function, args, kwargs) -> bool:
    """Whether native code is given such values, and does more with them than to keep them."""
    operands = (*args, *kwargs.values())
    if not holds_host_values(c, *operands):
        ufunc = isinstance(function, numpy.ufunc)
        of_numpy = ufunc or _is_of_numpy(function)
        numbers = (v for v in parts_of(*operands) if isinstance(v, NumberProxy)) if of_numpy else ()
        return any(ufunc or not n.decisions.is_size(name) for n in numbers for name in n.expression.symbols())
    owner = plain_attribute(function, "__self__")
    holder = isinstance(function, type) and issubclass(function, _HOLDERS)
    if (
        holder
        or isinstance(owner, (list, dict, set, tuple, collections.deque))
        or type(function) is types.MethodDescriptorType
        and HostProxy not in map(type, args[:1])  # `str.upper(name)`
    ):
        return False
    if type(function) is types.MethodWrapperType and _makes_container(function, owner):  # super().__init__(...)
        return False
    module = (plain_attribute(function, "__module__") or type(owner).__module__).split(".")[0]
    if module == "builtins":
        computes = function in _COMPUTING and HostProxy in map(type, operands)
        keeps_it = isinstance(function, type) or function in _KEEPING or _makes_container(function, owner)
        return computes or not keeps_it
    return module not in _SYMBOLIC or holds_host_values(c, *operands, numbers=False)


def _makes_container(function, owner) -> bool:
    """Whether native code is `tuple.__new__`, `object.__init__` and the like, which keep what they are given."""
    kind = owner if isinstance(owner, type) else plain_attribute(function, "__objclass__")
    keeps = kind in _KEEPING_CLASSES or isinstance(kind, type) and issubclass(kind, BaseException)
    return keeps and function.__name__ in ("__new__", "__init__")


_NAMES = frozenset("uvh")  # of data-dependent numbers, and of values of host calls
_SYMBOLIC = ("torch", "thunder", "operator", "_operator", "itertools", "functools")  # take symbolic numbers as numbers
_KEEPING = {isinstance, issubclass, id, callable, iter, next, getattr, setattr, hasattr, len, sum, min, max, sorted,
            abs, round, divmod, pow, any, all, hash}  # fmt: skip
_HOLDERS = (functools.partial, property, staticmethod, classmethod, types.MethodType)
_COMPUTING = {abs, round, divmod, pow, bytes, bytearray, complex}  # with such a value
_KEEPING_CLASSES = (object, tuple, list)  # which keep what they are made of


def printed(c: Capture, values) -> Any:
    """Values of which a text is made: with eager's `grad_fn` names of tensors, and copies in the place of the program's
    own arrays, which no text changes."""
    values = printed_nodes.printed(c, values)
    if not any(type(x) is numpy.ndarray and x.flags.writeable for x in parts_of(values)):
        return values
    return map_structure(
        lambda x: _read_only(x) if type(x) is numpy.ndarray and id(x) not in c.outside.arrays else x, values
    )


def _read_only(array: numpy.ndarray) -> numpy.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def text(c: Capture, function, *args, **kwargs):
    """The text that a function makes of tensors, or of data-dependent numbers."""
    args, kwargs = printed(c, (args, kwargs))
    return run(c, function, args, kwargs, pure=not any(map(_may_show_more, parts_of(args, kwargs))))


def _may_show_more(value: Any) -> bool:
    """Whether the text of a value may be another one later."""
    kind = value.kind if type(value) is HostProxy else type(value)
    return issubclass(kind, (numpy.ndarray, numpy.generic)) or type(value) is HostProxy and not issubclass(kind, FIXED)


def attribute(c: Capture, value: HostProxy, name: str):
    """`value.name`: a method is called later."""
    if (known := changing.attribute(c, value, name)) is not None:
        return known
    if name == "__class__":
        return value.kind
    if (attribute_value := getattr(value.example, name, NULL)) is NULL:
        if hasattr(value.example, "__dict__"):
            bool(run(c, hasattr, (value, name)))  # another call may find one
        return getattr(value.example, name)  # raises
    if callable(attribute_value) and plain_attribute(attribute_value, "__self__") is not None:
        return HostMethod(value, name)
    return run(c, getattr, (value, name), pure=isinstance(value.example, FIXED))


def call(c: Capture, function, args, kwargs):
    """A call of a method of such a value, or of the value itself."""
    if type(function) is HostProxy:
        return run(c, call_function, (function, *args), kwargs)
    value, name, example = function.proxy, function.name, function.proxy.example
    method = getattr(example, name)
    effect = _effect(method)
    return run(
        c, call_method, (value, name, *args), kwargs, pure=isinstance(example, FIXED) and not effect, effect=effect
    )


def operate(c: Capture, function: Callable, *operands):
    """An operator with such a value among its operands. In place, or of a mutable value, it is an effect."""
    fixed = not isinstance(operands[0], HostProxy) or issubclass(operands[0].kind, (*FIXED, tuple))
    return run(c, function, operands, pure=fixed)


def truth(c: Capture, value: HostProxy) -> bool:
    return bool(run(c, operator.truth, (value,), pure=isinstance(value.example, FIXED)))


def elements(c: Capture, value: HostProxy):
    """An iterator over such a value, with as many elements as there are at capture."""
    if hasattr(value.kind, "__next__"):
        return _steps(c, value)
    if value.kind in changing.TEXTS:  # whose characters are keys often
        return iter(changing.settled(c, value))
    if type(type_attribute(value.kind, "__iter__")) is types.FunctionType:  # what it does stands between the steps
        return _steps(c, run(c, iter, (value,)))
    items = run(c, list, (value,))
    return iter([run(c, operator.getitem, (items, i)) for i in range(int(run(c, len, (items,))))])


def _steps(c: Capture, iterator: HostProxy):
    while (following := run(c, next_or_end, (iterator,))) is not None:
        yield run(c, operator.getitem, (following, 0))


def _next(c: Capture, iterator: HostProxy, *default):
    """`next(iterator)`."""
    following = run(c, next_or_end, (iterator,))
    if following is not None:
        return run(c, operator.getitem, (following, 0))
    if default:
        return default[0]
    raise StopIteration


# that no call of the program's makes, so that the log of a call does not tell what they gave
_UNCALLED = {operator.setitem, operator.delitem, iter, next_or_end, *_OPERATORS}
