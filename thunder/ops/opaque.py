"""Any torch function without a definition here: typed by running it on fake tensors, executed by calling it.

Operators registered with torch.library come the same way; their author gave them a rule for fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, leaves, like, map_structure, proxies_in
from thunder.core.symbol import OpTags, Symbol, current_recorder, detached, hashable, user_location
from thunder.core.unbacked import fresh_size
from thunder.errors import CaptureError
from thunder.ops.define import alias, lookup, torch_path
from thunder.ops.explain import as_torch, example, fake
from thunder.ops.opaque_values import CONSTRUCTORS, holds_unusual, is_tensor, is_unusual, typed_by_example
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype

__all__ = [
    "symbol_for",
    "is_opaque",
    "written_by",
    "written_by_builtin",
    "derivative_of",
    "vjp_of",
    "casts_inside",
    "typed_by_running",
]

_SYMBOLS: dict = {}


def is_opaque(symbol: Symbol) -> bool:
    return OpTags.OPAQUE in symbol.tags


def symbol_for(function) -> Symbol:
    """The opaque operation for a torch function. One symbol per function, and one for each state of autocast: PyTorch
    does its casts inside the function."""
    if isinstance(function, compat.OpOverload) and function._overloadname == "default":
        function = function.overloadpacket
    recorder = current_recorder()
    kinds = recorder.context.autocast.state[0] if recorder is not None and recorder.context.autocast is not None else ()
    symbol = _SYMBOLS.get((function, kinds))
    if symbol is None:
        symbol = _SYMBOLS[function, kinds] = _make_under_autocast(function, kinds) if kinds else _make(function)
    return symbol


def _make_under_autocast(function, kinds: tuple) -> Symbol:
    plain, typed = _make(function), _TYPED_UNDER_AUTOCAST.get(function)
    name = f"autocast_{plain.name}"

    def run(*args, **kwargs):
        with compat.autocast_on(kinds):
            return function(*args, **kwargs)

    def meta(*args, **kwargs):
        return (
            typed(dict(kinds), *args, **kwargs)
            if typed is not None
            else _typed_by_running(run, plain.name, args, kwargs)
        )

    return Symbol(name, meta, id=("opaque", name, id(function), kinds), is_prim=True, tags=tuple(plain.tags), fn=run)


_TYPED_UNDER_AUTOCAST: dict = {}


def casts_inside(
    *functions, typed: Callable | None = None, when: Callable = lambda lower, *args, **kwargs: True
) -> None:
    """For functions that PyTorch composes of others, some of which autocast casts: under autocast they are taken as
    they are.

    typed: types what they give then, for functions that fake tensors cannot run; called with the autocast dtype of each
    kind of device, and the arguments. when: for which arguments, called alike.
    """
    for function in functions:
        if typed is not None:
            _TYPED_UNDER_AUTOCAST[function] = typed
        usual = lookup(function)
        assert usual is not None, f"{function} is no operation"

        def call(*args, function=function, usual=usual, **kwargs):
            recorder = current_recorder()
            inside = (
                recorder is not None
                and recorder.context.autocast is not None
                and when(recorder.context.autocast.targets, *args, **kwargs)
            )
            return (symbol_for(function) if inside else usual)(*args, **kwargs)

        call.__name__, call.__wrapped__ = getattr(function, "__name__", "call"), usual  # type: ignore[attr-defined]
        alias(function, over=usual)(call)


def _make(function) -> Symbol:
    path = torch_path(function)
    name = path[1] if path else _identifier(function)

    meta = typed_by_running(function, name)
    custom = _custom_path(function)
    if custom is not None:
        module, name = custom
        overload = getattr(function, "_overloadname", "default")
        identity = f"{module}.{name}" if overload == "default" else f"{module}.{name}.{overload}"
        return Symbol(name, meta, module=module, id=identity, is_prim=True, tags=(OpTags.DONT_DCE,), fn=function)
    made = Symbol(
        name,
        meta,
        module=path[0] if path else None,
        id=("opaque", name, id(function)),
        is_prim=True,
        tags=(OpTags.OPAQUE, OpTags.DONT_DCE),
        fn=function,
    )
    made.typed_by_running = True  # which results require grad is known as well
    return made


def _custom_path(function) -> tuple[str, str] | None:
    """("torch.ops.<namespace>", name) of an operator that somebody registered with torch.library: its author's fake
    rule types it, so it is not opaque."""
    if not isinstance(function, (compat.OpOverload, compat.OpOverloadPacket)):
        return None
    packet = function if isinstance(function, compat.OpOverloadPacket) else function.overloadpacket
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace in ("aten", "prims", "prim", "torchvision", "c10d", "_c10d_functional", "quantized"):
        return None
    return (
        (f"torch.ops.{namespace}", name)
        if packet is function
        else (f"torch.ops.{namespace}.{name}", function._overloadname)
    )


def written_by(function, args: tuple, kwargs: dict) -> list[TensorProxy]:
    """The tensors among the arguments that an operator writes to, as its schema says."""
    if isinstance(function, compat.OpOverloadPacket):
        overloads = function.overloads()
        if _custom_path(function) is None or overloads != ["default"]:
            return []
        function = function.default
    if not isinstance(function, compat.OpOverload) or _custom_path(function) is None:
        return []
    return _written(function, args, kwargs)


def written_by_builtin(function, args: tuple, kwargs: dict) -> list[TensorProxy]:
    """The same for a function of PyTorch's that takes lists of tensors (`torch._fused_adamw_`)."""
    packet = getattr(torch.ops.aten, function.__name__, None)
    if packet is None or packet.overloads()[0] != "default":
        raise CaptureError(
            f"{function.__name__} writes to its arguments, it is not known to which",
            location=user_location(),
            remedy="call it outside of the compiled function",
        )
    return _written(packet.default, args, kwargs)


def _written(function, args: tuple, kwargs: dict) -> list[TensorProxy]:
    found: list = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            proxies_in(args[i] if i < len(args) else kwargs.get(argument.name), found)
    return found


def _identifier(function) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        name = f"{name.strip('_')}_{getattr(function.__self__, '__name__', 'attribute')}"
    name = name.partition(".")[0]  # of `name.overload`
    return name if name.isidentifier() else "torch_function"


def typed_by_running(function, name: str):
    """A meta rule that runs the function on fake tensors."""

    def meta(*args, **kwargs):
        return _typed_by_running(function, name, args, kwargs)

    return meta


def _typed_by_running(function, name: str, args: tuple, kwargs: dict):
    if function in CONSTRUCTORS or holds_unusual((args, kwargs)):
        return typed_by_example(function, name, args, kwargs)
    if (
        name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
        and len(args) == 9
        and isinstance(args[1], TensorProxy)
        and not isinstance(args[8], TensorProxy)
    ):
        if name == "lstm" or isinstance(args[2], TensorProxy):
            return _packed_recurrence(*args)
    try:
        return _typed_under(compat.FakeTensorMode(), function, name, args, kwargs)
    except (compat.DataDependentOutput, compat.DynamicOutputShape):
        mode = compat.fake_mode_of_sizes()
    try:  # data-dependent sizes come out as symbols
        return _typed_under(mode, function, name, args, kwargs)
    except (
        compat.DataDependentOutput,
        compat.DynamicOutputShape,
        compat.UnsupportedOperator,
        torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode,
    ) as error:
        raise CaptureError(
            f"the shape or value of {name}'s result depends on data",
            location=user_location(),
            remedy="compute it outside of the compiled function and pass it in, or use an operation with a fixed "
            "output shape",
        ) from error


def _packed_recurrence(a, batch_sizes, state, parameters, biases, layers, dropout, train, bidirectional):
    """A recurrent network on packed sequences: PyTorch reads how long they are, which fake tensors do not tell."""
    states = state if isinstance(state, (tuple, list)) else (state,)
    return like(a, (a.shape[0], states[0].shape[-1] * (2 if bidirectional else 1))), *map(like, states)


# results that say something of shapes and types
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _differentiates_fakes(values) -> bool:
    """Whether this PyTorch can differentiate fake tensors like these: a build without CUDA ends the process where they
    are on a GPU, as those of a plan are."""
    return torch.backends.cuda.is_built() or not any(
        p.device.type == "cuda" for p in proxies_in(values, []) if isinstance(p, TensorProxy)
    )


def _typed_under(mode: compat.FakeTensorMode, function, name: str, args: tuple, kwargs: dict):
    recorder = current_recorder()
    grad = recorder is not None and recorder.context.grad_enabled
    tracks = _differentiates_fakes((args, kwargs))
    known: dict[int, TensorProxy] = {}
    given: list[torch.Tensor] = []  # ids in `known` stay valid while these live

    def fake(x):
        if not isinstance(x, TensorProxy):
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else example(x)
        given.append(example(x, requires_grad=grad and tracks and x.requires_grad))
        known[id(given[-1])] = x
        return given[-1]

    quiet = compat.quiet_fake_tensors()
    with (
        quiet,
        compat.DisableTorchFunction(),
        mode,
        torch.set_grad_enabled(grad),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        fake_args, fake_kwargs = map_structure(fake, args), map_structure(fake, kwargs)
        out = function(*fake_args, **fake_kwargs)

    with compat.DisableTorchFunction():
        if any(isinstance(x, torch.Tensor) and is_unusual(x) for x in leaves(out)):
            return typed_by_example(function, name, args, kwargs)
    memory = getattr(recorder, "memory", None)

    def typed(x):
        if not isinstance(x, torch.Tensor):
            if not isinstance(x, _PLAIN):
                what = f"{name} gives a {type(x).__name__}, which stands for memory of a tensor"
                raise CaptureError(what, location=user_location(), remedy="ask for it outside of the compiled function")
            return x
        if id(x) in known:
            return known[id(x)]
        shape = tuple(
            [fresh_size() if isinstance(n, torch.SymInt) and not n.node.is_constant() else int(n) for n in x.shape]
        )
        differentiable = x.requires_grad if tracks else grad and any(p.requires_grad for p in known.values())
        made = TensorProxy(
            shape=shape,
            dtype=from_tensor_dtype(x.dtype),
            device=from_tensor_device(x.device),
            requires_grad=differentiable,
        )
        if memory is not None:
            storage = x.untyped_storage()._cdata
            for argument in given:
                if argument.untyped_storage()._cdata == storage:
                    memory.share(made, known[id(argument)])
        return made

    with compat.DisableTorchFunction():
        return map_structure(typed, out)


# ----------------------------------------------------------------------------------------------------------------
# PyTorch's own derivative


class Graph:
    """The piece of PyTorch's autograd graph that one operation left: what its derivative saves."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]):
        self.inputs, self.outputs = inputs, outputs


def _tensors_in(value, found: list) -> list:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for x in value:
            _tensors_in(x, found)
    elif isinstance(value, dict):
        for x in value.values():
            _tensors_in(x, found)
    return found


def derivative_of(symbol: Symbol, functional: bool = False):
    """A rule for an operation without one: PyTorch differentiates it. It runs once, with grad on detached inputs, and
    its small graph is saved.

    functional: nothing is saved; the backward runs the operation again, and can itself be differentiated, any number of
    times. What draws random numbers has no such form: it keeps the graph, and can be differentiated once.
    """
    functional = functional and OpTags.RANDOM_OP not in symbol.tags
    rule = _DERIVATIVES.get((symbol, functional))
    if rule is None:
        rule = _DERIVATIVES[symbol, functional] = (
            _functional_derivative(symbol) if functional else _make_derivative(symbol)
        )
    return rule


_DERIVATIVES: dict = {}


def _wanted(args, kwargs) -> tuple[list[TensorProxy], tuple[int, ...]]:
    """The tensors among the arguments of an operation, and the positions of those that get a gradient."""
    flat = [p for p in proxies_in(kwargs, proxies_in(args, [])) if is_tensor(p)]
    return flat, tuple(
        i for i, p in enumerate(flat) if isinstance(p, TensorProxy) and p.requires_grad and p.dtype.category >= 2
    )


def _as_structure(wanted: tuple, gradients, args, kwargs):
    """The gradients of the arguments in the wanted positions, in the places of these; last those of keyword arguments,
    as a dict."""
    table, position = dict(zip(wanted, gradients, strict=True)), iter(range(1 << 30))

    def taken(x):
        return table.get(next(position)) if is_tensor(x) else None

    return (*map_structure(taken, args), map_structure(taken, kwargs))


_REACHED: dict = {}


def _reached(symbol: Symbol, wanted: tuple, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """Those of the wanted positions that PyTorch has a gradient for and not None: it is differentiated on fake tensors,
    once for arguments of one kind."""
    # a library's, whose backward is anybody's Python
    if symbol.module is not None and symbol.module.startswith("torch.ops"):
        return wanted

    def described(x):
        return (tuple(x.shape), x.dtype.name, str(x.device)) if isinstance(x, TensorProxy) else x

    key = (symbol.id, wanted, hashable(map_structure(described, args)), hashable(map_structure(described, kwargs)))
    found = _REACHED.get(key)
    if found is None:
        found = _REACHED[key] = _differentiated_on_fakes(symbol, wanted, args, kwargs)
        if len(_REACHED) > 1024:
            _REACHED.pop(next(iter(_REACHED)))
    return found


def _differentiated_on_fakes(symbol: Symbol, wanted: tuple, args: tuple, kwargs: dict) -> tuple[int, ...]:
    def real(x):
        return example(x) if isinstance(x, AnyProxy) else fake(x)

    if not _differentiates_fakes((args, kwargs)):
        return wanted
    inputs: list[torch.Tensor] = []
    for mode, made in (
        (compat.FakeTensorMode(allow_non_fake_inputs=True), example),
        (torch.random.fork_rng(devices=[]), real),
    ):
        try:
            with compat.DisableTorchFunction(), mode, torch.enable_grad(), warnings.catch_warnings(action="ignore"):
                given = _with_inputs(
                    wanted,
                    map_structure(made, args),
                    map_structure(made, kwargs),
                    lambda x: inputs.append(x.requires_grad_()) or x,
                )
                results = symbol.fn(*given[0], **given[1])  # type: ignore[misc]
                outputs = [o for o in _tensors_in(results, []) if o.requires_grad]
                gradients = torch.autograd.grad(
                    outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True
                )
            return tuple(i for i, g in zip(wanted, gradients, strict=True) if g is not None)
        except compat.DataDependentOutput:  # it looks at values: zeros have some
            inputs.clear()
        except (
            RuntimeError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            AssertionError,
            CaptureError,
        ):
            # fake tensors run PyTorch's decompositions, which refuse, or divide by 0, where kernels do not
            break
    return wanted


def _with_inputs(wanted: tuple, args: tuple, kwargs: dict, replaced) -> tuple[tuple, dict]:
    """Arguments for PyTorch, with `replaced(tensor)` in the wanted positions."""
    position = iter(range(1 << 30))

    def convert(x):
        if not isinstance(x, torch.Tensor):
            return as_torch(x)
        return replaced(x) if next(position) in wanted else x

    return map_structure(convert, args), map_structure(convert, kwargs)


def _make_derivative(symbol: Symbol):
    def run_forward(wanted: tuple, args: tuple, kwargs: dict):
        inputs: list[torch.Tensor] = []

        def detached(x):
            inputs.append(x.detach().requires_grad_())
            return inputs[-1]

        args, kwargs = _with_inputs(wanted, args, kwargs, detached)
        with torch.enable_grad():
            out = symbol.fn(*args, **kwargs)  # type: ignore[misc]
        return map_structure(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out), Graph(
            inputs, _tensors_in(out, [])
        )

    def run_backward(graph: Graph, cotangents: tuple):
        pairs = [(o, g) for o, g in zip(graph.outputs, cotangents, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(x) for x in graph.inputs)
        return _gradients(pairs, graph.inputs, retain_graph=compat.keeps_graph())

    def forward_meta(wanted, args, kwargs):
        return symbol.meta(*args, **kwargs) if symbol.meta else _detached_meta(symbol, args, kwargs), AnyProxy("")

    name = symbol.name
    random = tuple(symbol.tags & {OpTags.RANDOM_OP})
    forward = Symbol(
        f"{name}_with_graph", forward_meta, id=("with_graph", symbol.id), is_prim=True, tags=random, fn=run_forward
    )
    forward.once_differentiable = once = (
        f"PyTorch's derivative of {name} saves its graph, which is run once: what draws random numbers cannot be run "
        "again"
    )

    def rule(*args, **kwargs):
        flat, wanted = _wanted(args, kwargs)
        wanted = _reached(symbol, wanted, args, kwargs)
        if not wanted:
            yield symbol(*args, **kwargs)
            return ()
        out, graph = forward(wanted, args, kwargs)
        g = yield out
        cotangents = _of_tensors(out, g)
        sources = [flat[i] for i in wanted]
        backward = Symbol(
            f"{name}_backward",
            lambda graph, cotangents: tuple(like(s) for s in sources),
            id=("backward_of", symbol.id),
            is_prim=True,
            fn=run_backward,
        )
        backward.once_differentiable, backward.accepts_missing_cotangents = once, True
        return _as_structure(wanted, backward(graph, cotangents), args, kwargs)

    return rule


def vjp_of(symbol: Symbol) -> Symbol:
    """`vjp_of_X(wanted, args, kwargs, cotangents)`: the gradients of the tensors in the wanted positions of X's
    arguments. cotangents: one, or None, for each tensor."""
    made = _VJPS.get(symbol)
    if made is None:
        made = _VJPS[symbol] = _vjp_of(symbol)
    return made


_VJPS: dict[Symbol, Symbol] = {}


def _vjp_of(symbol: Symbol) -> Symbol:
    def run(wanted: tuple, args: tuple, kwargs: dict, cotangents: tuple):
        inputs: list[torch.Tensor] = []
        _with_inputs(wanted, args, kwargs, lambda x: inputs.append(x))

        def function(*inputs):
            given = iter(inputs)
            args_, kwargs_ = _with_inputs(wanted, args, kwargs, lambda x: next(given))
            found = _tensors_in(symbol.fn(*args_, **kwargs_), [])  # type: ignore[misc]
            return tuple(o for o, g in zip(found, cotangents, strict=True) if g is not None)

        before = _generators(inputs)
        again = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors_in((args, kwargs, cotangents), []))
        gradients = _pulled_back(function, inputs, [g for g in cotangents if g is not None], again)
        if any(not torch.equal(a, b) for a, b in zip(before, _generators(inputs), strict=True)):
            raise RuntimeError(
                f"{symbol.name} draws random numbers: it has no derivative as a function. Draw them outside of the "
                "function that is differentiated"
            )
        return gradients

    def meta(wanted, args, kwargs, cotangents):
        flat, _ = _wanted(args, kwargs)
        return tuple(like(flat[i]) for i in wanted)

    return Symbol(f"vjp_of_{symbol.name}", meta, id=("vjp_of", symbol.id), is_prim=True, fn=run)


def _functional_derivative(symbol: Symbol):
    backward = vjp_of(symbol)

    def rule(*args, **kwargs):
        wanted = _reached(symbol, _wanted(args, kwargs)[1], args, kwargs)
        out = symbol(*args, **kwargs)
        g = yield out
        if not wanted:
            return ()
        return _as_structure(wanted, backward(wanted, args, kwargs, _of_tensors(out, g)), args, kwargs)

    return rule


def _of_tensors(outputs, cotangents) -> tuple:
    """The cotangents of the tensors among outputs, None for those without."""
    return tuple(
        g for o, g in zip(leaves(outputs), leaves(cotangents), strict=True) if isinstance(o, Proxy) and is_tensor(o)
    )


def _generators(inputs: list) -> list[torch.Tensor]:
    """The states of the default generators that an operation on these inputs draws from."""
    devices = {x.device for x in inputs if x.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]


def _pulled_back(function, inputs: list[torch.Tensor], cotangents: list[torch.Tensor], again: bool) -> tuple:
    """The gradients of `function` at its inputs; `again`, and under torch.func's transforms, they can be differentiated
    themselves."""
    if compat.in_functorch():
        return torch.func.vjp(function, *inputs)[1](tuple(cotangents))
    with torch.enable_grad():
        inputs = [x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        outputs = function(*inputs)
    pairs = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in inputs)
    return _gradients(pairs, inputs, create_graph=again)


def _gradients(pairs: list[tuple], inputs: list[torch.Tensor], **options) -> tuple:
    """The gradients for pairs of an output and its cotangent; zeros where none of them depends on an input, which
    require no grad as those of materialize_grads=True do in torch 2.9."""
    outputs, cotangents = zip(*pairs)
    found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))


def _detached_meta(symbol: Symbol, args, kwargs):
    with detached():
        return map_structure(
            lambda x: like(x) if isinstance(x, TensorProxy) else x, symbol.decomposition(*args, **kwargs)
        )  # type: ignore[misc]
