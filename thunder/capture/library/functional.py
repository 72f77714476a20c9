"""Functions under functional transforms, in a captured program: `grad`, `vjp`, `jvp`, `vmap` of thunder and of
torch.func.

A transform is applied where it is called. The inner function is read into a level of its own, with fresh proxies for
its arguments; the transformed operations of the level become part of the program around it. So transforms
compose with each other, in any order and depth, and with everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thunder import compat
from thunder.capture.expose import expose
from thunder.capture.state import Tensors
from thunder.core.proxies import TensorProxy, like, proxies_in
from thunder.core.symbol import Recorder, current_recorder, recording, user_location
from thunder.core.unbacked import check_shapes
from thunder.errors import CaptureError
from thunder.extend import resolve_executors
from thunder.ops import LTORCH
from thunder.transforms.levels import Level
from thunder.transforms.pullback import Pullback, pushforward

vjp: Callable[..., tuple] = torch.func.vjp  # how many it gives depends on has_aux


@contextmanager
def separate(c, grad_enabled: bool, decides: bool = False) -> Iterator[Recorder]:
    """Lines are recorded apart, in a grad mode of their own. decides: whether the call that is captured runs them as
    they are, so that the program may decide by their values."""
    outer, before = c.recorder, torch.is_grad_enabled()
    inner = Recorder(outer.context.replace(grad_enabled=grad_enabled), outer.location, outer.where)
    inner.memory = outer.memory
    c.recorder = inner
    c.outer_recorders.append(outer)
    compat.set_grad_enabled(grad_enabled)
    inner.decide = outer.decide if decides else None
    try:
        with recording(inner):
            yield inner
    finally:
        c.recorder = outer
        c.outer_recorders.pop()
        compat.set_grad_enabled(before)


class _Native:
    """A capture for transforms where no program is interpreted: functions run as they are, with proxies for tensors."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.executors = recorder, resolve_executors(None)
        self.outer_recorders: list[Recorder] = []
        self.levels: list = []
        self.tensors = Tensors(replaced={})

    def call(self, f, args, kwargs):
        return f(*args, **kwargs)

    def refuse(self, reason: str, remedy: str = ""):
        raise CaptureError(reason, location=user_location(), remedy=remedy)

    def lift(self, value):
        raise CaptureError(
            "a transformed function is called with tensors while another program is traced",
            location=user_location(),
            remedy="pass them in as arguments",
        )


def _executors(c) -> Sequence:
    return c.executors if isinstance(c, _Native) else c.request.options.executors


def opened(c, value):
    """Everything inside a structure that was read from outside is read now."""
    if not isinstance(c, _Native):
        expose(c, value, opened=True)
    return value


def flatten(c, value) -> tuple[list, Any]:
    """(leaves, structure), with the values that tensors have now."""
    leaves, spec = compat.tree_flatten(opened(c, value))
    return [
        c.recorder.latest(x) if type(x) is TensorProxy else c.lift(x) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ], spec


def fresh(c, outer: TensorProxy, *, grad: bool, dim: int | None = None) -> TensorProxy:
    """The argument of a level that stands for a value of the program around it, or for its elements along `dim`."""
    shape = None if dim is None else outer.shape[:dim] + outer.shape[dim + 1 :]
    made = like(outer, shape)
    c.tensors.arguments[made] = outer, dim
    made.name = c.recorder.context.names.make("level")
    made.requires_grad = made.dtype.category >= 2 and (grad or outer.requires_grad)
    if shape is None and c.recorder.decide is not None:
        c.recorder.decide.equals(made, outer)
    return made


def _float(x) -> bool:
    return type(x) is TensorProxy and x.dtype.category >= 2


def _is_float(x) -> bool:
    """Whether a value is a real tensor that can have a gradient."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _zeros(value: TensorProxy):
    return LTORCH["zeros_like"](value)


class Transformed:
    """A function under a transform, which `thunder.jit` compiles where `grad`, `vjp`, `jvp` or `vmap` of a function is
    called.

    `apply(c, args, kwargs)` writes it into the program that is captured; `eager` calls torch.func, where nothing is
    compiled.
    """

    fn: Callable
    maps = pushes = False  # see `levels`

    def __init__(self, fn: Callable):
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn

    def __call__(self, *args, **kwargs):
        recorder = current_recorder()
        return self.eager(*args, **kwargs) if recorder is None else self.apply(_Native(recorder), args, kwargs)

    def apply(self, c, args: Sequence, kwargs: dict):
        raise NotImplementedError

    def eager(self, *args, **kwargs):
        raise NotImplementedError

    def inner(self, c) -> Callable:
        """The function, read where it is unless the program made it."""
        if isinstance(c, _Native) or id(self) in c.fresh:
            return self.fn
        return c.read(self.fn, (c.sources.get(id(self)) or c.const(self)).attr("fn"))

    def enter(self, c, args: Sequence, kwargs: dict, grad_enabled: bool) -> tuple[list, list, Any]:
        """Calls the function apart. The operations it recorded, and its result flat."""
        with separate(c, grad_enabled, decides=True) as level:
            if level.memory is not None:
                proxies = [p for p in proxies_in([args, kwargs], []) if isinstance(p, TensorProxy)]
                level.memory.fixed |= dict.fromkeys(
                    proxies, "a function under grad, vjp, jvp or vmap writes to its argument"
                )
            c.levels.append(self)
            result = c.call(self.inner(c), list(args), kwargs)
            c.levels.pop()
            leaves, spec = flatten(c, result)
        return level.bound_symbols, leaves, spec


def original(fn):
    """The function under all transforms."""
    while isinstance(fn, Transformed):
        fn = fn.fn
    return fn


def made(c, transformed):
    """A transformed function that the program made itself."""
    c.fresh.add(id(transformed))
    c.keep[id(transformed)] = transformed
    return transformed


# ----------------------------------------------------------------------------------------------------------------
# reverse mode


def selected_arguments(argnums, args: Sequence, kwargs: dict) -> tuple[dict, bool]:
    """The arguments that `argnums` names, by position or keyword, and whether it names one by itself."""
    single = not isinstance(argnums, (tuple, list))
    found = {}
    for n in (argnums,) if single else argnums:
        if isinstance(n, str):
            if n not in kwargs:
                raise TypeError(f"argnums names {n!r}, which is no keyword argument of this call")
            found[n] = kwargs[n]
        elif isinstance(n, int) and not isinstance(n, bool):
            if not -len(args) <= n < len(args):
                raise RuntimeError(f"Got argnum={n}, but only {len(args)} positional inputs")
            if n % len(args) in found:
                raise RuntimeError(f"argnums elements must be unique, got {argnums}")
            found[n % len(args)] = args[n]
        else:
            raise RuntimeError(f"argnums must be int or Tuple[int, ...], got: {type(argnums)}")
    if not found:
        raise RuntimeError("argnums must be non-empty")
    return found, single


class Differentiated:
    """A level that was differentiated with respect to the tensors in `selected`, a structure of its arguments'
    values."""

    def __init__(
        self,
        c,
        f: Transformed,
        args: Sequence,
        kwargs: dict,
        keys: Sequence | None,
        has_aux: bool,
        constants: bool = False,
    ):
        """keys: the arguments to differentiate for, by position or keyword; None: every floating-point tensor there is,
        and those that the function reads itself. constants: whether these may hold anything else as well, which has no
        gradient."""
        given: dict = {**dict(enumerate(args)), **kwargs}
        self.wanted: dict = {}
        self.outer: list[TensorProxy] = []
        arguments, self.specs = [], {}
        for key in given if keys is None else keys:
            leaves, self.specs[key] = flatten(c, given[key])
            inside = []
            for x in leaves:
                if not _float(x) and keys is not None and not constants:
                    raise RuntimeError(
                        "only Tensors of floating point dtype can require gradients, not "
                        f"{type(x).__name__ if type(x) is not TensorProxy else x.dtype}"
                    )
                if _float(x):
                    self.outer.append(x)
                    arguments.append(fresh(c, x, grad=True))
                inside.append(arguments[-1] if _float(x) else x)
            self.wanted[key] = list(map(_float, leaves))
            given[key] = compat.tree_unflatten(inside, self.specs[key])
        operations, leaves, spec = f.enter(c, [given[i] for i in range(len(args))], {k: given[k] for k in kwargs}, True)
        if keys is None:
            self._read_outside(c, arguments, operations)
        self.aux = None
        if has_aux:
            result = compat.tree_unflatten(leaves, spec)
            if not isinstance(result, tuple) or len(result) != 2:
                raise RuntimeError(
                    "expected the output of f to be a tuple of length 2: (output, aux), because has_aux=True"
                )
            leaves, spec = compat.tree_flatten(result[0])
            self.aux = result[1]
        self.result, self.spec = leaves, spec
        self.differentiable = [_float(x) and (x.requires_grad or any(x is a for a in arguments)) for x in leaves]
        level = Level(arguments, operations, leaves)
        self.pullback = Pullback(level, self.outer, _executors(c), c.recorder)
        self.table = self.pullback.table

    def _read_outside(self, c, arguments: list, operations) -> None:
        """Tensors from outside that require grad and that the function reads, as parameters, have gradients as well."""
        read = {p for operation in operations for p in operation.inputs}
        free = [p for p in c.tensors.real if p in read and p.requires_grad and not any(p is a for a in arguments)]
        arguments += free
        self.outer += free

    def outside(self, value):
        """A value of the level, or a structure of them, as the program around it knows it."""
        return _replaced(value, self.table)

    def value(self):
        return self.outside(compat.tree_unflatten(self.result, self.spec))

    def gradients(self, c, cotangents: Sequence) -> list:
        """One gradient or None for each tensor."""
        return self.pullback(
            [g if d else None for g, d in zip(cotangents, self.differentiable, strict=True)], c.recorder
        )

    def structured(self, gradients: list) -> dict:
        """The gradients in the structures of the arguments, zeros where there is none, None in the places of
        constants."""
        filled = iter([_zeros(x) if g is None else g for x, g in zip(self.outer, gradients, strict=True)])
        found = {key: [next(filled) if w else None for w in wanted] for key, wanted in self.wanted.items()}
        return {key: compat.tree_unflatten(found[key], spec) for key, spec in self.specs.items()}


def _replaced(value, table: dict):
    """A structure with other tensors in the place of those in a table."""
    leaves, spec = compat.tree_flatten(value)
    return compat.tree_unflatten([table.get(x, x) if type(x) is TensorProxy else x for x in leaves], spec)


def _ones(o: TensorProxy) -> TensorProxy:
    return LTORCH["full"](o.shape, 1.0, device=o.device, dtype=o.dtype)


class Grad(Transformed):
    """The gradient of a function; with `value`, that and the function's value.

    argnums None: the flat list of the gradients of all tensors, for cotangents of ones. Otherwise the function returns
    a scalar, and the gradients have the structure of the arguments that argnums names.
    """

    def __init__(self, fn: Callable, argnums=None, has_aux: bool = False, value: bool = False):
        super().__init__(fn)
        self.argnums, self.has_aux, self.value = argnums, has_aux, value

    def apply(self, c, args, kwargs):
        if self.argnums is None:
            at = Differentiated(c, self, args, kwargs, None, self.has_aux)
            ones = [_ones(x) if d else None for x, d in zip(at.result, at.differentiable, strict=True)]
            return self.packed(
                [g for g in at.gradients(c, ones) if g is not None],
                at.value() if self.value else None,
                at.outside(at.aux),
            )
        selected, single = selected_arguments(self.argnums, args, kwargs)
        at = Differentiated(c, self, args, kwargs, list(selected), self.has_aux)
        self.check_scalar(at)
        found = at.structured(at.gradients(c, [_ones(at.result[0])]))
        return self.packed(
            next(iter(found.values())) if single else tuple(found.values()),
            at.value() if self.value else None,
            at.outside(at.aux),
        )

    @staticmethod
    def check_scalar(at: Differentiated) -> None:
        if len(at.result) != 1 or type(at.result[0]) is not TensorProxy or not at.spec.is_leaf():
            raise RuntimeError("Expected f(*args) to return a single tensor")
        (output,) = at.result
        if output.shape != ():
            raise RuntimeError(
                f"Expected f(*args) to return a scalar tensor, got tensor with {len(output.shape)} dims. Maybe you "
                "wanted to use the vjp or jacrev APIs instead?"
            )

    def packed(self, gradients, value, aux):
        if self.value:
            return ((value, aux) if self.has_aux else value), gradients
        return (gradients, aux) if self.has_aux else gradients

    def eager(self, *args, **kwargs):
        if self.argnums is None:
            return self._eager_flat(args, kwargs)
        selected, single = selected_arguments(self.argnums, args, kwargs)

        def function(*values):
            given = dict(zip(selected, values, strict=True))
            return self.fn(
                *(given.get(i, a) for i, a in enumerate(args)), **{k: given.get(k, v) for k, v in kwargs.items()}
            )

        made = torch.func.grad_and_value(function, 0 if single else tuple(range(len(selected))), self.has_aux)(
            *selected.values()
        )
        return self.packed(made[0], *(made[1] if self.has_aux else (made[1], None)))

    def _eager_flat(self, args, kwargs):
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


def check_like(c, name: str, given: Sequence, given_spec, wanted: Sequence, wanted_spec, of: str) -> None:
    """Raises RuntimeError where a structure of tensors is not of the form and shapes of another, CaptureError where
    only dtypes differ."""
    if given_spec != wanted_spec:
        raise RuntimeError(f"Expected {name} to have the same structure as {of}, got {given_spec} and {wanted_spec}")
    for g, w in zip(given, wanted, strict=True):
        if type(w) is not TensorProxy:
            continue
        refusal = f"Expected {name} to have the shapes of {of}, got {g!r} for {w!r}"
        if type(g) is not TensorProxy:
            raise RuntimeError(refusal)
        check_shapes(g.shape, w.shape, refusal)
        if g.dtype is not w.dtype:
            c.refuse(f"{name} have another dtype than {of}: {g.dtype.name} for {w.dtype.name}", "convert them")


class VJP(Transformed):
    """(primals, cotangents) -> (result, gradients): the product of a vector with the Jacobian. One primal may come by
    itself, without a tuple.

    A primal that is no floating-point tensor is a constant, whose gradient is None.
    """

    def apply(self, c, args, kwargs):
        primals, cotangents = args
        single = not isinstance(primals, (tuple, list))
        primals = (primals,) if single else tuple(opened(c, primals))
        at = Differentiated(c, self, primals, kwargs, range(len(primals)), False, constants=True)
        given, spec = flatten(c, cotangents)
        check_like(c, "the cotangents", given, spec, at.result, at.spec, "the function's result")
        found = tuple(at.structured(at.gradients(c, given)).values())
        return at.value(), found[0] if single else found

    def eager(self, primals, cotangents, **kwargs):
        single = not isinstance(primals, (tuple, list))
        leaves, spec = compat.tree_flatten((primals,) if single else tuple(primals))
        wanted = list(map(_is_float, leaves))
        chosen = [x for x, w in zip(leaves, wanted, strict=True) if w]

        def filled(others):
            others = iter(others)
            return [next(others) if w else x for x, w in zip(leaves, wanted, strict=True)]

        result, pull = vjp(lambda chosen: self.fn(*compat.tree_unflatten(filled(chosen), spec), **kwargs), chosen)
        leaves = [None] * len(leaves)
        found = compat.tree_unflatten(filled(*pull(cotangents)), spec)
        return result, found[0] if single else found


# ----------------------------------------------------------------------------------------------------------------
# forward mode


class JVP(Transformed):
    """(primals, tangents) -> (result, tangent): the product of the Jacobian with a vector."""

    pushes = True

    def __init__(self, fn: Callable, has_aux: bool = False):
        super().__init__(fn)
        self.has_aux = has_aux

    def apply(self, c, args, kwargs):
        primals, tangents = args
        if not isinstance(primals, tuple):
            raise RuntimeError(
                "jvp: Expected primals to be a tuple. E.g. it should be valid to call f(*primals), got "
                f"{type(primals).__name__}"
            )
        outer, spec = flatten(c, primals)
        given, given_spec = flatten(c, tangents)
        if not outer or not all(_float(x) for x in outer):
            raise RuntimeError("jvp: Expected the primals to be tensors of floating point dtype, at least one")
        check_like(c, "the tangents", given, given_spec, outer, spec, "the primals")
        arguments = [fresh(c, x, grad=True) for x in outer]
        operations, leaves, out_spec = self.enter(c, compat.tree_unflatten(arguments, spec), kwargs, True)
        aux = None
        if self.has_aux:
            result, aux = compat.tree_unflatten(leaves, out_spec)
            leaves, out_spec = compat.tree_flatten(result)
        if not leaves or not all(type(x) is TensorProxy for x in leaves):
            raise RuntimeError(
                "jvp(f, primals, tangents): Expected f to be a function that has non-empty output, of tensors"
            )
        moved = pushforward(Level(arguments, operations, leaves), outer, given, _executors(c), c.recorder)
        table = dict(zip(arguments, outer, strict=True))
        result = [table.get(x, x) for x in leaves]
        tangent = [_zeros(x) if t is None else t for x, t in zip(result, moved, strict=True)]
        made = compat.tree_unflatten(result, out_spec), compat.tree_unflatten(tangent, out_spec)
        return (*made, _replaced(aux, table)) if self.has_aux else made

    def eager(self, primals, tangents, **kwargs):
        return torch.func.jvp(functools.partial(self.fn, **kwargs), primals, tangents, has_aux=self.has_aux)


# ----------------------------------------------------------------------------------------------------------------
# batching
