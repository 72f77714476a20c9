"""Functions under functional transforms, in a captured program: `grad`, `vjp`, `jvp`, `vmap` of thunder and of
torch.func.

A program interprets PyTorch's Python code of torch.func, and the calls in it that enter and leave a level (`levels`).
So transforms compose with each other, in any order and depth, and with everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thunder import compat
from thunder.capture.expose import expose
from thunder.capture.interface import Capture
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import Recorder, current_recorder, recording, user_location
from thunder.errors import CaptureError

vjp: Callable[..., tuple] = torch.func.vjp  # how many it gives depends on has_aux


@contextmanager
def separate(c: Capture, grad_enabled: bool, decides: bool = False) -> Iterator[Recorder]:
    """Lines are recorded apart, in a grad mode of their own. decides: whether the call that is captured runs them as
    they are, so that the program may decide by their values."""
    outer, before = c.recorder, torch.is_grad_enabled()
    inner = Recorder(outer.context.replace(grad_enabled=grad_enabled), outer.location, outer.where)
    inner.memory = outer.memory
    c.recording.begin(inner)
    compat.set_grad_enabled(grad_enabled)
    inner.decide = outer.decide if decides else None
    try:
        with recording(inner):
            yield inner
    finally:
        c.recording.end()
        compat.set_grad_enabled(before)


def flatten(c: Capture, value) -> tuple[list, Any]:
    """(leaves, structure), with the values that tensors have now."""
    expose(c, value, opened=True)
    leaves, spec = compat.tree_flatten(value)
    return [
        c.recorder.latest(x) if type(x) is TensorProxy else c.lift(x) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ], spec


def fresh(c: Capture, outer: TensorProxy, *, grad: bool, dim: int | None = None) -> TensorProxy:
    """The argument of a level that stands for a value of the program around it, or for its elements along `dim`."""
    shape = None if dim is None else outer.shape[:dim] + outer.shape[dim + 1 :]
    inner = like(outer, shape)
    c.tensors.arguments[inner] = outer, dim
    inner.name = c.recorder.context.names.make("level")
    inner.requires_grad = inner.dtype.category >= 2 and (grad or outer.requires_grad)
    if shape is None and c.recorder.decide is not None:
        c.recorder.decide.equals(inner, outer)
    return inner


def _is_float(x) -> bool:
    """Whether a value is a real tensor that can have a gradient."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


class Transformed:
    """A function under a transform, which `thunder.jit` compiles where `grad`, `vjp`, `jvp` or `vmap` of a function is
    called. A program interprets `eager`, which calls torch.func."""

    fn: Callable

    def __init__(self, fn: Callable):
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn

    def __call__(self, *args, **kwargs):
        if current_recorder() is not None:
            raise CaptureError(
                "a transformed function is called natively while another program is traced",
                location=user_location(),
                remedy="call it in a function that thunder.jit compiles",
            )
        return self.eager(*args, **kwargs)

    def eager(self, *args, **kwargs):
        raise NotImplementedError


def original(fn):
    """The function under all transforms."""
    while isinstance(fn, Transformed):
        fn = fn.fn
    return fn


def selected_arguments(argnums, args: Sequence, kwargs: dict) -> tuple[dict, bool]:
    """The arguments that `argnums` names, by position or keyword, and whether it names one by itself."""
    single = not isinstance(argnums, (tuple, list))
    selected = {}
    for n in (argnums,) if single else argnums:
        if isinstance(n, str):
            if n not in kwargs:
                raise TypeError(f"argnums names {n!r}, which is no keyword argument of this call")
            selected[n] = kwargs[n]
        elif isinstance(n, int) and not isinstance(n, bool):
            if not -len(args) <= n < len(args):
                raise RuntimeError(f"Got argnum={n}, but only {len(args)} positional inputs")
            if n % len(args) in selected:
                raise RuntimeError(f"argnums elements must be unique, got {argnums}")
            selected[n % len(args)] = args[n]
        else:
            raise RuntimeError(f"argnums must be int or Tuple[int, ...], got: {type(argnums)}")
    if not selected:
        raise RuntimeError("argnums must be non-empty")
    return selected, single


class Grad(Transformed):
    """The gradient of a function; with `value`, that and the function's value.

    argnums None: the flat list of the gradients of all tensors, for cotangents of ones. Otherwise the function returns
    a scalar, and the gradients have the structure of the arguments that argnums names.
    """

    def __init__(self, fn: Callable, argnums=None, has_aux: bool = False, value: bool = False):
        super().__init__(fn)
        self.argnums, self.has_aux, self.value = argnums, has_aux, value

    def packed(self, gradients, value, aux):
        if self.value:
            return ((value, aux) if self.has_aux else value), gradients
        return (gradients, aux) if self.has_aux else gradients

    def eager(self, *args, **kwargs):
        """The gradients outside of a program, by torch.func."""
        if self.argnums is None:
            return self._eager_flat(args, kwargs)
        selected, single = selected_arguments(self.argnums, args, kwargs)
        others: list = []  # in aux, which torch.func takes tensors in alone, and its structure

        def function(*values):
            by_position = dict(zip(selected, values, strict=True))
            result = self.fn(
                *(by_position.get(i, a) for i, a in enumerate(args)),
                **{k: by_position.get(k, v) for k, v in kwargs.items()},
            )
            if not self.has_aux or not isinstance(result, tuple) or len(result) != 2:
                return result
            leaves, spec = compat.tree_flatten(result[1])
            others[:] = [() if isinstance(x, torch.Tensor) else x for x in leaves], spec  # no leaf is a tuple
            return result[0], [x for x in leaves if isinstance(x, torch.Tensor)]

        argnums = 0 if single else tuple(range(len(selected)))
        gradients, value = torch.func.grad_and_value(function, argnums, self.has_aux)(*selected.values())
        if not self.has_aux:
            return self.packed(gradients, value, None)
        value, tensors = value
        tensors, (leaves, spec) = iter(tensors), others
        aux = compat.tree_unflatten([next(tensors) if type(x) is tuple else x for x in leaves], spec)
        return self.packed(gradients, value, aux)

    def _eager_flat(self, args, kwargs):
        """`eager` without argnums: gradients of all floating tensors among the arguments."""
        leaves, spec = compat.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if _is_float(x)]

        def function(*values):
            now = list(leaves)
            for i, v in zip(places, values, strict=True):
                now[i] = v
            args, kwargs = compat.tree_unflatten(now, spec)
            result = self.fn(*args, **kwargs)
            result, aux = result if self.has_aux else (result, None)
            return tuple(filter(_is_float, compat.tree_flatten(result)[0])), (result, aux)

        outputs, pull, (value, aux) = vjp(function, *(leaves[i] for i in places), has_aux=True)
        return self.packed(list(pull(tuple(torch.ones_like(o) for o in outputs))), value, aux)


class VJP(Transformed):
    """(primals, cotangents, **kwargs) -> (result, gradients): the product of a vector with the Jacobian. One primal may
    come by itself, without a tuple. A cotangent of None is zero.

    A primal that is no floating-point tensor is a constant, whose gradient is None. Where keyword arguments hold
    floating-point tensors, their gradients come behind those of the primals, as a dict.
    """

    def eager(self, primals, cotangents, **kwargs):
        """The results and gradients outside of a program, by torch.func."""
        single = not isinstance(primals, (tuple, list))
        leaves, spec = compat.tree_flatten(((primals,) if single else tuple(primals), kwargs))
        wanted = list(map(_is_float, leaves))
        chosen = [x for x, w in zip(leaves, wanted, strict=True) if w]

        def filled(others):
            others = iter(others)
            return [next(others) if w else x for x, w in zip(leaves, wanted, strict=True)]

        def run(chosen):
            args, kwargs = compat.tree_unflatten(filled(chosen), spec)
            return self.fn(*args, **kwargs)

        result, pull = vjp(run, chosen)
        gradients = pull(_without_none(cotangents, result))
        leaves = [None] * len(leaves)
        by_argument, by_name = compat.tree_unflatten(filled(*gradients), spec)
        if any(map(_is_float, compat.tree_flatten(kwargs)[0])):
            return result, (*by_argument, by_name)
        return result, by_argument[0] if single else by_argument


def _without_none(cotangents, result):
    """The cotangents of a result, with zeros in the place of None."""
    results, spec = compat.tree_flatten(result)
    flat, _ = compat.tree_flatten(cotangents)
    if len(flat) != len(results) or all(g is not None for g in flat):
        return cotangents
    zeros = [torch.zeros_like(r) if g is None else g for g, r in zip(flat, results, strict=True)]
    return compat.tree_unflatten(zeros, spec)


class JVP(Transformed):
    """(primals, tangents) -> (result, tangent): the product of the Jacobian with a vector."""

    def eager(self, primals, tangents, **kwargs):
        return torch.func.jvp(functools.partial(self.fn, **kwargs), primals, tangents)


class VMap(Transformed):
    """A function mapped over a dimension of its arguments."""

    def __init__(self, fn: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error"):
        super().__init__(fn)
        self.in_dims, self.out_dims, self.randomness = in_dims, out_dims, randomness

    def eager(self, *args, **kwargs):
        return torch.func.vmap(self.fn, self.in_dims, self.out_dims, self.randomness)(*args, **kwargs)
