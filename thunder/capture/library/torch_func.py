"""thunder's own functional transforms, called inside a captured program, and `torch.func.linearize`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from thunder.capture.interface import Capture
from thunder.capture.library.functional import JVP, VJP, Grad, VMap
from thunder.capture.library.levels import flat_gradients
from thunder.core.symbol import OpTags


def _call_transformed(c: Capture, f, args, kwargs):
    """A call of a transformed function."""
    flat = type(f) is Grad and f.argnums is None
    return flat_gradients(c, f, args, kwargs) if flat else c.enter(type(f).eager, [f, *args], kwargs)


class PushforwardFunction:
    """The second result of `torch.func.linearize`: a function from tangents to those of the results. What it computes
    of the function again is merged with the first result's operations."""

    def __init__(self, function: Callable, primals: tuple):
        self.function, self.primals = function, primals

    def eager(self, *tangents):
        return torch.func.jvp(self.function, self.primals, tangents)[1]


def _linearize(c: Capture, f, args, kwargs):
    function, *primals = args
    before = len(c.recorder.bound_symbols)
    result = c.call(function, primals, {})
    if any(OpTags.RANDOM_OP in operation.sym.tags for operation in c.recorder.bound_symbols[before:]):
        c.refuse("linearize of a function that draws random numbers, once for all tangents", "draw them outside of it")
    return result, c.note_own(PushforwardFunction(function, tuple(primals)))


HANDLERS = {torch.func.linearize: _linearize}


def _constructor(kind: Callable) -> Callable:
    def make(c: Capture, f, args, kwargs):
        return c.note_own(kind(*args, **kwargs))

    return make


# thunder's own transforms, called inside a program: by (module, name), since the module stands above this one
BY_NAME = {
    ("thunder.functional_transforms", name): _constructor(kind)
    for name, kind in {
        "grad": Grad,
        "value_and_grad": functools.partial(Grad, value=True),
        "vjp": VJP,
        "jvp": JVP,
        "vmap": VMap,
    }.items()
}
KINDS = dict.fromkeys((Grad, VJP, JVP, VMap, PushforwardFunction), _call_transformed)
