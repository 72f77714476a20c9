"""`Transform`: the base class of users' transforms, and the calls of their hooks.

class Doubling(thunder.Transform):
    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        return rewrite(computation_trace, ...)

thunder.jit(model, transforms=[Doubling()])
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from thunder.core.check import check
from thunder.core.codegen import Text
from thunder.core.dtypes import is_inexact
from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, Symbol, is_outside
from thunder.core.trace import Trace, TraceBuilder, timed_pass
from thunder.errors import CaptureError, OptionError
from thunder.extend import Executor, add_executor_lists, resolve_executors
from thunder.extend.passes import named
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype


class Transform:
    """Base class of the transforms that `thunder.jit(transforms=...)` accepts. All methods are optional.

    A transform changes programs by returning other traces, and parameters by `ThunderModule.set_parameter`. The wrapped
    module does not change.

    Attributes:
        exact: Whether programs compute the same results bit for bit. `numerics="eager"` uses only such transforms.
        original_stands_in: Whether the original function may run if a program cannot be captured.
        needs_sizes: Whether the transform needs a program for each size. Sizes of arguments then do not become symbolic
            automatically.
        executors: The executors of the operations that the transform adds, or their names. They precede all others.
    """

    exact = False
    original_stands_in = False
    executors: Sequence[Executor | str] = ()
    needs_sizes = False

    def transform_module(self, model) -> None:
        """Called once when a module is compiled, in the order of the list. `model` is the `ThunderModule`;
        `model.set_parameter(name, value)` replaces or adds a parameter."""

    def while_reading(self) -> AbstractContextManager:
        """Returns a context manager that is active during capture. It may enable modes of PyTorch that change the
        recorded operations."""
        return nullcontext()

    def transform_traces_pre_prologue(
        self, prologue_trace: Trace, computation_trace: Trace, epilogue_trace: Trace | None, **kwargs
    ) -> tuple:
        """Called in each compilation, before differentiation. Returns the three traces; an unchanged trace is
        returned as the same object."""
        return prologue_trace, computation_trace, epilogue_trace

    def transform_state_dict_for_submodule(
        self, model, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Converts the state dict entries of one submodule, without prefix, from the format of the original module
        to that of the transformed module."""
        return state_dict

    def reverse_transform_state_dict_for_submodule(
        self, model, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """The inverse of `transform_state_dict_for_submodule`. Transforms are called in reverse order."""
        return state_dict

    def transform_trace_post_optimization(self, computation_trace: Trace, **kwargs) -> Trace:
        """Called in each compilation with the final trace: first the forward, then the backward. Returns the trace
        that runs. `kwargs` contains `executors_list`."""
        return computation_trace


HOOKS = tuple(name for name, value in vars(Transform).items() if callable(value) and not name.startswith("_"))


def has_hook(transform, hook: str) -> bool:
    """Whether a transform has a hook of its own."""
    method = getattr(type(transform), hook, None)
    return method is not None and method is not getattr(Transform, hook)


def check_transforms(transforms: Sequence) -> tuple:
    """The transforms as a tuple. Raises OptionError, which names the hooks, for an object that has none of them and is
    no Transform."""
    if (
        callable(getattr(transforms, "transform_module", None))
        or isinstance(transforms, (str, bytes))
        or not hasattr(transforms, "__iter__")
    ):
        raise OptionError(f"transforms= is a list of transforms, not a {type(transforms).__name__}: transforms=[...]")
    for t in (checked := tuple(transforms)):
        if isinstance(t, type):
            raise OptionError(f"transforms= has the class {t.__name__}: give an instance, {t.__name__}(...)")
        if not isinstance(t, Transform) and not any(has_hook(t, hook) for hook in HOOKS):
            raise OptionError(
                f"transforms= has a {type(t).__name__}, which has none of the hooks of a thunder.Transform: "
                f"{', '.join(HOOKS)}"
            )
        _check_hooks(t)
    return checked


def _check_hooks(transform) -> None:
    """Raises OptionError for a method whose name is nearly that of a hook, which nothing would call."""
    for name in {n for kind in type(transform).__mro__ for n in vars(kind)} - set(dir(Transform)):
        if name[0] != "_" and (near := difflib.get_close_matches(name, HOOKS, 1, 0.9)):
            raise OptionError(
                f"the transform {type(transform).__name__} has no hook {name!r}: did you mean {near[0]!r}?"
            )


def with_executors_of(transforms: Sequence, executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """Executors, behind those that transforms bring for operations of their own. Raises OptionError, which names the
    transform, for an executor that is not registered, and for what is no list."""
    brought: list[Executor] = []
    for t in transforms:
        asked_for = getattr(t, "executors", ())
        try:
            own_executors = resolve_executors(asked_for)
        except OptionError as error:
            raise OptionError(f"executors of the transform {type(t).__name__}: {error}") from None
        brought += own_executors[: len(tuple(dict.fromkeys(asked_for)))]  # the always-executors come behind
    return add_executor_lists(brought, executors)


def transform_traces(
    transforms: Sequence,
    prologues: list[Trace],
    computations: list[Trace],
    epilogues: list[Trace],
    executors: Sequence,
    model,
) -> None:
    """Calls each transform, and appends changed traces to the three lists (that of epilogues may be empty).

    Raises OptionError where a transform does not return three traces, or a prologue that gives the computation another
    number of arguments than it has.
    """
    for transform in transforms:
        if not has_hook(transform, "transform_traces_pre_prologue"):
            continue
        before = prologues[-1], computations[-1], epilogues[-1] if epilogues else None
        name = type(transform).__name__
        changed_traces: list = []

        def run(computation: Trace, transform=transform, before=before, name=name, changed_traces=changed_traces):
            changed_traces[:] = _three(
                name,
                before,
                transform.transform_traces_pre_prologue(
                    before[0], computation, before[2], executors_list=executors, model=model
                ),
            )
            return changed_traces[1]

        with named(f"{name}.transform_traces_pre_prologue"):
            changed = timed_pass(f"Transform {name}", before[1], run)
        for new, was, traces in ((changed_traces[0], before[0], prologues), (changed_traces[2], before[2], epilogues)):
            if new is not was and new is not None:
                new = new.trace() if isinstance(new, TraceBuilder) else new
                traces.append(new.replace(provenance=changed.provenance))
        if changed_traces[1] is not before[1]:
            computations.append(changed)
        returned, wanted = _results(prologues[-1]), len(computations[-1].args)
        if returned is not None and returned != wanted:
            raise OptionError(
                f"after {name}.transform_traces_pre_prologue the prologue returns {returned} values and the "
                f"computation has {wanted} arguments: "
                "a new argument needs a new value of the prologue (thunder.transforms.base.with_parameter)"
            )
        if changed_traces[1] is not before[1] and is_outside(type(transform)):
            with named(f"{name}.transform_traces_pre_prologue"):
                check(changed)


def _three(name: str, before: tuple, returned) -> tuple:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise OptionError(
            f"{name}.transform_traces_pre_prologue returned {type(returned).__name__}: return (prologue_trace, "
            "computation_trace, epilogue_trace)"
        )
    names = [[t and t.name for t in traces] for traces in (before, returned)]
    if names[0] != names[1] and set(names[0]) == set(names[1]):
        raise OptionError(f"{name}.transform_traces_pre_prologue returned the traces in another order: {names[1]}")
    return returned


def _results(prologue: Trace) -> int | None:
    return len(prologue.output) if isinstance(prologue.output, tuple) else None


# ----------------------------------------------------------------------------------------------------------------
# parameters in traces


def _print_read(operation: BoundSymbol, printer) -> list[str]:
    name, table, key, check, held = operation.args
    t, c = printer.object(table), printer.object(check)
    lines = [f"{name} = {t}.get({key!r})", f"if (reason := {c}({name}, {key!r})): return reason"]
    return lines if held is None else [*lines, f"{name} = {printer.object(held)}({name})"]


_read_parameter = Symbol("get_parameter", module="prims", is_prim=True, python_printer=_print_read)


class _Check:
    """A check that a value has the type of the parameter that a program was compiled for; returns the difference in
    words, or None."""

    def __init__(self, value):
        self.expected = _facts(value)

    def __call__(self, value, name: str) -> str | None:
        facts = _facts(value) if hasattr(value, "dtype") else None
        return None if facts == self.expected else f"parameter {name} was {self.expected[:3]}, is {facts and facts[:3]}"


def _facts(value) -> tuple:
    return tuple(value.shape), from_tensor_dtype(value.dtype), from_tensor_device(value.device), value.requires_grad


def variable_of(name: str) -> str:
    """What traces call the parameter at a dotted path."""
    return "t_" + "".join(c if c.isalnum() else "_" for c in name)


def reading(prologue: Trace, overrides: dict, name: str, held: Callable | None = None) -> Trace:
    """A prologue that also checks and returns `overrides[name]`. held: what this rank holds of it."""
    read = prologue.names.claim(variable_of(name))
    operands = (read, overrides, name, _Check(overrides[name]), held)
    operation = BoundSymbol(_read_parameter, operands, {}, None, inputs=(), outputs=())
    return prologue.replace(
        bound_symbols=(*prologue.bound_symbols, operation), output=(*prologue.output, Text(read))
    )  # fmt: skip


def parameters_read(prologue: Trace) -> list[tuple[dict, str]]:
    """The table and the name of each parameter that `reading` has added, in order."""
    return [b.args[1:3] for b in prologue.bound_symbols if b.sym is _read_parameter]


def with_parameter(prologue: Trace, computation: Trace, model, name: str) -> tuple[Trace, Trace, TensorProxy]:
    """Both traces with one more argument: parameter or buffer `name` of the compiled module, which the prologue reads
    and checks, and its proxy."""
    overrides = model._overrides_parameters if name in model._overrides_parameters else model._overrides_buffers
    if name not in overrides:
        raise OptionError(
            f"{name!r} is no parameter that a transform gave the module (model.set_parameter); it has "
            f"{', '.join(model._overrides_parameters) or 'none'}"
        )
    value = overrides[name]
    shape, dtype = model.seen_as(name)
    variable = computation.names.claim(variable_of(name))
    proxy = TensorProxy(
        variable, shape=shape, dtype=from_tensor_dtype(dtype), device=from_tensor_device(value.device),
            requires_grad=value.requires_grad
    )  # fmt: skip
    info = computation.info.replace(parameters={**computation.info.parameters, variable: name})
    return (
        reading(prologue, overrides, name, model.held_of(name)),
        computation.replace(args=(*computation.args, proxy), info=info),
        proxy,
    )


def connected(computation: Trace, frozen: Set[Proxy] = frozenset()) -> Trace:
    """The trace after a change of its arguments: results require grad where their operands do. frozen: values that no
    longer require grad, so that results of them alone do not either."""
    replaced: dict[Proxy, Proxy] = {}
    operations = []
    for operation in computation.bound_symbols:
        changed = not replaced.keys().isdisjoint(operation.inputs)
        operation, symbol = operation.swap(replaced), operation.sym
        grad_enabled = operation.context is None or operation.context.grad_enabled
        wanted = grad_enabled and not symbol.typed_by_running and symbol.connects(
            operation.args, operation.kwargs, operation.inputs
        )  # fmt: skip
        if wanted or changed or not frozen.isdisjoint(operation.inputs):
            new = {
                o: o.replace(requires_grad=wanted)
                for i, o in enumerate(operation.outputs)
                if type(o) is TensorProxy and o.requires_grad != wanted
                if is_inexact(o.dtype) and i not in symbol.nondifferentiable
            }
            operation = operation.swap(new)
            replaced.update(new)
        operations.append(operation)
    output = map_structure(lambda x: replaced.get(x, x) if isinstance(x, Proxy) else x, computation.output)
    return computation.replace(bound_symbols=operations, output=output)


def check_replaced(computation: Trace, overrides: dict[str, tuple]) -> None:
    """Raises CaptureError where a replaced parameter has another type than the computation was captured with.
    overrides: by name, (shape, dtype)."""
    for a in computation.args:
        name = computation.info.parameters.get(a.name) if isinstance(a, Proxy) else None
        if name not in overrides:
            continue
        shape, dtype = overrides[name]
        if (tuple(a.shape), a.dtype) != (shape, from_tensor_dtype(dtype)):
            raise CaptureError(
                f"parameter {name} was replaced by one of shape {shape} and {dtype}, and the program reads it as "
                f"{tuple(a.shape)}, {a.dtype}",
                remedy="a transform that replaces a parameter by another form changes the computation in "
                "transform_traces_pre_prologue",
            )
