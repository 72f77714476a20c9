"""torch.func, and thunder's own transforms, called inside a captured program: the handlers of these calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

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
    opened,
    selected_arguments,
)
from thunder.capture.library.vmap import VMap
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

__all__ = ["HANDLERS", "BY_NAME", "KINDS"]


def _call_transformed(c, f, args, kwargs):
    """A call of a transformed function."""
    return f.apply(c, args, kwargs)


class PullbackFunction:
    """What `torch.func.vjp` returns beside the function's result: from cotangents to gradients."""

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

    def function(*values):
        now = dict(zip(selected, values, strict=True))
        return c.call(given["func"], [now.get(i, x) for i, x in enumerate(primals)], {})

    return made(c, JVP(cast(Callable, _Called(function)), given["has_aux"])).apply(
        c, (tuple(selected.values()), given["tangents"]), {}
    )


def _basis(c, f, args, kwargs):
    """The unit vectors of jacrev and jacfwd: for each tensor the columns of the identity that are its elements. PyTorch
    writes them into a view."""
    tensors, counts, *chunk_size = [*args, *kwargs.values()]
    if chunk_size not in ([], [None]):
        c.refuse("torch.func.jacrev with chunk_size", "leave chunk_size out: the whole Jacobian is computed at once")
    total, columns, start = sum(counts), [], 0
    for t, n in zip(tensors, counts, strict=True):
        whole = c.call(torch.eye, [total], {"dtype": to_torch_dtype(t.dtype), "device": to_torch_device(t.device)})
        columns.append(whole[:, start : start + n].reshape(total, *t.shape))
        start += n
    return tuple(columns)


def _basis_in_chunks(c, f, args, kwargs):
    return [_basis(c, f, args, kwargs)]


def _torch_vmap(c, f, args, kwargs):
    function, in_dims, out_dims, randomness, chunk_size, *given = args
    if chunk_size is not None:
        c.refuse("torch.func.vmap with chunk_size", "leave chunk_size out: the whole batch is computed at once")
    return made(c, VMap(function, in_dims, out_dims, randomness)).apply(c, given, kwargs)


class _Called:
    """A function of ours in the place of one of the program's: it runs natively, and calls back what the program
    wrote."""

    def __init__(self, function: Callable):
        self.function = function

    def apply(self, c, args, kwargs):
        return self.function(*args, **kwargs)


def _torch_vjp_in_public(c, f, args, kwargs):
    return _torch_vjp(c, f, args, {"has_aux": False, **kwargs})


def _torch_jvp_in_public(c, f, args, kwargs):
    return _torch_jvp(c, f, args, {"has_aux": False, **kwargs})


def _functional_call(c, f, args, kwargs):
    """`torch.func.functional_call`: while the module is called, the given tensors are what its names mean."""
    names = ("module", "tensors", "args", "kwargs")
    given = dict(zip(names, args)) | {
        "tensors" if k == "parameter_and_buffer_dicts" else k: v for k, v in kwargs.items()
    }
    module, tables = given["module"], opened(c, given["tensors"])
    if given.get("strict") or hasattr(type(module), "_lc_cd"):
        c.refuse(
            "torch.func.functional_call with strict=True, or of a compiled module",
            "leave strict out, and give the module itself",
        )
    wanted = {k: v for table in ([tables] if isinstance(tables, dict) else tables) for k, v in table.items()}
    if not isinstance(tables, dict) and len(wanted) != sum(map(len, tables)):
        raise ValueError("keys appeared in multiple dictionaries; behavior of functional call is ambiguous")
    with _replaced(c, module, _with_ties(c, module, wanted) if given.get("tie_weights", True) else wanted):
        positional = given.get("args", ())
        positional = () if positional is None else positional if isinstance(positional, tuple) else (positional,)
        return c.call(module, list(positional), dict(given.get("kwargs") or {}))


def _with_ties(c, module, wanted: dict) -> dict:
    """The tensors by name, and under the other names of the tensors that they replace."""
    real: dict[str, Any] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    names: dict[int, list[str]] = {}
    for n, t in real.items():
        names.setdefault(id(t), []).append(n)
    found = dict(wanted)
    for name, value in wanted.items():
        if name not in real:
            c.refuse(
                f"torch.func.functional_call replaces {name!r}, which the module does not have",
                "give names of its parameters and buffers",
            )
        for other in names[id(real[name])]:
            if found.setdefault(other, value) is not value:
                raise ValueError(
                    f"functional_call got multiple values for keys {names[id(real[name])]}, which are tied. Consider "
                    "using tie_weights=False"
                )
    return found


@contextmanager
def _replaced(c, module, wanted: dict) -> Iterator[None]:
    """Attributes of a module and its children mean other values inside the block."""
    before, missing = {}, object()
    for name, value in wanted.items():
        *path, leaf = name.split(".")
        owner = functools.reduce(c.load_attr, path, module)
        c.keep[id(owner)] = owner
        before[id(owner), leaf] = (c.writes.overlay.get((id(owner), leaf), missing), value)
        c.writes.overlay[id(owner), leaf] = value
    try:
        yield
        if any(c.writes.overlay.get(key) is not value for key, (_, value) in before.items()):
            c.refuse(
                "a module called by torch.func.functional_call replaces a parameter or buffer of its own",
                "return the new value",
            )
    finally:
        for key, (old, _) in before.items():
            if old is missing:
                c.writes.overlay.pop(key, None)
            else:
                c.writes.overlay[key] = old


HANDLERS = {
    torch.func.vjp: _torch_vjp_in_public,
    torch.func.jvp: _torch_jvp_in_public,
    torch.func.functional_call: _functional_call,
}
HANDLERS |= {
    function: handler
    for name, handler in {
        "grad": _torch_grad, "grad_and_value": _torch_grad_and_value, "vjp": _torch_vjp, "jvp": _torch_jvp,
        "vmap": _torch_vmap, "basis": _basis,
        "basis_in_chunks": _basis_in_chunks,
    }.items()
    if (function := compat.functorch_implementations().get(name)) is not None
}  # fmt: skip


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
KINDS = dict.fromkeys((Grad, VJP, JVP, VMap, PullbackFunction, _Called), _call_transformed)
