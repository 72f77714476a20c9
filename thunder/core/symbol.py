"""Symbols (operations), bound symbols (operations of a trace), and the recorder that writes operations while a function
is traced.

A symbol is called like a function. Its meta rule types the result, or, where it has none, its decomposition is run and
typed. The call is recorded in the current `Recorder` as a `BoundSymbol`, which never changes afterwards. Traces are
flat: a composite is one operation, and its decomposition (`bound_symbol.subsymbols`) is made when somebody first asks.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, KeysView
from contextlib import contextmanager
from typing import Any

from thunder.core.codegen import Printer
from thunder.core.definition import Definition
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, leaves, map_structure, numbers_in, proxies_in, settled
from thunder.core.recording import RECORDER, current_recorder, recording, user_location
from thunder.core.symbolic import Facts
from thunder.errors import CaptureError, DataDependentError, MissingImplementationError

__all__ = [
    "EFFECTS",
    "OpTags",
    "Symbol",
    "BoundSymbol",
    "Recorder",
    "Context",
    "Names",
    "recording",
    "current_recorder",
    "user_location",
    "detached",
    "adopt",
    "form_of",
]


UNBACKED: dict[str, Callable] = {}  # what is done about data-dependent sizes; `thunder.core.unbacked` fills it


class OpTags(enum.Enum):
    """What passes need to know about an operation, beyond its rules."""

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


# what may do something beyond its results
EFFECTS = frozenset((OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE))


class Names:
    """The names taken in a program, shared by all traces made from it. facts: what is known of its numbers that data
    decides, by name.

    backends: what attention might use when the capture of the program began; attends: whether the program depends on
    that. settings: the names of settings of PyTorch's that the program has changed, and that kernels follow.
    """

    __slots__ = ("taken", "counters", "facts", "backends", "attends", "settings")

    def __init__(self):
        self.taken: set[str] = {"_"}  # what a printed program calls an output that is None
        self.counters: dict[str, int] = {}
        self.facts = Facts()
        self.backends: tuple | None = None
        self.attends = False
        self.settings: tuple[str, ...] = ()

    def make(self, prefix: str = "t") -> str:
        """A new name, the prefix and a number."""
        n = self.counters.get(prefix, 0)
        while (name := f"{prefix}{n}") in self.taken:
            n += 1
        self.counters[prefix] = n + 1
        self.taken.add(name)
        return name

    def claim(self, name: str) -> str:
        """`name` where it is free, else a variation of it."""
        if name in self.taken:
            return self.make(f"{name}_")
        self.taken.add(name)
        return name


class Context:
    """The state an operation was recorded under, and under which its decomposition is run later. One object for a
    stretch of operations; never mutated.

    checkpoint: the activation checkpoints that the operation stands in, the outermost first. backward: which of the
    backwards inside of the program it belongs to, counted from 1; 0: none.
    """

    __slots__ = (
        "names", "grad_enabled", "autocast", "default_dtype", "default_device", "checkpoint", "backward", "_afterwards",
    )  # fmt: skip

    def __init__(
        self,
        names: Names,
        *,
        grad_enabled: bool = True,
        autocast=None,
        default_dtype=None,
        default_device=None,
        checkpoint: tuple = (),
        backward: int = 0,
    ):
        self.names, self.grad_enabled, self.autocast = names, grad_enabled, autocast
        self.default_dtype, self.default_device, self.checkpoint = default_dtype, default_device, checkpoint
        self.backward = backward
        self._afterwards: Context | None = None

    @property
    def afterwards(self) -> Context:
        """What is made of an operation later is made under this one: without autocast, the casts of which are
        operations of their own by then."""
        if self.autocast is None:
            return self
        if self._afterwards is None:
            self._afterwards = self.replace(autocast=None)
        return self._afterwards

    def replace(self, **changes) -> Context:
        kept = ("grad_enabled", "autocast", "default_dtype", "default_device", "checkpoint", "backward")
        fields = {k: getattr(self, k) for k in kept} | changes
        return Context(changes.get("names", self.names), **{k: v for k, v in fields.items() if k != "names"})


class Recorder:
    """The list of operations being written: the only mutable thing while a function is traced.

    sizes: those that the meta rule of the operation being written leaves to the run (`thunder.core.unbacked`); None
    while there was none.

    context: see `Context`; replaced, not changed, when the program enters or leaves a mode. memory: what in-place
    operations have made of values (`thunder.ops.memory`), where there may be any. casts: of leaves, by autocast
    (`thunder.ops.autocast`); is_leaf says what is one. location: called for each operation, gives where in the user's
    code it came from, in a form that costs little; where: the same as (filename, line, function, source line), for
    errors.

    decide: answers what is data-dependent, see `thunder.core.paths`; None where such a question is an error. typing:
    whether a meta rule is running, which is typed by examples where it asks.
    """

    __slots__ = (
        "bound_symbols", "context", "memory", "casts", "is_leaf", "location", "where", "sizes", "decide", "typing",
    )  # fmt: skip

    def __init__(
        self,
        context: Context | None = None,
        location: Callable[[], Any] | None = None,
        where: Callable[[], tuple | None] | None = None,
    ):
        self.bound_symbols: list[BoundSymbol] = []
        self.context = context or Context(Names())
        self.memory: Any = None
        self.casts: dict = {}
        self.is_leaf: Callable[[TensorProxy], bool] | None = None
        self.location, self.where = location, where
        self.sizes: list | None = None
        self.decide: Any = None
        self.typing = False

    def latest(self, x):
        """What a proxy stands for after the in-place operations recorded so far."""
        return self.memory.latest(x) if self.memory is not None and self.memory.active else x


@contextmanager
def detached(context: Context | None = None) -> Iterator[Recorder]:
    """A recorder of its own for operations that do not belong to the program (a checker's probing, a decomposition)."""
    outer = current_recorder()
    with recording(Recorder(context or (outer.context if outer else None))) as recorder:
        yield recorder


def _are_among(outputs: list, inputs: list) -> bool:
    return bool(outputs[0].name) and all(any(o is i for i in inputs) for o in outputs)


_OF_GPUS = "cudnn", "cublas", "fp32_precision of cuda"  # settings that kernels on other devices do not follow


class Symbol(Definition):
    """An operation.

    name, module: how it is printed (`ltorch.mul`; a module of None prints the bare name). meta: types the result from
    proxies; a symbol without one is a composite typed by its `decomposition`. fn: the Python callable that executes it,
    if any. implementations look symbols up by `id`. parameters: names of the positional parameters, so that calls by
    keyword are recorded by position. places: where functions of PyTorch take what they call otherwise. explain: see
    `thunder.ops`: turns an error of the meta rule into the one PyTorch would raise.
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
        self.tags, self.fn, self.executor, self.python_printer, self.is_fusion = (
            frozenset(tags),
            fn,
            executor,
            python_printer,
            is_fusion,
        )
        self.autocast: str | None = None
        self.torch_functions: tuple = ()
        self.canonicalize: Callable | None = None
        self.explain: Callable | None = None
        self.places: Callable[..., dict[str, int]] = no_places
        self.sampler = self.error_sampler = self.grad_rule = None
        self.parameters, self.defaults = positional_parameters(decomposition or meta)

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
        """Names what is made here, which has no name yet, and says whether it requires grad."""
        apart = self.nondifferentiable if needs_grad else ()
        for i, o in enumerate(outputs):
            if not o.name:
                o.name = context.names.make()
                if needs_grad and i not in apart and type(o) is TensorProxy and o.dtype.category >= 2:
                    o.requires_grad = True
                elif self.executor is not None and type(o) is TensorProxy:
                    o.requires_grad = False  # TensorProxy(like=x) in a user's meta rule copied x's

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
        """This operation as a function of an executor's computes it: a primitive, of which the same is known."""
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
        """Says what a kernel computes, in operations; the function returns None for arguments that it does not know."""
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
    """What an argument is called here: operands are found by their places in PyTorch's functions, `axis` is dim."""
    # an opaque operation is called as the user calls it
    if keyword in parameters or keyword in defaults or not parameters:
        return keyword
    place = places().get(keyword)
    if place is not None and place < len(parameters):
        return list(parameters)[place]
    return {"axis": "dim", "keepdims": "keepdim"}.get(keyword, keyword)


def no_places(*functions: Callable) -> dict[str, int]:
    """An operation's own names are all that it knows."""
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


class BoundSymbol:
    """One operation of a trace: `output = sym(*args, **kwargs)`. `inputs` and `outputs` are the proxies in it, flat.
    Never changed once made."""

    __slots__ = (
        "sym",
        "args",
        "kwargs",
        "output",
        "context",
        "inputs",
        "outputs",
        "location",
        "header",
        "_subsymbols",
        "aliases",
        "__weakref__",
    )

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
        self.aliases: dict[Proxy, Any] = {}  # outputs that the decomposition does not compute: the inputs they are

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
        with detached(self.context) as inner:
            inner.location = lambda: self.location
            try:
                result = self.sym.decomposition(*self.args, **self.kwargs)  # type: ignore[misc]
            except DataDependentError:  # another one for other sizes
                return ()
        if result is None and self.output is not None:
            return ()
        operations, self.aliases = adopt(inner.bound_symbols, result, self.output)
        return tuple(operations)

    def replace(self, **changes) -> BoundSymbol:
        """A copy with some of sym, args, kwargs, output, subsymbols, context changed. `from_bsym` is the same."""
        new = BoundSymbol(
            changes.get("sym", self.sym), changes.get("args", self.args), changes.get("kwargs", self.kwargs),
                changes.get("output", self.output),
            context=changes.get("context", self.context), location=self.location,
            inputs=None if "args" in changes or "kwargs" in changes else self.inputs,
            outputs=None if "output" in changes else self.outputs,
        )  # fmt: skip
        new.header = self.header
        if "subsymbols" in changes:
            new._subsymbols = tuple(changes["subsymbols"])
        elif "args" not in changes and "kwargs" not in changes and "output" not in changes and "sym" not in changes:
            new._subsymbols, new.aliases = self._subsymbols, self.aliases
        return new

    from_bsym = replace

    def copied(self) -> BoundSymbol:
        """A copy with a decomposition of its own: what is decided while it is made is decided for the copy."""
        new = self.replace()
        if self._subsymbols is not None:
            new._subsymbols = tuple(operation.copied() for operation in self._subsymbols)
        return new

    def swap(self, table: dict[Proxy, Any]) -> BoundSymbol:
        """A copy that reads and writes other values: `table` maps proxies to what takes their place."""
        if table.keys().isdisjoint(self.inputs) and table.keys().isdisjoint(self.outputs):
            return self

        def swapped(x):
            return table.get(x, x) if isinstance(x, Proxy) else x.renamed(table) if isinstance(x, NumberProxy) else x

        kwargs = map_structure(swapped, self.kwargs) if self.kwargs else self.kwargs
        new = BoundSymbol(
            self.sym,
            map_structure(swapped, self.args),
            kwargs,
            map_structure(swapped, self.output),
            context=self.context,
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

    Values keep their names from pass to pass: what the operations make is renamed to what it replaces. Returns the
    operations, and for each wanted value that they do not make (it is an input, a number, or another wanted value) what
    it is. Raises ValueError where the structures differ in length.
    """
    pairs = list(zip(leaves(result), leaves(wanted), strict=True))
    made = {o for operation in operations for o in operation.outputs}
    table: dict[Proxy, Any] = {}
    for new, old in pairs:
        if isinstance(new, Proxy) and isinstance(old, Proxy) and new in made and new not in table:
            table[new] = old
    aliases = {
        old: table.get(new, new) if isinstance(new, Proxy) else new for new, old in pairs if isinstance(old, Proxy)
    }
    aliases = {old: new for old, new in aliases.items() if new is not old}
    changed = {new: old for new, old in table.items() if new is not old}
    return [operation.swap(changed) for operation in operations] if changed else list(operations), aliases


def hashable(x):
    """A hashable form of a structure of arguments: proxies by identity, 1, 1.0 and True kept apart."""
    if isinstance(x, NumberProxy):
        return (NumberProxy, x.expression)
    if isinstance(x, Proxy):
        return x
    if isinstance(x, (tuple, list)):
        return (type(x).__name__, *map(hashable, x))
    if isinstance(x, dict):
        return ("dict", *((k, hashable(v)) for k, v in x.items()))
    if isinstance(x, slice):
        return ("slice", hashable(x.start), hashable(x.stop), hashable(x.step))
    try:
        hash(x)
    except TypeError:
        return (type(x), id(x))
    return (type(x), repr(x) if isinstance(x, float) else x)
