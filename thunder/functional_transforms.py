"""Functional transforms: `grad`, `value_and_grad`, `vjp`, `jvp`, `vmap`, each from a plain or compiled function to a
compiled one.

They compose with each other and with `thunder.jit`, and may be called inside of compiled functions; what torch.func
calls `grad`, `vjp`, `jvp` and `vmap` means the same there. A compiled function's executors and options are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thunder.api import jit
from thunder.capture.library.functional import JVP, VJP, Grad, Transformed, VMap
from thunder.compiled import Compiled, compiled_of
from thunder.errors import OptionError
from thunder.transforms.base import has_hook


def _compiled(fn: Callable, transform: Callable[[Callable], Transformed], **options: Any) -> Compiled:
    """The compiled function of a transformed function, with the options of what was compiled."""
    compiled = compiled_of(fn) or compiled_of(jit(fn))
    assert compiled is not None, "thunder.jit compiles"
    changing = [
        type(t).__name__
        for t in compiled.options.transforms
        if has_hook(t, "transform_module") or has_hook(t, "transform_traces_pre_prologue")
    ]
    if changing:
        raise OptionError(
            f"{compiled!r} was compiled with {', '.join(changing)}, which changes what would be differentiated or "
            "mapped: transform the plain function"
        )
    return Compiled(transform(compiled.fn), dataclasses.replace(compiled.options, used_compile_options={}, **options))


def grad(fn: Callable, argnums: int | str | tuple | None = None, has_aux: bool = False) -> Any:
    """The gradient of `fn`, a compiled function of the same arguments.

    argnums None: the flat list of the gradients of all floating-point tensors among the arguments, and of the tensors
    that fn reads itself and that require grad (parameters), without those that the result does not depend on. fn may
    return any tensors: the cotangents are ones. Whether an argument requires grad makes no difference, and the
    gradients do not require grad.

    argnums a position, a keyword, or a tuple of those: fn returns one scalar tensor; the gradients have the structure
    of the arguments named (a tuple of them for a tuple), zeros where the result does not depend on a tensor. They can
    be differentiated further.

    has_aux: fn returns (result, aux), and the gradient function (gradients, aux).
    Raises the errors of torch.func.grad where the result is no scalar or an argument cannot be differentiated.
    """
    return _compiled(fn, lambda f: Grad(f, argnums, has_aux), **_detached(argnums))


def value_and_grad(fn: Callable, argnums: int | str | tuple | None = None, has_aux: bool = False) -> Any:
    """As `grad`, with fn's value: (value, gradients), with has_aux ((value, aux), gradients)."""
    return _compiled(fn, lambda f: Grad(f, argnums, has_aux, value=True), **_detached(argnums))


def _detached(argnums) -> dict:
    return {"disable_torch_autograd": True} if argnums is None else {}


def vjp(fn: Callable) -> Any:
    """A compiled function (primals, cotangents, **kwargs) -> (result, gradients): reverse mode, the cotangents times
    the Jacobian.

    primals: the tuple of fn's positional arguments, or one argument by itself. cotangents: of the structure, shapes and
    dtypes of fn's result; None is zero. gradients: of the structure of primals, None in the places of what is no
    floating-point tensor; where keyword arguments hold floating-point tensors, a tuple with a dict of their gradients
    at the end. Raises RuntimeError where the cotangents do not fit.
    """
    return _compiled(fn, VJP)


def jvp(fn: Callable) -> Any:
    """A compiled function (primals, tangents, **kwargs) -> (result, tangent): forward mode, the Jacobian times the
    tangents.

    primals: the tuple of fn's positional arguments, structures of floating-point tensors. tangents: of the same
    structure, shapes and dtypes. tangent: of the structure of the result. Raises RuntimeError where the tangents do not
    fit.
    """
    return _compiled(fn, JVP)


def vmap(fn: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error") -> Any:
    """A compiled function that maps `fn` over a dimension of its positional arguments.

    in_dims, out_dims: the mapped dimension of each argument and each result: an int or None (not mapped) for all, or a
    structure of them. Keyword arguments are not mapped. randomness: of random operations: "different" numbers
    for each element, the "same" for all, or "error". Raises the errors of torch.func.vmap where dims or sizes do not
    fit.
    """
    return _compiled(fn, lambda f: VMap(f, in_dims, out_dims, randomness))
