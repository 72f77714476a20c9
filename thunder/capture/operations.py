"""Operations: a tensor as user code sees it, and calls of torch functions, which are recorded."""

from __future__ import annotations

import contextlib
import re
import types
import warnings
from typing import Any

import numpy
import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture import callbacks, host_lines, numpy_values, opaque_values
from thunder.capture.examples import checked
from thunder.capture.expose import as_text, expose, keeps
from thunder.capture.interface import Capture
from thunder.capture.library import backward, dtensors, gradients, leaves, outside_hooks
from thunder.capture.methods import TensorMethod
from thunder.capture.native import CONTAINERS, PRIMITIVE, plain_base
from thunder.capture.number_places import with_numbers
from thunder.capture.policy import is_library
from thunder.capture.state import NOT_REAL
from thunder.capture.strides import LAYOUT_QUESTIONS, answer
from thunder.capture.tensors import DependsOnIdentity, has_new_history
from thunder.capture.world import PRESENT, VALUE
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import (
    METHODS,
    AnyProxy,
    Condition,
    NumberProxy,
    Proxy,
    Size,
    TensorProxy,
    map_structure,
)
from thunder.core.signals import interrupts
from thunder.core.symbol import is_outside
from thunder.errors import CaptureError, SharpEdgeError, SharpEdgeWarning, with_section
from thunder.interpreter import NULL, attributes, sequences
from thunder.interpreter.attributes import BUILTINS, in_python, parts_of, plain_attribute, type_attribute
from thunder.interpreter.instructions import PLAIN
from thunder.interpreter.standins import StandIn
from thunder.interpreter.text import formatted, representation, string
from thunder.ops import lookup
from thunder.ops.methods import call_torch
from thunder.ops.opaque import custom_operator, written_by
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import SHARP_EDGES_OPTIONS

OVERRIDABLE = {
    f
    for functions in torch.overrides.get_overridable_functions().values()
    for f in functions
    if type(f) is types.FunctionType
}


class RecordingMode(torch.overrides.TorchFunctionMode):
    """Records every torch call, wherever it is made: code that runs natively never loses an operation."""

    def __init__(self, capture: Capture):
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.capture.dispatch.is_in_cache:
            return func(*args, **kwargs or {})
        return record(self.capture, func, args, kwargs or {})


def check_mode(c: Capture, mode) -> None:
    """Refuse a torch-function mode of the user's that the program enters: PyTorch gives it each call."""
    if not isinstance(mode, RecordingMode) and not is_library(type(mode).__module__):
        c.refuse(
            f"a torch-function mode ({type(mode).__name__}) is entered, which would see each call of PyTorch",
            "enter it outside of the compiled function",
        )


_CONVERTED = {"dtype": lambda p: to_torch_dtype(p.dtype), "device": lambda p: to_torch_device(p.device)}


def _shape(p: TensorProxy):
    return size(p.shape)


def size(numbers) -> torch.Size | Size:
    symbolic = not set(map(type, numbers)) <= {int} and any(isinstance(n, NumberProxy) for n in numbers)
    return (Size if symbolic else torch.Size)(numbers)


_STATED = {
    "shape": lambda c, p: _shape(p), "name": lambda c, p: None,
    "requires_grad": lambda c, p: p.requires_grad, "ndim": lambda c, p: p.ndim,
    "__class__": lambda c, p: kind_of(c, c.recorder.memory.holder(p)),
    "__dict__": lambda c, p: c.refuse("the program reads the __dict__ of a tensor", "read attributes by their names"),
    **{n: lambda c, p, convert=convert: convert(p) for n, convert in _CONVERTED.items()},
}  # fmt: skip


_OF_HISTORY = {"is_leaf", "grad_fn"}


def tensor_attribute(c: Capture, p: TensorProxy, n: str):
    """An attribute of a tensor, as user code sees it."""
    if n in c.dispatch.patched:
        return attributes.bind(c, c.dispatch.patched[n], c.recorder.memory.holder(p), kind_of(c, p), n)
    if c.tensors.dtensors and (of_dtensor := dtensors.attribute(c, p, n)) is not NULL:
        return of_dtensor
    if n in _STATED:
        return _STATED[n](c, c.recorder.latest(p))
    if n == "grad":
        return gradients.read_gradient(c, p)
    p = c.recorder.memory.holder(p)
    if c.effects and (written := c.effects.value(p, n)) is not NULL:
        return written
    real, source = c.tensors.real.get(p, NOT_REAL)
    if real is not None:
        with compat.DisableTorchFunction():
            if n in real.__dict__:
                return c.read(real.__dict__[n], source.attr(n))
            old = n in _OF_HISTORY and not has_new_history(c, p)
            if old:
                c.read(real.is_leaf, source.attr("is_leaf"))
            if old or n == "names":
                return getattr(real, n)
    if n in METHODS or n == "size":
        return TensorMethod(p, n)
    # no attribute of the class's own, as `__name__`
    attribute = getattr(torch.Tensor, n, None) if type_attribute(torch.Tensor, n) is not NULL else None
    if attribute is not None and callable(attribute) and n not in METHODS.properties:
        return TensorMethod(p, n)
    if attribute is None:
        if real is not None:
            c.world.ask(source.find(n), PRESENT)
        raise AttributeError(f"'{kind_of(c, p).__name__}' object has no attribute {n!r}")
    if type(attribute) in PRIMITIVE:
        return getattr(kind_of(c, p), n)
    c.synchronize()
    return getattr(c.recorder.latest(p) if n in _OF_HISTORY else p, n)


def patched_methods() -> dict[str, Any]:
    """What the user has put in the place of attributes of torch.Tensor, or beside them. A program is for those that
    there are: their number is part of `modes_key`. Raises CaptureError for special methods: operators go to
    PyTorch's."""
    patched = {n: x for n, x in vars(torch.Tensor).items() if is_outside(_function_of(x))}
    for name in patched:
        if name.startswith("__") and hasattr(compat.TensorBase, name):
            raise CaptureError(
                f"torch.Tensor.{name} is replaced, and tensors are computed with by PyTorch's own",
                remedy="put a torch-function mode around the call, which sees all operations",
            )
    return patched


def _function_of(attribute: Any) -> Any:
    """What runs where an attribute of a class is asked for, or called."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute if isinstance(attribute, types.FunctionType) else type(attribute)


def kind_of(c: Capture, p: TensorProxy) -> type:
    """The class that user code believes a proxy has."""
    real = c.tensors.real.get(p)
    if dtensors.spec_of(c, p) is not None:
        return dtensors.kind()
    if real is not None and real[1] in c.tensors.local:
        return torch.nn.Parameter if isinstance(real[0], torch.nn.Parameter) else torch.Tensor
    return type(real[0]) if real is not None else torch.Tensor


def _contiguous(c: Capture, f, args, kwargs):
    """`Tensor.contiguous`. A contiguous tensor is the result itself. Autograd would tell an input that requires grad
    from a result of the compiled function, so that an input is asked."""
    value = args[0]
    if type(value) is TensorProxy and value.requires_grad and len(args) == 1 and not kwargs:
        real, source = c.tensors.real.get(c.recorder.latest(value), NOT_REAL)
        if real is not None and value not in c.tensors.placements and c.world.ask(source.call("is_contiguous"), VALUE):
            return value
    return record(c, torch.Tensor.contiguous, args, kwargs)


# methods of tensors that are no operations, or not always
SPECIAL_METHODS = {
    "backward": backward.call_backward, "requires_grad_": leaves.require_grad, "__deepcopy__": leaves.copied,
    "register_hook": outside_hooks.register_hook, "retain_grad": outside_hooks.retain_grad,
    "register_post_accumulate_grad_hook": outside_hooks.register_late,
    "contiguous": _contiguous,
}  # fmt: skip


def call_method(c: Capture, method, args, kwargs):
    """A call of a tensor's method."""
    p, n = method.proxy, method.name
    if type(p) is AnyProxy:
        return opaque_values.method(c, p, n, all_lifted(c, args), all_lifted(c, kwargs))
    if n in SPECIAL_METHODS:
        return SPECIAL_METHODS[n](c, None, [p, *args], kwargs)
    if c.tensors.dtensors and (result := dtensors.call_method(c, p, n, args, kwargs)) is not NULL:
        return result
    if n == "numpy" or n == "__array__":
        return host_lines.to_numpy(c, c.recorder.latest(p))
    if n == "size":
        shape = _shape(c.recorder.latest(p))
        dim = args[0] if args else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    function = METHODS.get(n)
    of_host = host_lines.holds_host_values(c, *args, *kwargs.values(), numbers=False)
    if function is None or c.tensors.holds_opaque or "requires_grad" in kwargs or of_host:
        function = getattr(torch.Tensor, n)
        return record(c, function, [p, *args], kwargs)
    c.synchronize()
    method = getattr(torch.Tensor, n)
    typed = method in _OF_DATA
    args, kwargs = [lifted(c, p), *all_lifted(c, args, typed=typed)], all_lifted(c, kwargs, typed=typed)
    if not typed:
        args, kwargs = with_numbers(method, args, kwargs)
    return checked(c, method, args, kwargs, lambda: function(*args, **kwargs))


def all_lifted(c: Capture, values, *, typed: bool = False) -> Any:
    """Arguments: snapshots read, real tensors lifted, lists and dicts copied, since the program may change its own
    later. numpy's numbers become Python's, unless `typed`."""
    t = type(values)
    if t is dict:
        return {k: lifted(c, v, typed=typed) for k, v in values.items()}
    return [lifted(c, v, typed=typed) for v in values]


def _means_nothing(c: Capture, v, t: type) -> bool:
    """Whether a value is an object of the user's of which PyTorch can make neither a number nor a tensor, or by asking
    special methods in Python."""
    if is_library(t.__module__) or issubclass(t, (int, float, complex)):
        return False
    if any(in_python(type_attribute(t, f"__{name}__")) for name in ("index", "float", "int", "getitem", "array")):
        return True
    names = ("getitem", "array", "index", "float")
    function = issubclass(t, (type, types.FunctionType, types.MethodType, *BUILTINS))
    return not function and plain_base(t) is None and all(type_attribute(t, f"__{name}__") is NULL for name in names)


def _elements(c: Capture, v, t: type) -> list | None:
    """The elements of a sequence of the user's that PyTorch makes a tensor of: how often it asks its methods for them
    makes no difference."""
    methods = [c.slot(t, name) for name in ("__len__", "__getitem__")]
    others = any(c.slot(t, f"__{name}__") for name in ("iter", "index", "float", "int", "array"))
    if others or not all(method and callbacks.is_pure(method) for method in methods):
        return None
    elements = [x for x in c.steps(v)]  # which asks for no length
    return elements if c.truth(c.compare("==", c.call(len, [v], {}), len(elements))) else None


def lifted(c: Capture, v, *, typed: bool = False):
    """One argument of an operation, see `all_lifted`."""
    t = type(v)
    if t is TensorProxy and c.recorder.memory is not None and c.recorder.memory.formed:
        return c.recorder.latest(v)  # in the shape that it has now
    if t is TensorProxy or t is int or t is float or v is None or t is bool or t is str:
        return v
    if isinstance(v, torch.Tensor) or t is Condition:
        return c.lift(v)
    if isinstance(v, Proxy):
        return v
    if t in CONTAINERS or t is tuple or t is slice:
        expose(c, v, opened=True)
        return _lifted(c, v, typed) if t in (list, tuple, dict, slice) else v
    takes_over = type_attribute(t, "__torch_function__") is not NULL
    if isinstance(v, (list, tuple)) and t not in (Size, torch.Size) and not takes_over:
        expose(c, v, called=f"an operation that is given a {t.__name__}", opened=True)
        return _lifted(c, v if type_attribute(t, "_make") is not NULL else list(v), typed)
    if typed and (elements := _elements(c, v, t)) is not None:
        return lifted(c, elements, typed=True)
    if not takes_over and plain_base(t) in _NUMBERS:
        check_asked(c, t)
        if not typed:
            return plain_base(t).__pos__(v)  # PyTorch asks no method of the class
    return _object(c, v, t, typed)


_NUMBERS = (int, float, complex)


def check_asked(c: Capture, t: type) -> None:
    """Refuse an object whose attributes are the user's code: PyTorch asks what is given beside a tensor, and is no
    plain number, for `__torch_function__`."""
    for name in ("__getattr__", "__getattribute__"):
        if c.slot(t, name) is not None:
            c.refuse(f"PyTorch asks a {t.__name__}, which has a {name}, for more than is seen", "call it outside")


def _object(c: Capture, v, t: type, typed: bool):
    if type_attribute(t, "__torch_function__") is not NULL or _means_nothing(c, v, t):
        c.refuse(f"a {t.__name__} goes into an operation", "give it tensors and numbers")
    known = t is not torch.Generator or v is torch.default_generator
    if not known and id(v) not in c.world.sources and id(v) not in c.tensors.generators:
        c.refuse(
            "the program creates a torch.Generator in a transform of torch.func or in a checkpoint",
            "create it outside of that",
        )
    return v.item() if isinstance(v, numpy.generic) and not typed else v


def _lifted(c: Capture, v, typed: bool, deep: int = 0):
    """A container among the arguments, copied, and what it holds. deep: in how many others it is."""
    t, inside = type(v), deep + 1
    if inside > _DEEPEST:
        c.refuse(
            "a list that contains itself, or that has more dimensions than tensors can have, goes into an operation",
            _FLAT,
        )
    if isinstance(v, list):
        return [_lifted(c, x, typed, inside) for x in list.__iter__(v)]
    if t is dict:
        return {k: _lifted(c, x, typed, inside) for k, x in v.items()}
    if t is tuple:
        return tuple(_lifted(c, x, typed, inside) for x in v)
    return v.item() if isinstance(v, numpy.generic) and not typed else map_structure(c.lift, v)


_DEEPEST, _FLAT = 130, "give it tensors, numbers, and lists of these"  # PyTorch looks no deeper than 128 lists
# functions that make tensors of their arguments
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


def operation(c: Capture, name: str, *operands):
    """A special method of a tensor, by its name."""
    c.synchronize()
    operands = all_lifted(c, operands)
    return checked(c, getattr(torch.Tensor, name), operands, {}, lambda: METHODS.call(name, *operands))


def record(c: Capture, function, args, kwargs) -> Any:
    """A call of a torch function."""
    if function in NOT_OPERATIONS:
        recorded = function(*args, **kwargs)
        c.synchronize()
        return recorded
    if function in LAYOUT_QUESTIONS:
        return answer(c, function, args, kwargs)
    c.synchronize()
    if kwargs.get("requires_grad") is True and function is not torch.Tensor.requires_grad_:
        return leaves.leaf(c, record(c, function, args, {k: v for k, v in kwargs.items() if k != "requires_grad"}))
    typed = function in _OF_DATA
    args, kwargs = all_lifted(c, args, typed=typed), all_lifted(c, kwargs, typed=typed)
    if host_lines.holds_host_values(c, *args, *kwargs.values(), numbers=False):
        args, kwargs = numpy_values.as_operands(c, args, kwargs, typed)
        if host_lines.holds_host_values(c, *args, *kwargs.values(), numbers=False):
            return host_lines.run(c, function, args, kwargs)
    if not typed:
        args, kwargs = with_numbers(function, args, kwargs)
    if opaque_values.involved(c, (args, kwargs)):
        return opaque_values.apply(c, function, args, kwargs)
    if lookup(function) is not None:
        return checked(c, function, args, kwargs, lambda: call_torch(function, tuple(args), kwargs))
    getter = plain_attribute(function, "__self__") if plain_attribute(function, "__name__", "") == "__get__" else None
    if getter is not None and args and type(args[0]) is TensorProxy:
        return tensor_attribute(c, args[0], getter.__name__)
    if isinstance(function, (types.MethodDescriptorType, types.BuiltinFunctionType)):
        result = checked(c, function, args, kwargs, lambda: call_torch(function, tuple(args), kwargs))
        return opaque_values.note(c, result)
    try:
        return opaque_values.note(c, call_torch(function, tuple(args), kwargs))
    except Exception as error:  # noqa: BLE001 - of an operator of the user's, without a rule for fake tensors or with one
        if interrupts(error) or custom_operator(function) is None or written_by(function, tuple(args), kwargs):
            raise
        left = compat.function_modes() < c.modes.functions  # PyTorch has taken the mode off to call this
        with RecordingMode(c) if left else contextlib.nullcontext():
            return c.call_operator(function, args, kwargs, error)


def _named(names: str) -> set:
    functions = set()
    for n in names.split():
        f = getattr(compat.C, n, None) or getattr(torch, n, None)
        if f is not None:
            functions.add(f)
    return functions


# functions that torch-function modes see and that are no operations
NOT_OPERATIONS = _named(
    "_set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled autocast_increment_nesting "
    "autocast_decrement_nesting clear_autocast_cache "
    "is_autocast_enabled get_autocast_dtype is_autocast_cache_enabled get_default_dtype is_grad_enabled "
    "_is_torch_function_all_disabled device dtype Generator "
    "get_default_device set_default_dtype promote_types finfo iinfo"
) | {torch.Tensor.__repr__, torch.get_default_device}  # fmt: skip


def type_of(c: Capture, a) -> type:
    """The class that user code believes a value has."""
    if type(a) is TensorProxy:
        return kind_of(c, a)
    if type(a) is HostProxy:
        return a.kind
    if type(a) is AnyProxy and isinstance(a.example, torch.Tensor):
        return type(a.example)
    if type(a) is TensorMethod:
        return a.__class__
    return a.python_type if isinstance(a, NumberProxy) else _STANDING_FOR.get(type(a), type(a))


class _ByItems:
    """A class whose objects Python iterates by their items."""

    __getitem__ = None


_STANDING_FOR = {Condition: bool, Size: torch.Size, sequences.Items: type(iter(_ByItems()))}  # pyright: ignore


def is_unknown_text(c: Capture, *values) -> bool:
    """Whether the text of one of the values is known only when the program runs. That of an array depends on NumPy's
    settings."""
    unknown = (numpy.ndarray, numpy.generic, TensorProxy, TensorMethod, *([] if c.recording.outer else [NumberProxy]))
    return (
        any(isinstance(v, unknown) for v in parts_of(*values))
        or host_lines.holds_host_values(c, *values)
        or keeps(values, unknown)
    )


class Shown(StandIn):
    """An object of which native code makes a text."""

    __slots__ = ()

    def __str__(self):
        return self._known(string(self.host, self.value))

    def __repr__(self):
        return self._known(representation(self.host, self.value))

    def __format__(self, spec):
        return self._known(formatted(self.host, self.value, spec))

    def _known(self, text: Any) -> Any:
        if type(text) is HostProxy:
            self.host.refuse(f"a text is made of the text of a {type(self.value).__name__} that depends on data")
        return text


def shown(c: Capture, value: Any) -> Any:
    """A value for native code that makes a text of it."""
    return value if type(value) in PLAIN else Shown(c, value)


def formatted_text(c: Capture, text: str, values):
    """`text % values`."""
    if isinstance(values, dict) and type_attribute(type(values), "__missing__") is not NULL:
        values = {k: c.getitem(values, k) for k in re.findall(r"%\((.*?)\)", text)}
    expose(c, values)
    if is_unknown_text(c, values):
        return host_lines.text(c, text.__mod__, values)

    def formattable(value: Any) -> Any:
        return as_text(c, value, str.__mod__) if _TAKES_NUMBERS.search(text) else shown(c, value)

    if isinstance(values, tuple):
        return text % tuple(map(formattable, tuple.__iter__(values)))
    if isinstance(values, dict) and "%(" in text:
        return text % {k: formattable(v) for k, v in dict.items(values)}
    return text % formattable(values)


_TAKES_NUMBERS = re.compile(r"%(\([^)]*\))?[-#0 +]*[\d*]*(\.[\d*]*)?[hlL]?[diouxXeEfFgGc]")


_WARNED: dict = {}  # once a site


def sharp_edge(c: Capture, reason: str) -> None:
    """Something that a compiled program cannot repeat: listed, warned about, or an error, by option."""
    location = c.user_location()
    where = f"{location[0]}:{location[1]}" if location else "unknown place"
    text = f"{reason}, at {where}"
    option = c.request.options.sharp_edges
    if option is SHARP_EDGES_OPTIONS.ERROR:
        raise SharpEdgeError(text)
    if c.tensors.passed_twice:
        raise DependsOnIdentity(text)  # it could not be captured again later
    if text not in c.sharp_edges:
        c.sharp_edges.append(text)
        if option is SHARP_EDGES_OPTIONS.WARN:
            file, line = location[:2] if location else ("unknown place", 0)
            text = with_section(text, SharpEdgeWarning)
            warnings.warn_explicit(text, SharpEdgeWarning, file, line, registry=_WARNED)
