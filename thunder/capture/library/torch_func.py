"""torch.func, and thunder's own transforms, called inside a captured program: the handlers of these calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from thunder import compat
from thunder.capture.library.functional import (
    JVP,
    VJP,
    Differentiated,
    Grad,
    check_like,
    flatten,
    made,
    selected_arguments,
)
from thunder.capture.library.vmap import VMap
from thunder.core.symbol import OpTags


def _call_transformed(c, f, args, kwargs):
    """A call of a transformed function."""
    return f.apply(c, args, kwargs)


class PullbackFunction:
    """The second result of `torch.func.vjp`: a function from cotangents to gradients."""

    def __init__(self, at: Differentiated, argnums=None):
        self.at, self.argnums = at, argnums

    def apply(self, c, args, kwargs):
        (cotangents,) = args
        given, spec = flatten(c, cotangents)
        check_like(c, "the cotangents", given, spec, self.at.result, self.at.spec, "the function's result")
        found = tuple(self.at.structured(self.at.gradients(c, given)).values())
        return found[0] if isinstance(self.argnums, int) else found


def _torch_grad(c, f, args, kwargs):
    function, argnums, has_aux, given, keywords = args
    return made(c, Grad(function, argnums, has_aux)).apply(c, given, keywords)


def _torch_grad_and_value(c, f, args, kwargs):
    function, argnums, has_aux, given, keywords = args
    value, gradients = made(c, Grad(function, argnums, has_aux, value=True)).apply(c, given, keywords)
    return gradients, value


def _torch_vjp(c, f, args, kwargs):
    function, *primals = args
    argnums, has_aux = kwargs.get("argnums"), kwargs.get("has_aux", False)
    keys = range(len(primals)) if argnums is None else list(selected_arguments(argnums, primals, {})[0])
    at = Differentiated(c, made(c, VJP(function)), primals, {}, keys, has_aux)
    pull = made(c, PullbackFunction(at, argnums))
    return (at.value(), pull, at.outside(at.aux)) if has_aux else (at.value(), pull)


def _torch_jvp(c, f, args, kwargs):
    names = ("func", "primals", "tangents", "argnums")
    given = dict(zip(names, args)) | kwargs
    primals, argnums = given["primals"], given.get("argnums")
    if argnums is None:
        return made(c, JVP(given["func"], given["has_aux"])).apply(c, (primals, given["tangents"]), {})
    selected, _ = selected_arguments(argnums, primals, {})
    function = functools.partial(_filled, given["func"], primals, tuple(selected))
    return made(c, JVP(function, given["has_aux"])).apply(c, (tuple(selected.values()), given["tangents"]), {})


class PushforwardFunction:
    """The second result of `torch.func.linearize`: a function from tangents to those of the results. What it computes
    of the function again is merged with the first result's operations."""

    def __init__(self, function: Callable, primals: tuple):
        self.function, self.primals = function, primals

    def apply(self, c, args, kwargs):
        return made(c, JVP(self.function)).apply(c, (self.primals, tuple(args)), kwargs)[1]


def _torch_linearize(c, f, args, kwargs):
    function, *primals = args
    before = len(c.recorder.bound_symbols)
    result = c.call(function, primals, {})
    if any(OpTags.RANDOM_OP in operation.sym.tags for operation in c.recorder.bound_symbols[before:]):
        c.refuse("linearize of a function that draws random numbers, once for all tangents", "draw them outside of it")
    return result, made(c, PushforwardFunction(function, tuple(primals)))


def _filled(function, arguments, places, *values):
    """A function of some of its arguments. Interpreted, as the function is."""
    now = dict(zip(places, values, strict=True))
    return function(*[now.get(i, x) for i, x in enumerate(arguments)])


def _torch_vmap(c, f, args, kwargs):
    function, in_dims, out_dims, randomness, chunk_size, *given = args
    if chunk_size is not None:  # PyTorch's Python enters a level for each part
        return c.enter(f, args, kwargs)
    return made(c, VMap(function, in_dims, out_dims, randomness)).apply(c, given, kwargs)


HANDLERS = {
    function: handler
    for name, handler in {
        "grad": _torch_grad, "grad_and_value": _torch_grad_and_value, "vjp": _torch_vjp, "jvp": _torch_jvp,
        "vmap": _torch_vmap,
    }.items()
    if (function := compat.functorch_implementations().get(name)) is not None
} | {torch.func.linearize: _torch_linearize}  # fmt: skip


def _constructor(kind: Callable) -> Callable:
    def make(c, f, args, kwargs):
        return made(c, kind(*args, **kwargs))

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
KINDS = dict.fromkeys((Grad, VJP, JVP, VMap, PullbackFunction, PushforwardFunction), _call_transformed)
