"""Symbols: the operations that traces are made of.

A symbol is called like a function. Its meta rule types the result; a symbol without one runs its decomposition for
that. The current `Recorder` records the call as a `BoundSymbol`, which never changes afterwards. Traces are flat: a
composite is one bound symbol. Its decomposition (`bound_symbol.subsymbols`) is made when it is first asked for.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from thunder.core import dtypes
from thunder.core.codegen import Printer
from thunder.core.definition import Definition, Unfit
from thunder.core.proxies import (
    NumberProxy,
    Proxy,
    TensorProxy,
    hashable,
    leaves,
    map_structure,
    numbers_in,
    proxies_in,
    settled,
)
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
from thunder.core.signatures import no_places, positional_parameters, spelled
from thunder.core.tags import CARRIED_OUT, EFFECTS, OpTags, carries_out, is_outside
from thunder.errors import (
    CaptureError,
    DataDependentError,
    DeclarationError,
    MissingImplementationError,
    note_raised,
)

__all__ = [
    "EFFECTS", "BoundSymbol", "Context", "Names", "OpTags", "Recorder", "Symbol", "adopt", "current_recorder",
    "carries_out", "detached", "form_of", "hashable", "is_outside", "primitive", "recording", "user_location",
]  # fmt: skip


UNBACKED: dict[str, Callable] = {}  # handlers of data-dependent sizes; `thunder.core.unbacked` fills it


def _are_among(outputs: list, inputs: list) -> bool:
    return bool(outputs[0].name) and all(any(o is i for i in inputs) for o in outputs)


_OF_GPUS = "cudnn", "cublas", "fp32_precision of cuda"  # settings that kernels on other devices do not follow


_UNCHANGED: Any = object()  # of `BoundSymbol.replace`


class BoundSymbol:
    """One operation of a trace: `output = sym(*args, **kwargs)`. `inputs` and `outputs` are the proxies in it, flat.
    Never changed once made."""

    __slots__ = (
        "sym", "args", "kwargs", "output", "context", "inputs", "outputs", "location", "header", "_subsymbols",
        "aliases", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        sym: Symbol,
        args: tuple,
        kwargs: dict,
        output,
        *,
        context: Context | None = None,
        inputs=None,
        outputs=None,
        location=None,
    ):
        self.sym, self.args, self.kwargs, self.output, self.context = sym, args, kwargs, output, context
        self.inputs: tuple[Proxy, ...] = tuple(proxies_in(kwargs, proxies_in(args, []))) if inputs is None else inputs
        self.outputs: tuple[Proxy, ...] = tuple(proxies_in(output, [])) if outputs is None else outputs
        self.location, self.header = location, ""
        self._subsymbols: tuple[BoundSymbol, ...] | None = None
        self.aliases: dict[Proxy, Any] = {}  # by output that the decomposition does not compute, the input that it is

    flat_proxy_args = property(lambda self: self.inputs)
    flat_proxy_outs = property(lambda self: self.outputs)
    tags = property(lambda self: self.sym.tags)

    @property
    def subsymbols(self) -> tuple[BoundSymbol, ...]:
        """The decomposition: operations that compute the same outputs, under the same names. Empty for a prim, and
        where it depends on data-dependent sizes."""
        if self._subsymbols is None and self.sym.decomposition is not None:
            number = next((n for n in numbers_in([self.args, self.kwargs], []) if not n.unbacked), None)
            if number is not None and number.decisions.closed:  # somebody looks at a program that is made
                with number.decisions.anew({}):
                    return self._decompose()
            self._subsymbols = self._decompose()
        return self._subsymbols or ()

    def _decompose(self) -> tuple[BoundSymbol, ...]:
        """The operations that the decomposition of this one records; none where it has none for these arguments."""
        with detached(self.context) as inner:
            inner.location = lambda: self.location
            try:
                result = self.sym.decomposition(*self.args, **self.kwargs)  # type: ignore[misc]
            except (DataDependentError, Unfit):  # another one for other sizes; none for these arguments
                return ()
        if result is None and self.output is not None:
            return ()
        operations, self.aliases = adopt(inner.bound_symbols, result, self.output)
        return tuple(operations)

    @property
    def primitive(self) -> BoundSymbol | None:
        """The one primitive that a composite is: `prims.tanh` of `ltorch.tanh`."""
        operation = self
        while len(operation.subsymbols) == 1:
            operation = operation.subsymbols[0]
        return operation if operation.sym.is_prim and operation.sym.executor is None else None

    def replace(
        self,
        *,
        sym: Any = _UNCHANGED,
        args: Any = _UNCHANGED,
        kwargs: Any = _UNCHANGED,
        output: Any = _UNCHANGED,
        subsymbols: Any = _UNCHANGED,
        context: Any = _UNCHANGED,
    ) -> BoundSymbol:
        """A copy with some of sym, args, kwargs, output, subsymbols, context changed. `from_bsym` is the same."""
        reads_same, writes_same = args is _UNCHANGED and kwargs is _UNCHANGED, output is _UNCHANGED
        new = BoundSymbol(
            self.sym if sym is _UNCHANGED else sym,
            self.args if args is _UNCHANGED else args,
            self.kwargs if kwargs is _UNCHANGED else kwargs,
            self.output if writes_same else output,
            context=self.context if context is _UNCHANGED else context,
            inputs=self.inputs if reads_same else None,
            outputs=self.outputs if writes_same else None,
            location=self.location,
        )
        new.header = self.header
        if subsymbols is not _UNCHANGED:
            new._subsymbols = tuple(subsymbols)
        elif reads_same and writes_same and sym is _UNCHANGED:
            new._subsymbols, new.aliases = self._subsymbols, self.aliases
        return new

    from_bsym = replace

    def copied(self) -> BoundSymbol:
        """A copy with a decomposition of its own, whose decisions about sizes hold for the copy."""
        new = self.replace()
        if self._subsymbols is not None:
            new._subsymbols = tuple(operation.copied() for operation in self._subsymbols)
        return new

    def swap(self, table: dict[Proxy, Any]) -> BoundSymbol:
        """A copy that reads and writes other values: `table` maps proxies to what takes their place."""
        reads_same, writes_same = table.keys().isdisjoint(self.inputs), table.keys().isdisjoint(self.outputs)
        if reads_same and writes_same:
            return self

        def swapped(x):
            if type(x) is TensorProxy:
                return table.get(x, x)
            return table.get(x, x) if isinstance(x, Proxy) else x.renamed(table) if isinstance(x, NumberProxy) else x

        new = BoundSymbol(
            self.sym,
            self.args if reads_same else map_structure(swapped, self.args),
            self.kwargs if reads_same or not self.kwargs else map_structure(swapped, self.kwargs),
            self.output if writes_same else map_structure(swapped, self.output),
            context=self.context,
            inputs=self.inputs if reads_same else None,
            outputs=self.outputs if writes_same else None,
            location=self.location,
        )
        if self._subsymbols:
            new._subsymbols = tuple(s.swap(table) for s in self._subsymbols)
        return new

    def has_input(self, proxy: Proxy) -> bool:
        return any(p is proxy for p in self.inputs)

    @property
    def rhs(self):
        """A hashable key of the right-hand side: equal for two operations that compute the same."""
        return (self.sym.id, self.sym.module, hashable(self.args), hashable(self.kwargs))

    def __repr__(self) -> str:
        return "\n".join(Printer(print_depth=1).line(self))

    def python(self, indent: int = 0, commented: bool = False, print_depth: int = 1) -> list[str]:
        return Printer(print_depth=print_depth).line(self, indent, commented)


def adopt(operations: list[BoundSymbol], result, wanted) -> tuple[list[BoundSymbol], dict[Proxy, Any]]:
    """Lets `operations`, whose result is `result`, compute the values of `wanted`, a structure of the same form.

    Values keep their names from pass to pass: results of the operations get the names of the values that they replace.
    Returns the operations, and a dict from each wanted value that they do not compute to the input, number or other
    wanted value that it is. Raises ValueError where the structures differ in length.
    """
    if type(result) is type(wanted) is TensorProxy:
        pairs = [(result, wanted)]
    else:
        pairs = list(zip(leaves(result), leaves(wanted), strict=True))
    produced = {o for operation in operations for o in operation.outputs}
    table: dict[Proxy, Any] = {}
    for new, old in pairs:
        if isinstance(new, Proxy) and isinstance(old, Proxy) and new in produced and new not in table:
            table[new] = old
    aliases = {
        old: table.get(new, new) if isinstance(new, Proxy) else new for new, old in pairs if isinstance(old, Proxy)
    }
    aliases = {old: new for old, new in aliases.items() if new is not old}
    changed = {new: old for new, old in table.items() if new is not old}
    return [operation.swap(changed) for operation in operations] if changed else list(operations), aliases


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

    @property
    def is_operator_of_user(self) -> bool:
        """Whether a user has registered it with an executor."""
        return self.executor is not None and self.declared_outside

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
                if self.is_operator_of_user:
                    note_raised(error, f"the {'like' if self.meta is None else 'meta'} of {self.qualified_name}")
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
            if self.is_operator_of_user and self.meta is not None:
                raise DeclarationError(
                    f"the meta of {self.qualified_name} returned {outputs[0].name}, which is an argument: return a new "
                    "value of its type, TensorProxy(like=...)"
                )
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
        executed = Symbol(name, id=id, module=module, is_prim=True, tags=tuple(self.tags), fn=fn, executor=executor)
        executed.take_facts(self)
        return executed

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


def primitive(meta: Callable, *, tags: tuple = (), module: str | None = None) -> Callable[[Callable], Symbol]:
    """Makes the decorated function a primitive of its name: it computes the primitive on real values, and `meta` types
    the result."""
    return lambda function: Symbol(function.__name__, meta, module=module, is_prim=True, tags=tags, fn=function)
