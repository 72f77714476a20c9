"""Calls of PyTorch's that are run on examples first: PyTorch's errors about types and shapes of the arguments are
raised where the program may handle them, in a `try`, and not when the compiled program runs; those about objects that
no operation knows are raised everywhere."""

from __future__ import annotations

import functools
import types

import numpy
import torch

from thunder import compat
from thunder.capture import callbacks
from thunder.capture.expose import keeps
from thunder.capture.interface import Capture
from thunder.capture.library import dtensors
from thunder.capture.native import PRIMITIVE
from thunder.capture.tensors import is_leaf, shows_leaf
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, map_structure, number_value, numbers_in, proxies_in
from thunder.core.signals import interrupts
from thunder.core.symbol import OpTags
from thunder.errors import ThunderError
from thunder.interpreter.attributes import plain_attribute
from thunder.ops import lookup
from thunder.ops.infer import as_torch
from thunder.ops.torch_types import to_torch_dtype

_FEW = 1 << 16  # elements of an example


def checked(c: Capture, function, args, kwargs, run):
    """`run()`, which records a call, with PyTorch's own errors where the program may handle one, and about strange
    arguments. Results of DTensors are DTensors."""
    if c.tensors.dtensors or c.tensors.placements and not torch.is_grad_enabled():
        return dtensors.computed(c, function, args, kwargs, lambda: _checked(c, function, args, kwargs, run))
    return _checked(c, function, args, kwargs, run)


def _checked(c: Capture, function, args, kwargs, run):
    """The result of an operation; where the program may handle its error, PyTorch's own is raised."""
    if not is_tried(c) and not any(map(_is_strange, (*args, *kwargs.values()))):
        return run()
    error = _known_error(c, function, args, kwargs)
    if error is not None:
        for number in numbers_in((args, kwargs), []):
            number.concrete()  # another number may be no error
        raise error
    try:
        return run()
    except ThunderError:
        raise
    except Exception as error:  # noqa: BLE001 - the program is not to handle an error of thunder's own
        if interrupts(error):
            raise
        c.refuse(
            f"{plain_attribute(function, '__name__', function)}() in a `try` fails, which PyTorch does not: {error}",
            "call it outside of the `try`",
        )


def _is_strange(x) -> bool:
    """Whether an argument is an object of a class that is neither Python's for values nor PyTorch's or NumPy's."""
    t = type(x)
    if t in _USUAL or isinstance(x, (Proxy, NumberProxy)):
        return False
    return t.__module__.split(".")[0] not in ("torch", "thunder", "numpy")


_USUAL = {*PRIMITIVE, list, tuple, dict, type, types.FunctionType}


def is_tried(c: Capture) -> bool:
    """Whether a frame of the program handles exceptions where it stands."""
    for frame in c.stack_of_frames:  # for each operation: no generator
        if frame.record.catches and frame.record.handles(frame.ip):
            return True
    return False


def _known_error(c: Capture, function, args, kwargs) -> Exception | None:
    """`_error`, found once for arguments of the same types, shapes and values: layers repeat each other's calls."""
    try:
        key = function, _described(c, list(args)), _described(c, dict(kwargs))
        if key in c.known.examples:
            return c.known.examples[key]
    except TypeError:  # an argument that cannot be hashed
        return _error(c, function, args, kwargs)
    except _Unknown:
        return None
    error = _error(c, function, args, kwargs)
    if error is None:  # an exception is raised once
        c.known.examples[key] = None
    return error


def _described(c: Capture, x):
    """A key of the arguments for examples: types, shapes and values."""
    t = type(x)
    if t is TensorProxy:
        of_leaf = x.requires_grad and (is_leaf(c, x), shows_leaf(c, x))
        return t, tuple(_number(c, n) for n in x.shape), x.dtype, x.requires_grad, of_leaf
    if t in (list, tuple):
        return t, *(_described(c, part) for part in x)
    if t is dict:
        return t, *((k, _described(c, part)) for k, part in x.items())
    return t, _number(c, x)


def _error(c: Capture, function, args, kwargs) -> Exception | None:
    """The error that PyTorch raises for zeros and ones alike, so that it is not for the numbers in the tensors. They
    are no state of a generator. For what a mask or an index selects they prove nothing: that error is raised for
    tensors without numbers, too."""
    symbol = lookup(function) if type(function) is types.FunctionType else None
    if OpTags.RANDOM_OP in getattr(symbol, "tags", ()) and TensorProxy in map(type, args):
        return None
    tensors = [x for x in proxies_in((args, kwargs), []) if isinstance(x, TensorProxy)]
    selects = len(tensors) > 1 and any(x.dtype.category < 2 for x in tensors)
    errors = [_error_on(c, make, function, args, kwargs) for make in (torch.zeros, _ones)]
    if None in errors or type(errors[0]) is not type(errors[1]):
        return None
    if selects and _error_on(c, _without_numbers, function, args, kwargs) is None:
        return None
    return errors[0]


def _error_on(c: Capture, make, function, args, kwargs) -> Exception | None:
    """The error that PyTorch raises for examples of the arguments; None where there is none, or no example."""
    with compat.probing(torch.is_grad_enabled(), draws=True):
        try:
            operands = map_structure(functools.partial(_example, c, make), (list(args), dict(kwargs)))
        except (_Unknown, TypeError):  # the second of a container whose iteration the user wrote
            return None
        try:
            function(*operands[0], **operands[1])
            return None
        except Exception as error:  # noqa: BLE001 - whatever PyTorch raises
            return error.with_traceback(None)


class _Unknown(Exception):
    """There is no example of an argument."""


def _number(c: Capture, x):
    """A number as it is in the call that is captured."""
    if not isinstance(x, NumberProxy) or not x.unbacked:
        return number_value(x)
    constant = x.known()
    if constant is None and (constant := c.path.at_capture(x)) is None:
        raise _Unknown
    return constant


_without_numbers = functools.partial(torch.empty, device="meta")


def _ones(shape: tuple, **options) -> torch.Tensor:
    return torch.eye(*shape[-2:], **options).expand(shape).clone() if len(shape) > 1 else torch.ones(shape, **options)


def _example(c: Capture, make, x):
    """A value on which PyTorch can check an argument: a tensor of the same kind, a number of the call."""
    if isinstance(x, NumberProxy):
        return _number(c, x)
    if type(x) is not TensorProxy:
        # PyTorch asks a class or a function nothing that the user wrote
        plain = type(x) in PRIMITIVE or type(x) in (type, types.FunctionType)
        if plain or isinstance(x, (numpy.generic, numpy.ndarray)) or type(x).__module__ in _OF_THUNDER:
            return as_torch(x)
        if not _is_strange(x) or callbacks.called_in(c, type(x)) or keeps((x,), (Proxy, NumberProxy)):
            raise _Unknown
        return x
    shape = tuple(_number(c, n) for n in x.shape)
    if numpy.prod(shape) > _FEW:
        raise _Unknown
    tensor = make(shape, dtype=to_torch_dtype(x.dtype))
    if x.requires_grad:
        tensor.requires_grad_()
        if not is_leaf(c, x):
            with torch.enable_grad():
                tensor = tensor.view_as(tensor) if shows_leaf(c, x) else tensor.clone()
    return tensor


_OF_THUNDER = ("thunder.core.dtypes", "thunder.core.devices")
