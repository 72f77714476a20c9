"""Objects that native code makes: of a class, and as copies."""

from __future__ import annotations

import collections
import copyreg
import itertools
import types
import weakref

import torch

from thunder.capture import callbacks, eager
from thunder.capture.expose import expose
from thunder.capture.interface import Capture
from thunder.capture.items import pairs
from thunder.capture.native import ENUM
from thunder.capture.native_calls import call_native, iterated, reaches, stepping
from thunder.capture.operations import record, size
from thunder.capture.policy import Interpret, folded, is_library, native_row, read_of_library
from thunder.capture.watched import check_watched
from thunder.core.proxies import Size
from thunder.core.symbol import current_recorder
from thunder.interpreter import NULL, Host, construction
from thunder.interpreter.attributes import plain_attribute, stands_alone, type_attribute
from thunder.ops import lookup
from thunder.ops.families import random
from thunder.ops.torch_types import from_tensor_device


def _refuse_steps(c: Capture, o) -> None:
    steps = "__iter__" if isinstance(o, list) else "items" if isinstance(o, dict) else ""
    if steps and c.slot(type(o), steps) is not None:
        c.refuse(f"copying a {type(o).__name__} calls its {steps} natively", "copy it outside")


def reduced(c: Capture, f, args, kwargs):
    """`__reduce_ex__`, by which `copy` makes copies: the attributes of an object as the program sees them. Of special
    methods of the user's only those are called natively that `object.__reduce_ex__` reads attributes by."""
    o = args[0] if plain_attribute(f, "__self__") is None else f.__self__
    c.materialize(o)
    check_watched(c, o, "__reduce_ex__", f"copying a {type(o).__name__}")
    if c.slot(type(type(o)), "__getattr__") and "__slotnames__" not in vars(type(o)):
        c.refuse(f"copying a {type(o).__name__} asks its metaclass's __getattr__ natively", "copy it outside")
    _refuse_steps(c, o)
    if (by_class := c.slot(type(o), "__reduce__")) is not None:
        return c.call(by_class, [o], {})
    state_of = c.slot(type(o), "__getstate__")
    by_class = any(c.slot(type(o), n) for n in ("__getnewargs__", "__getnewargs_ex__"))
    if state_of is not None and not by_class and stands_alone(type(o)) and args[-1:] >= [2]:
        return copyreg.__newobj__, (type(o),), c.call(state_of, [o], {}), None, None  # pyright: ignore[reportAttributeAccessIssue]
    if by_class or state_of is not None or not (id(o) in c.world.sources or callbacks.called_in(c, type(o))):
        return call_native(c, f, args, kwargs)
    reduction = Host.call_native(c, f, args, kwargs)
    state = reduction[2] if len(reduction) > 2 else None
    own = dict(c.materialize(c.load_attr(o, "__dict__"))) if hasattr(o, "__dict__") else None
    if type(state) is tuple and type_attribute(type(o), "__reduce__") is not object.__reduce__:
        return call_native(c, f, args, kwargs)  # of a partial: the class says what its state is
    if type(state) is tuple:
        state = own, {n: c.load_attr(o, n) for n in state[1]}
    if not isinstance(o, torch.nn.Module):  # of which Python's code alone reads the state
        expose(c, own)
    if state is None or type(state) is dict:
        state = own or None  # as CPython says of an object without attributes
    return *reduction[:2], state, *reduction[3:]


def _member(c: Capture, cls, args, kwargs):
    """`Colour(value)`. A member of the class is found before its hash or equality is asked."""
    is_plain = type(cls).__call__ is type(ENUM).__call__
    return args[0] if is_plain and list(map(type, args)) == [cls] else call_native(c, cls, args, kwargs)


def new_reference(c: Capture, f, args, kwargs):
    """`weakref.ref.__new__`, by which subclasses make references."""
    _check_callback(c, args[1:])
    return call_native(c, f, args, kwargs)


def _check_callback(c: Capture, args) -> None:
    """A weak reference to an object of the program's own, which may die while the program is captured."""
    if len(args) < 2 or args[1] is None or id(args[1]) in c.fresh:
        return
    if id(args[0]) not in c.world.sources and not isinstance(args[0], (type, types.FunctionType, types.ModuleType)):
        c.refuse("a function from outside is to run when an object of the program is deleted", "keep the object")


def _is_read(method) -> bool:
    """Whether a method that makes an object is Python code that is interpreted, whatever it is given."""
    return type(method) is types.FunctionType and type(native_row(method).answer) is Interpret


def _check_finalizer(c: Capture, cls) -> None:
    if _is_read(type_attribute(cls, "__del__")) and not read_of_library(cls.__module__):
        c.refuse(
            f"a {cls.__qualname__} that the program creates has a finalizer, which runs when the object is deleted",
            "make it outside",
        )


def _generator(c: Capture, args, kwargs) -> torch.Generator:
    """A generator that the program makes, which is a value of the program."""
    generator = torch.Generator(*args, **kwargs)
    if current_recorder() is c.recorder and not c.recording.outer and not c.recorder.context.checkpoint:
        c.world.hold(generator)
        c.tensors.generators[id(generator)] = random.new_generator(from_tensor_device(generator.device))
    return generator


def construct_object(c: Capture, cls, args, kwargs):
    """`cls(*args, **kwargs)` of a program: natively, as an operation, or by the class's own Python code."""
    if (instance := _construct_known(c, cls, args, kwargs)) is not NULL:
        return instance
    if issubclass(cls, torch.Tensor) or cls is torch.Size:
        is_operation = issubclass(cls, torch.Tensor) and cls is not torch.nn.Parameter
        return (record if is_operation else call_native)(c, cls, args, kwargs)
    _check_finalizer(c, cls)
    new, init = c.lookup(cls, "__new__"), c.lookup(cls, "__init__")
    new = plain_attribute(new, "__func__", new)
    interpreted_new = _is_read(new)
    interpreted_init = _is_read(init) or type(init) is types.FunctionType and reaches(c, args, kwargs)
    custom_meta = c.slot(type(cls), "__call__") is not None and not is_library(type(cls).__module__)
    if not (interpreted_new or interpreted_init or custom_meta):
        return call_native(c, cls, args, kwargs)
    return construction.construct(c, cls, args, kwargs)


def _construct_known(c: Capture, cls, args, kwargs):
    """The object of a class that thunder knows; NULL for others."""
    if cls is torch.Generator:
        return _generator(c, args, kwargs)
    if cls is weakref.ref:
        _check_callback(c, args)
    if lookup(cls) is not None:
        return record(c, cls, args, kwargs)
    if folded(cls).steps:
        return call_native(c, cls, stepping(c, cls, None, args), kwargs)
    if cls is itertools.chain:
        return call_native(c, cls, [iterated(c, a) for a in args], kwargs)
    if cls is dict or cls is collections.OrderedDict:
        return call_native(c, cls, [pairs(c, a) for a in args], kwargs)
    if cls is torch.Tensor and len(args) == 1 and isinstance(args[0], (torch.Size, Size)):
        return c.call(torch.empty, args, {"device": "cpu"})
    if cls is torch.Size and args:
        return size(tuple(c.iterate(args[0])))
    if issubclass(cls, ENUM):
        return _member(c, cls, args, kwargs)
    return eager.called(c, cls, args, kwargs) if cls in c.request.eager else NULL
