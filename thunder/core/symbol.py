"""Symbols: the operations that traces are made of.

A symbol is called like a function. Its meta rule types the result; a symbol without one runs its decomposition for
that. The current `Recorder` records the call as a `BoundSymbol`, which never changes afterwards.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Collection, KeysView
from typing import Any

from thunder.core import dtypes
from thunder.core.bound_symbol import BoundSymbol, adopt, hashable
from thunder.core.definition import Definition
from thunder.core.proxies import NumberProxy, TensorProxy, leaves, map_structure, proxies_in, settled
from thunder.core.recording import (
    RECORDER,
    Context,
    Names,
    Recorder,
    current_recorder,
    detached,
    recording,
    user_location,
)
from thunder.errors import CaptureError, DataDependentError, MissingImplementationError

__all__ = [
    "EFFECTS", "BoundSymbol", "Context", "Names", "OpTags", "Recorder", "Symbol", "adopt", "current_recorder",
    "carries_out", "detached", "form_of", "hashable", "is_outside", "primitive", "recording", "user_location",
]  # fmt: skip


UNBACKED: dict[str, Callable] = {}  # handlers of data-dependent sizes; `thunder.core.unbacked` fills it


class OpTags(enum.Enum):
    """Properties of an operation that passes ask for, beyond its rules."""

    __hash__ = object.__hash__  # every pass looks for some of them in every operation: Enum's is written in Python

    SHAPE_OP = enum.auto()  # moves or views data, computes nothing
    REDUCTION_OP = enum.auto()
    RANDOM_OP = enum.auto()  # draws from a generator: never merged, never repeated
    MATMUL_OP = enum.auto()
    DEVICE_SYNC_OP = enum.auto()  # waits for the device
    DONT_DCE = enum.auto()  # has an effect beyond its outputs
    IN_PLACE = enum.auto()
    DETACHED = enum.auto()  # its results never require grad, whatever its arguments do
    VIEW = enum.auto()  # an output may share memory with the first tensor argument
    DECISION = enum.auto()  # the program may leave for another path here
    OPAQUE = enum.auto()  # typed by running PyTorch on fake tensors, executed by calling PyTorch
    AUTO_REGISTERED = OPAQUE


# operations that may have effects beyond their results
EFFECTS = frozenset((OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE))


def _are_among(outputs: list, inputs: list) -> bool:
    return bool(outputs[0].name) and all(any(o is i for i in inputs) for o in outputs)


_INSIDE = ("thunder", "torch", "builtins", "math", "operator", "_operator", "functools")


def is_outside(declaration: Any) -> bool:
    """Whether a function, or a class, is neither thunder's nor PyTorch's."""
    return (
        declaration is not None and (getattr(declaration, "__module__", None) or "torch").split(".")[0] not in _INSIDE
    )


# the functions that symbols were made with, or that `carries_out` marks: programs on disk may name them
CARRIED_OUT: set[Callable] = set()


def carries_out(function: Callable) -> Callable:
    """Marks a function that carries out an operation, and that no symbol has before a program is lowered."""
    CARRIED_OUT.add(function)
    return function


_OF_GPUS = "cudnn", "cublas", "fp32_precision of cuda"  # settings that kernels on other devices do not follow


class Symbol(Definition):
    """An operation.

    name, module: how it is printed (`ltorch.mul`; a module of None prints the bare name). meta: types the result from
    proxies; a symbol without one is a composite typed by its `decomposition`. fn: the Python callable that executes it,
    if any. implementations look symbols up by `id`. parameters: names of the positional parameters, so that calls by
    keyword are recorded by position. places: the positions of parameters that PyTorch's functions name otherwise.
    explain: turns an error of the meta rule into the one that PyTorch would raise (see `thunder.ops`).
    """

    __slots__ = (
        "name", "module", "id", "meta", "decomposition", "is_prim", "tags", "fn", "executor", "python_printer",
        "parameters", "defaults", "autocast",
        "torch_functions", "canonicalize", "explain", "places", "is_fusion", "sampler", "error_sampler", "grad_rule",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        meta: Callable | None = None,
        *,
        id: Any = None,
        module: str | None = None,
        decomposition: Callable | None = None,
        is_prim: bool = False,
        tags: tuple = (),
        fn: Callable | None = None,
        executor: Any = None,
        python_printer: Callable | None = None,
        is_fusion: bool = False,
    ):
        super().__init__()
        self.name, self.module, self.meta, self.decomposition, self.is_prim = name, module, meta, decomposition, is_prim
        self.id = id if id is not None else f"{module}.{name}" if module else name
        self.tags, self.fn, self.executor = frozenset(tags), fn, executor
        self.python_printer, self.is_fusion = python_printer, is_fusion
        self.autocast: str | None = None
        self.torch_functions: tuple = ()
        self.canonicalize: Callable | None = None
        self.explain: Callable | None = None
        self.places: Callable[..., dict[str, int]] = no_places
        self.sampler = self.error_sampler = self.grad_rule = None
        self.parameters, self.defaults = positional_parameters(decomposition or meta)
        if type(fn) is types.FunctionType or type(fn).__name__.startswith("OpOverload"):
            CARRIED_OUT.add(fn)  # type: ignore[arg-type]
        self.declared_outside = any(map(is_outside, (meta, decomposition, fn, type(executor))))

    @property
    def qualified_name(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name

    def __repr__(self) -> str:
        return f"<Symbol {self.qualified_name}>"

    def __call__(self, /, *args, **kwargs):
        recorder = RECORDER.get()
        if recorder is None:
            return self._run(args, kwargs)
        if kwargs:
            args, kwargs = self._by_position(args, kwargs)
        if self.canonicalize is not None:
            args, kwargs = self.canonicalize(args, kwargs)
        memory = recorder.memory
        if memory is not None and memory.active:
            args, kwargs = map_structure(memory.latest, args), map_structure(memory.latest, kwargs)
        if recorder.context.autocast is not None and self.autocast is not None:
            args, kwargs = recorder.context.autocast(self, args, kwargs)
        subsymbols = None
        try:
            if self.meta is not None:
                outer, recorder.typing = recorder.typing, True
                try:
                    out = self.meta(*args, **kwargs)
                finally:
                    recorder.typing = outer
            else:
                with detached(recorder.context.afterwards) as inner:
                    out = self.decomposition(*args, **kwargs)  # type: ignore[misc]
                subsymbols = inner.bound_symbols
                if inner.sizes is not None:
                    raise DataDependentError(f"the shape of what {self.name} gives", location=user_location())
                if not subsymbols and any(not o.name for o in proxies_in(out, [])):
                    self._become_prim()
        except DataDependentError as error:
            return UNBACKED["typed_otherwise"](self, recorder, args, kwargs, error)
        except Exception as error:
            if any(isinstance(x, NumberProxy) and not x.unbacked for x in leaves((args, kwargs))):
                # a rule that cannot take a symbolic number takes its value
                return self(*map_structure(settled, args), **map_structure(settled, kwargs))
            if self.explain is None:
                raise
            failure = error
        else:
            return self.record(recorder, args, kwargs, out, subsymbols)
        better = self.explain(self, args, kwargs, failure)
        try:  # outside of the handler: eager's error has no context
            raise failure if better is None else better
        finally:
            del failure, better  # their tracebacks hold this frame

    def record(self, recorder: Recorder, args, kwargs, out, subsymbols: list[BoundSymbol] | None = None):
        """Writes the operation `out = self(*args, **kwargs)` and returns `out`, with names given and requires_grad set.

        A result that is one of the arguments, with nothing computed, is returned without an operation.
        """
        inputs = proxies_in(kwargs, proxies_in(args, [])) if kwargs else proxies_in(args, [])
        outputs = [out] if type(out) is TensorProxy else proxies_in(out, [])
        if not subsymbols and outputs and not self.is_fusion and _are_among(outputs, inputs):
            return out
        context = recorder.context
        if context.names.settings and inputs and not subsymbols and self._follows(context.names.settings, inputs):
            raise CaptureError(
                f"{self.name} runs behind a change of PyTorch's settings ({', '.join(context.names.settings)}), and "
                "the compiled program runs under those of its call",
                remedy="change them before the call, or in a function that calls the compiled one",
            )
        if context.default_dtype is not context.names.default_dtype and recorder.memory is not None:
            self._check_dtype(context, args, kwargs, inputs, outputs)
        needs_grad = context.grad_enabled and self.connects(args, kwargs, inputs) and not self.typed_by_running
        self._name(outputs, context, needs_grad)
        operation = BoundSymbol(
            self, args, kwargs, out, context=context.afterwards, inputs=tuple(inputs), outputs=tuple(outputs)
        )
        if subsymbols is not None:
            operation._subsymbols = tuple(subsymbols)
        if recorder.location is not None:
            operation.location = recorder.location()
        if self.bind_postprocess is not None:
            operation = self.bind_postprocess(operation) or operation
        recorder.bound_symbols.append(operation)
        if recorder.memory is not None and OpTags.VIEW in self.tags:
            recorder.memory.add(operation)
        if recorder.sizes:
            UNBACKED["read_sizes"](recorder, operation)
        # the caller's own, who may change it
        return list(out) if type(out) is list else dict(out) if type(out) is dict else out

    def _name(self, outputs: list, context: Context, needs_grad: bool) -> None:
        """Names the new values among the outputs, and sets whether they require grad."""
        apart = self.nondifferentiable if needs_grad else ()
        for i, o in enumerate(outputs):
            if not o.name:
                o.name = context.names.make()
                if needs_grad and i not in apart and type(o) is TensorProxy and o.dtype.category >= 2:
                    o.requires_grad = True
                elif self.executor is not None and type(o) is TensorProxy:
                    o.requires_grad = False  # TensorProxy(like=x) in a user's meta rule copied x's

    def _check_dtype(self, context: Context, args, kwargs, inputs: list, outputs: list) -> None:
        """Refuse what PyTorch computes in the default dtype that the program has set: it runs under the call's."""
        assert context.default_dtype is not None, "the program has set it"
        stated = any(isinstance(x, dtypes.dtype) for x in leaves((args, kwargs)))
        floats = any(p.dtype.category >= 2 for p in inputs if type(p) is TensorProxy)
        if not stated and not floats and any(o.dtype.category >= 2 for o in outputs if type(o) is TensorProxy):
            raise CaptureError(
                f"{self.name} computes in the default dtype, which the program has set to "
                f"{context.default_dtype.torch_name}, and the compiled program runs under that of its call",
                location=user_location(),
                remedy="set it before the call, or say the dtype of this result",
            )

    def _follows(self, settings: tuple[str, ...], inputs: list) -> bool:
        """Whether these settings of PyTorch's may change what the operation computes."""
        if all(name.startswith(_OF_GPUS) for name in settings):
            if not any(p.device.type == "cuda" for p in inputs if isinstance(p, TensorProxy)):
                return False
        return "flush_denormal" in settings or not (self.elementwise or OpTags.SHAPE_OP in self.tags)

    def connects(self, args, kwargs, inputs) -> bool:
        """Whether results of a call require grad, in grad mode; `inputs` are the proxies among the arguments."""
        for i in inputs:  # for each operation that is written: no generator
            if isinstance(i, TensorProxy) and i.requires_grad:
                return OpTags.DETACHED not in self.tags and not (self.detaches and self.detaches(*args, **kwargs))
        return False

    def executed(self, name: str, fn: Callable, executor, *, id: str, module: str | None = None) -> Symbol:
        """This operation as a primitive that a function of an executor computes, with the same facts."""
        made = Symbol(name, id=id, module=module, is_prim=True, tags=tuple(self.tags), fn=fn, executor=executor)
        made.take_facts(self)
        return made

    def bind(self, *args, output, subsymbols=(), context: Context | None = None, **kwargs) -> BoundSymbol:
        """An operation for this symbol with a given output, recorded nowhere."""
        operation = BoundSymbol(self, args, kwargs, output, context=context)
        if subsymbols:
            operation._subsymbols = tuple(subsymbols)
        return operation

    def _become_prim(self) -> None:
        """The decomposition made proxies without computing them: its author meant it as a meta rule."""
        self.meta, self.decomposition, self.is_prim = self.decomposition, None, True

    # --- rules that stand beside the definition, as decorators
    def typed_by(self, meta: Callable) -> Callable:
        """Gives a composite a meta rule of its own, so that typing it does not run its decomposition."""
        self.meta = meta
        return meta

    def decomposed_by(self, function: Callable) -> Callable:
        """Gives a kernel a decomposition; the function returns None for arguments that it does not know."""
        self.decomposition = function
        return function

    def vjp(self, rule: Callable) -> Callable:
        """Gives the operation its derivative: a generator that yields the result, is sent its cotangent, and returns
        the arguments' cotangents."""
        self.grad_rule = rule
        return rule

    def samples(self, function: Callable) -> Callable:
        """`function(make)` yields argument tuples (or (args, kwargs) pairs) that tests call the operation with."""
        self.sampler = function
        return function

    def error_samples(self, function: Callable) -> Callable:
        """`function(make)` yields (args, kwargs) that PyTorch refuses; thunder must refuse them with the same class and
        first words."""
        self.error_sampler = function
        return function

    def _run(self, args: tuple, kwargs: dict):
        """Outside of a trace a symbol is the function that executes it, so that every printed trace is a program that
        runs."""
        run = self.fn or self.decomposition
        if run is None or proxies_in(args, []):
            why = "has no implementation of its own" if run is None else "was given a value of a trace"
            raise MissingImplementationError(
                f"{self.qualified_name} was called outside of a trace and {why}: call it from a function given to "
                "thunder.jit"
            )
        return run(*args, **kwargs)

    def _by_position(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments given by the name of a positional parameter, or by PyTorch's or numpy's other name for it, put in
        their places."""
        names = self.parameters
        renamed = {
            spelled(k, names, self.defaults, lambda: self.places(*self.torch_functions)): v
            for k, v in kwargs.items()
            if k != "out" or v is not None
        }
        if names.isdisjoint(renamed):
            return args, renamed
        positional, order = list(args), list(names)
        last = max(order.index(k) for k in renamed if k in names)
        moved = order[len(args) : last + 1]
        for name in moved:
            if name in renamed:
                positional.append(renamed[name])
            elif name in self.defaults:
                positional.append(self.defaults[name])
            elif self.canonicalize is not None and not renamed.keys() <= names:  # which knows PyTorch's other names
                return args, renamed
            else:
                raise TypeError(f"{self.name}() missing 1 required positional argument: {name!r}")
        for name in moved:
            renamed.pop(name, None)
        for name in renamed:
            if name in names:
                raise TypeError(f"{self.name}() got multiple values for argument {name!r}")
        return tuple(positional), renamed


@functools.cache
def form_of(symbol: Symbol, form: str, fn: Callable) -> Symbol:
    """Another form of an operation that its executor runs: `mm_aligned` of `mm`, which `fn` computes."""
    return symbol.executed(f"{symbol.name}_{form}", fn, symbol.executor, id=f"{form}.{symbol.id}")


def spelled(keyword: str, parameters: Collection[str], defaults: Collection[str], places: Callable[[], dict]) -> str:
    """The name of a parameter for a keyword: operands are found by their places in PyTorch's functions, `axis` is
    dim."""
    # an opaque operation is called as the user calls it
    if keyword in parameters or keyword in defaults or not parameters:
        return keyword
    place = places().get(keyword)
    if place is not None and place < len(parameters):
        return list(parameters)[place]
    return {"axis": "dim", "keepdims": "keepdim"}.get(keyword, keyword)


def no_places(*functions: Callable) -> dict[str, int]:
    """The places of an operation without other names of parameters."""
    return {}


def positional_parameters(function: Callable | None) -> tuple[KeysView[str], dict[str, Any]]:
    """Names of the positional-or-keyword parameters, in order, and the defaults of all."""
    if function is None:
        return {}.keys(), {}
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {p.name: None for p in positional}.keys(), {
        p.name: p.default for p in parameters if p.default is not p.empty
    }


def primitive(meta: Callable, *, tags: tuple = (), module: str | None = None) -> Callable[[Callable], Symbol]:
    """Makes the decorated function a primitive of its name: it computes the primitive on real values, and `meta` types
    the result."""
    return lambda function: Symbol(function.__name__, meta, module=module, is_prim=True, tags=tags, fn=function)
