"""Functions of Python and PyTorch that run on the host and take containers: the program itself changes and reads these
containers."""

from __future__ import annotations

import operator
import pickle
import random
import types
import warnings

import numpy
import torch

from thunder.capture import host_lines, operations
from thunder.capture.interface import Capture
from thunder.capture.native_calls import call_native
from thunder.core.host_calls import warn_at
from thunder.core.proxies import FloatProxy, IntegerProxy, TensorProxy, concrete
from thunder.interpreter import format_location
from thunder.interpreter.attributes import parts_of
from thunder.options import SHARP_EDGES_OPTIONS

MOST = 64  # elements of a list that is shuffled: each is a host call


def _shuffled(values: tuple) -> list:
    shuffled = list(values)
    random.shuffle(shuffled)
    return shuffled


def _shuffled_by_numpy(values: tuple) -> list:
    shuffled = list(values)
    numpy.random.shuffle(shuffled)
    return shuffled


_GENERATORS = (  # which the functions of the two modules draw from
    (random.shuffle.__self__, _shuffled),  # type: ignore[attr-defined]
    (numpy.random.shuffle.__self__, _shuffled_by_numpy),
)


def _shuffle(c: Capture, f, args, kwargs):
    """`random.shuffle(x)` and NumPy's: numbers come from the host; of anything else each order is a path."""
    generator, *operands = *args, *(kwargs[n] for n in ("x",) if n in kwargs)
    if len(operands) != 1 or len(operands) + 1 != len(args) + len(kwargs):
        return f(*args, **kwargs)  # raises
    (x,) = operands
    draw = next((f for g, f in _GENERATORS if g is generator), None)
    if draw is None or type(x) is not list or len(x) > MOST:
        return host_lines.run_impure(c, types.MethodType(f, generator), operands, {})
    host_lines.warn_of(c, random.shuffle)
    c.materialize(x)
    numbers = all(type(v) in (int, float, IntegerProxy, FloatProxy) for v in x)
    operands = tuple(x) if numbers else tuple(range(len(x)))
    drawn = host_lines.run(c, draw, (operands,), effect="random")
    shuffled = [host_lines.run(c, operator.getitem, (drawn, i)) for i in range(len(x))]
    x[:] = shuffled if numbers else [x[concrete(i)] for i in shuffled]
    return None


def _written(c: Capture, f, args, kwargs):
    """`torch.save` and `pickle.dumps`, of tensors as the program leaves them."""
    inside = [p for p in parts_of(c.materialize(args[0])) if type(p) is TensorProxy]
    if any(c.recorder.latest(p).requires_grad for p in inside):
        c.refuse(f"{f.__name__}() is given a tensor that requires grad", "give it x.detach()")
    if f is pickle.dumps and inside:
        return host_lines.run(c, f, args, kwargs, pure=True)
    return call_native(c, f, args, kwargs)


def _warn(c: Capture, f, args, kwargs):
    """`warnings.warn`, with the user's line. Where the program has its own filters, it may also catch the warning."""
    if warnings.filters is not c.filters:
        if host_lines.holds_host_values(c, *args, *kwargs.values()):
            c.refuse("the program warns with a text that depends on data, and may catch the warning", "print it")
        return call_native(c, f, args, kwargs)
    if c.request.options.sharp_edges is SHARP_EDGES_OPTIONS.ERROR:
        c.sharp("warnings.warn() runs on the host")

    def bound(message, category=None, stacklevel=1, source=None, **others):
        return message, category, concrete(stacklevel)

    message, category, level = bound(*args, **kwargs)
    if issubclass(kind := operations.type_of(c, message), Warning):
        message, category = c.call(str, [message], {}), kind
    frames = c.stack_of_frames
    if 0 < level <= len(frames):
        code, module = frames[-level].fn.__code__, frames[-level].fn.__globals__.get("__name__", "")
        file, line = code.co_filename, format_location((code, frames[-level].ip))[1]
    else:
        file, line, module = str(level - len(frames) - 1), 0, ""
    return host_lines.run(c, warn_at, (message, category or UserWarning, file, line, module), effect="outside")


def handlers() -> dict:
    """By function."""
    return {
        operator.call: lambda c, f, a, k: c.call(a[0], a[1:], k) if a else f(),
        warnings.warn: _warn, random.Random.shuffle: _shuffle, numpy.random.shuffle.__func__: _shuffle,
        torch.save: _written, pickle.dumps: _written,
        pickle.loads: lambda c, f, args, kwargs: host_lines.run(c, f, args, kwargs),
    }  # fmt: skip
