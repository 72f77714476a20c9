"""Levels of torch.func, which calls of their own enter and leave: PyTorch's Python code of `vmap`, `grad`, `vjp`, `jvp`
and Jacobians makes them, and so do the graphs that Dynamo makes of that.

    level = _vmap_increment_nesting(4, "error")
    a = _add_batch_dim(x, 0, level)              # an argument of the level
    b = _remove_batch_dim(a.sin(), level, 4, 0)  # a result of it, for the program around
    _vmap_decrement_nesting()

Operations between are recorded apart. They are written to the program around, transformed, when it takes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import forward_ad

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.library.functional import Grad, flatten, fresh
from thunder.capture.library.hooks import grad_mode
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.recording import RECORDER
from thunder.core.symbol import Recorder, current_recorder, recording
from thunder.core.unbacked import check_shapes
from thunder.interpreter.attributes import plain_attribute
from thunder.ops import ltorch
from thunder.transforms.batching import batched
from thunder.transforms.levels import Level, write
from thunder.transforms.pullback import Pullback, pushforward


class _Entered:
    """A level that was entered. outer: the recorder of the program around it. maps: it is one of vmap; pushes: it is
    one of forward mode."""

    maps = pushes = False

    def __init__(self, c: Capture):
        self.outer: Recorder = c.recorder
        self.inner = Recorder(self.outer.context, self.outer.location, self.outer.where)
        self.inner.memory, self.inner.decide, self.written = self.outer.memory, self.outer.decide, 0
        c.recording.enter(self, self.inner)
        RECORDER.set(self.inner)

    def into(self, c: Capture, recorder: Recorder) -> None:
        """Operations are recorded in `recorder` from now on. No block ends with it: a capture that fails ends inside,
        and the block around the whole of it restores what was there before."""
        c.recording.switch(recorder)
        RECORDER.set(recorder)

    def argument(self, c: Capture, x, dim: int | None = None) -> tuple[TensorProxy, TensorProxy]:
        """A value of the program around, and its proxy inside of the level, without dimension `dim`."""
        (value,), _ = flatten(c, x)
        inner_value = fresh(c, value, grad=False, dim=dim)
        self.inner.memory.fixed[inner_value] = "a function under grad, vjp, jvp or vmap writes to its argument"
        return value, inner_value

    def outside(self, c: Capture, value: Any, *placement: Any) -> Any:
        """A value of the level as the program around has it."""
        value = c.recorder.latest(value)
        self.into(c, self.outer)
        try:
            new, self.written = self.inner.bound_symbols[self.written :], len(self.inner.bound_symbols)
            return self.take(c, new, value, *placement)
        finally:
            self.into(c, self.inner)

    def take(self, c: Capture, new: Sequence, value: Any, *placement: Any) -> Any:
        """The value in the program around, which gets the new operations first."""
        raise NotImplementedError

    def leave(self, c: Capture) -> None:
        self.outside(c, None, None)
        RECORDER.set(c.recording.leave())


class _Mapped(_Entered):
    """A level of vmap."""

    maps = True

    def __init__(self, c: Capture, size, randomness: str):
        super().__init__(c)
        self.size, self.randomness = size, randomness
        self.table: dict[Proxy, Proxy] = {}

    def add(self, c: Capture, x, dim: int) -> TensorProxy:
        outer, inner_value = self.argument(c, x, dim)
        self.into(c, self.outer)
        self.table[inner_value] = outer if dim == 0 else ltorch.movedim(outer, dim, 0)
        self.into(c, self.inner)
        return inner_value

    def take(self, c: Capture, new, value, dim=None):
        self.table = batched(new, self.table, self.size, self.randomness, c.recorder)
        return value if value is None else _placed(value, self.table, dim, self.size)


def _ones(x: TensorProxy) -> TensorProxy:
    return ltorch.full(x.shape, 1.0, device=x.device, dtype=x.dtype)


def _placed(value: TensorProxy, table: dict, dim: int | None, size) -> TensorProxy:
    """A result with its mapped dimension at `dim`."""
    result = table.get(value, value)
    mapped = value in table and result.shape != value.shape
    if dim is None:
        if mapped:
            raise ValueError("vmap: out_dims is None for a result that is mapped over")
        return result
    rank = len(value.shape) + 1
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    if not mapped:
        result = ltorch.expand(result, (size, *result.shape))
    return result if dim % rank == 0 else ltorch.movedim(result, 0, dim)


class _Differentiated(_Entered):
    """A level of differentiation. It is linearized when the program around takes its first result or derivative."""

    def __init__(self, c: Capture):
        super().__init__(c)
        self.arguments: dict[Any, Any] = {}  # and what they are in the program around
        self.level: Level | None = None

    def add(self, c: Capture, x) -> TensorProxy:
        outer, inner_value = self.argument(c, x)
        self.arguments[inner_value] = outer
        return inner_value

    def take(self, c: Capture, new, value, then=None):
        if self.level is None:
            values = dict.fromkeys((*self.arguments, *(o for operation in new for o in operation.outputs)))
            differentiable = [x for x in values if isinstance(x, TensorProxy) and x.requires_grad]
            self.level = Level(list(self.arguments), new, differentiable)
            self.linearize(c, self.level, list(self.arguments.values()), c.request.options.executors, c.recorder)
        else:  # cotangents, and zeros where there is no gradient
            write(c.recorder, new, self.arguments)
        return then() if then else self.arguments.get(value, value)

    def linearize(self, c: Capture, *arguments: Any) -> None:
        """Write the level to the program around, with what its derivatives read."""
        raise NotImplementedError


class _Reverse(_Differentiated):
    """A level of reverse-mode differentiation. Gradients may be asked for after it was left, as in `vjp`."""

    def __init__(self, c: Capture):
        super().__init__(c)
        c.recording.differentiate(self)

    def linearize(self, c: Capture, *arguments):
        self.pullback = Pullback(*arguments)

    def gradients(self, c: Capture, outputs: Sequence, inputs: Sequence, cotangents: Sequence | None) -> tuple:
        """The gradient or None of each input, for cotangents of ones by default, as values of the program around."""
        if self in c.recording.levels:
            cotangents = cotangents and [self.outside(c, g) for g in cotangents]
            return self.outside(c, None, lambda: self.pull(c, outputs, inputs, cotangents))
        return self.pull(c, outputs, inputs, cotangents)

    def pull(self, c: Capture, outputs, inputs, cotangents) -> tuple:
        by_output: dict[Proxy, Any] = {}
        with recording(c.recorder):
            cotangents = cotangents or [_ones(self.arguments.get(o, o)) for o in outputs]
            for o, g in zip(outputs, cotangents, strict=True):
                by_output[o] = ltorch.add(by_output[o], g) if o in by_output else g
            return tuple(self.pullback([by_output.get(o) for o in self.pullback.level.outputs], c.recorder, inputs))


class _Forward(_Differentiated):
    """A level of forward-mode differentiation. Its arguments may come with tangents, its results give theirs."""

    pushes = True

    def __init__(self, c: Capture):
        super().__init__(c)
        self.tangents_in: dict[Proxy, Any] = {}
        self.tangents: dict[Proxy, Any] = {}

    def dual(self, c: Capture, x, tangent) -> TensorProxy:
        dual_value = self.add(c, x)
        dual_value.requires_grad = True
        (self.tangents_in[dual_value],), _ = flatten(c, tangent)
        return dual_value

    def linearize(self, c: Capture, level, arguments, *rest):
        tangents = pushforward(level, arguments, [self.tangents_in.get(a) for a in level.arguments], *rest)
        self.tangents = dict(zip(level.outputs, tangents, strict=True))

    def tangent(self, c: Capture, value: TensorProxy) -> TensorProxy:
        """The tangent of a value of the level, in the program around: zeros where it has none."""

        def tangent_value():
            known = self.tangents.get(value)
            with recording(c.recorder):
                return ltorch.zeros_like(self.arguments.get(value, value)) if known is None else known

        return self.outside(c, None, tangent_value)


# ----------------------------------------------------------------------------------------------------------- handlers


def _entering(kind: Callable) -> Callable:
    def enter(c: Capture, f, args, kwargs):
        kind(c, *args, **kwargs)
        return len(c.recording.levels)

    return enter


def _leave(c: Capture, f, args, kwargs):
    if current_recorder() is c.recorder:  # else a generator is closed behind a capture that has failed
        c.recording.levels[-1].leave(c)
    return len(c.recording.levels) + 1


def _innermost(c: Capture, level: int):
    if level != len(c.recording.levels):
        c.refuse(
            "values of one level of torch.func are used in another level", "call torch.func's transforms themselves"
        )
    return c.recording.levels[-1]


def _add(c: Capture, f, args, kwargs):
    x, *dim, level = args
    return _innermost(c, level).add(c, x, *dim)


def _remove_batch(c: Capture, f, args, kwargs):
    x, level, _, dim = args
    return _innermost(c, level).outside(c, x, dim)


def _unwrap(c: Capture, f, args, kwargs):
    x, level = args
    return _innermost(c, level).outside(c, x)


def _require_grad(c: Capture, f, args, kwargs):
    (x,) = args
    if not _is_float(x):
        raise RuntimeError(f"only Tensors of floating point dtype can require gradients, not {x.dtype.name}")
    x.requires_grad = True  # an argument of the innermost level
    return x


def _gradients(c: Capture, f, args, kwargs):
    """`torch.autograd.grad` inside of a level of torch.func. Zeros where a result does not depend on an input."""
    outputs, inputs, *rest = args
    cotangents = rest[0] if rest else kwargs.get("grad_outputs")
    outputs, inputs = ([c.recorder.latest(x) for x in values] for values in (outputs, inputs))
    for o, g in zip(outputs, cotangents or (), strict=False):
        _check_like(c, g, o, f"Mismatch in shape: a cotangent has the shape {g.shape}, its result {o.shape}")
    for level in reversed(c.recording.differentiated):
        if any(o in level.arguments or level.inner.producer(o) is not None for o in outputs):
            gradients = level.gradients(c, outputs, inputs, cotangents)
            around = [level.arguments.get(x, x) for x in inputs]
            with recording(c.recorder):
                return tuple(ltorch.zeros_like(x) if g is None else g for g, x in zip(gradients, around, strict=True))
    return tuple(ltorch.zeros_like(x) for x in inputs)


def flat_gradients(c: Capture, f: Grad, args, kwargs):
    """A call of `Grad` without argnums: the gradients of all tensors, and of tensors from outside that require grad and
    that the function reads, as parameters; without those that the results do not depend on."""
    leaves, spec = flatten(c, (tuple(args), kwargs))
    level = _Reverse(c)
    inside = [level.add(c, x) if _is_float(x) else x for x in leaves]
    for x in level.arguments:
        x.requires_grad = True
    args, kwargs = compat.tree_unflatten(inside, spec)
    with grad_mode(c, True):
        result = c.call(c.load_attr(f, "fn"), list(args), kwargs)
    value, aux = result if f.has_aux else (result, None)
    outputs = [x for x in flatten(c, value)[0] if _is_float(x) and x.requires_grad]
    read = {p for operation in level.inner.bound_symbols for p in operation.inputs}
    level.arguments |= {p: p for p in c.tensors.real if p in read and p.requires_grad}
    gradients = [g for g in level.gradients(c, outputs, list(level.arguments), None) if g is not None]
    value, aux = (_outside(c, level, x) for x in (value, aux))
    level.leave(c)
    return f.packed(gradients, value if f.value else None, aux)


def _is_float(x) -> bool:
    return type(x) is TensorProxy and x.dtype.category >= 2


def _outside(c: Capture, level: _Entered, value):
    """A structure of values of a level as the program around has it."""
    leaves, spec = flatten(c, value)
    return compat.tree_unflatten([level.outside(c, x) if type(x) is TensorProxy else x for x in leaves], spec)


def _forward(c: Capture) -> _Forward:
    """The innermost level, which is one of `jvp`."""
    level = c.recording.levels[-1] if c.recording.levels else None
    if isinstance(level, _Forward):
        return level
    return c.refuse("a program enters a level of torch.autograd.forward_ad", "call torch.func.jvp")


def _enter_dual(c: Capture, f, args, kwargs):
    _forward(c)
    return 0


def _make_dual(c: Capture, f, args, kwargs):
    primal, tangent = args
    words = f"Trying to set a forward gradient of shape {tangent.shape} for a tensor of shape {primal.shape}"
    _check_like(c, tangent, primal, words)
    return _forward(c).dual(c, primal, tangent)


def _check_like(c: Capture, value: TensorProxy, wanted: TensorProxy, refusal: str) -> None:
    """Raises RuntimeError where a cotangent or a tangent has another shape than its tensor, CaptureError where only the
    dtypes differ."""
    check_shapes(value.shape, wanted.shape, refusal)
    if value.dtype is not wanted.dtype:
        names = f"{value.dtype.name} for {wanted.dtype.name}"
        c.refuse(f"a cotangent or a tangent has another dtype than its tensor: {names}", "convert it")


def _unpack_dual(c: Capture, f, args, kwargs):
    value = c.recorder.latest(args[0])
    dual: Any = value, _forward(c).tangent(c, value)
    return forward_ad.UnpackedDualTensor(*dual)


def _nothing(c: Capture, f, args, kwargs):
    """Levels of the program's do not exist for PyTorch, which checks nothing for them."""


def _name_in_errors(c: Capture, f, args, kwargs):
    """The text of a function may be that of tensors that it holds."""
    return plain_attribute(args[0], "__name__", type(args[0]).__name__)


def _refused(c: Capture, f, args, kwargs):
    c.refuse(
        f"{f.__name__} enters a level of torch.func.functionalize, as Dynamo's graphs do",
        "leave functionalize out: thunder makes programs without writes itself",
    )


HANDLERS = {
    function: handler
    for name, handler in {
        "enter_vmap": _entering(_Mapped), "enter_grad": _entering(_Reverse), "enter_jvp": _entering(_Forward),
        "leave_vmap": _leave, "leave_grad": _leave, "leave_jvp": _leave, "add_batch": _add, "wrap": _add,
        "remove_batch": _remove_batch, "unwrap": _unwrap, "require_grad": _require_grad, "gradients": _gradients,
        "make_dual": _make_dual, "unpack_dual": _unpack_dual, "enter_dual": _enter_dual, "leave_dual": _nothing,
        "enter_jvp_in_python": _entering(_Forward), "leave_jvp_in_python": _leave, "load_decompositions": _nothing,
        "name_in_errors": _name_in_errors,
        "allow_inplace": _nothing, "enter_functionalize": _refused,
    }.items()
    if (function := compat.functorch_implementations().get(name)) is not None
} | {
    **dict.fromkeys((forward_ad.enter_dual_level, forward_ad.dual_level.__enter__), _enter_dual),
    **dict.fromkeys((forward_ad.exit_dual_level, forward_ad.dual_level.__exit__), _nothing),
    forward_ad.make_dual: _make_dual, forward_ad.unpack_dual: _unpack_dual,
}  # fmt: skip
