"""PyTorch's own derivative, for operations without a rule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, leaves, like, map_structure, number_value, proxies_in
from thunder.core.symbol import OpTags, Symbol, carries_out, detached, hashable
from thunder.errors import CaptureError
from thunder.ops.infer import as_torch, differentiates_fakes, example, fake, without_memory
from thunder.ops.opaque_values import is_tensor
from thunder.ops.rules import derivatives


class Graph:
    """The piece of PyTorch's autograd graph that one operation left: what its derivative saves. found: where a backward
    of the whole graph leaves the gradients of the inputs."""

    __slots__ = ("inputs", "outputs", "gradients")

    def __init__(self, inputs: list, outputs: list[torch.Tensor], gradients: list | None = None):
        self.inputs, self.outputs, self.gradients = inputs, outputs, gradients


def _tensors_in(value, tensors: list) -> list:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for x in value:
            _tensors_in(x, tensors)
    elif isinstance(value, dict):
        for x in value.values():
            _tensors_in(x, tensors)
    return tensors


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
    """Those of the wanted positions that PyTorch has a gradient for and not None. It differentiates examples, once for
    arguments of one kind."""
    # or a library's, whose backward is anybody's Python
    if derivatives.reaches_all.of(symbol) or symbol.module is not None and symbol.module.startswith("torch.ops"):
        return wanted

    def described(x):
        shape = tuple(map(number_value, x.shape)) if isinstance(x, TensorProxy) else ()
        return (shape, x.dtype.name, str(x.device)) if isinstance(x, TensorProxy) else number_value(x)

    key = (symbol.id, wanted, hashable(map_structure(described, args)), hashable(map_structure(described, kwargs)))
    reached = _REACHED.get(key)
    if reached is None:
        reached = _REACHED[key] = _differentiated_on_examples(symbol, wanted, args, kwargs)
        if len(_REACHED) > 1024:
            _REACHED.pop(next(iter(_REACHED)))
    return reached


def _differentiated_on_examples(symbol: Symbol, wanted: tuple, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """Which of the wanted positions get a gradient, by PyTorch's engine on fake or small real tensors."""
    # which arguments are reached does not depend on sizes: nothing is decided by symbolic ones
    without = functools.partial(without_memory, value=number_value)

    def real(x):
        return example(x) if isinstance(x, AnyProxy) else fake(x)

    ways: list[tuple] = []
    if OpTags.OPAQUE not in symbol.tags:  # fake tensors take seconds to import, and a millisecond an operation
        ways.append((contextlib.nullcontext, without))
    if differentiates_fakes((args, kwargs)):
        fakes = functools.partial(example, value=number_value)
        ways.append((lambda: compat.FakeTensorMode(allow_non_fake_inputs=True), fakes))
        ways.append((contextlib.nullcontext, real))
    for mode, convert in ways:
        inputs: list[torch.Tensor] = []
        try:
            probing = compat.probing(grad=True, draws=convert is real)
            with probing, mode(), compat.quiet():
                operands = _with_inputs(
                    wanted,
                    map_structure(convert, args),
                    map_structure(convert, kwargs),
                    lambda x, inputs=inputs: inputs.append(x.requires_grad_()) or x,
                )
                results = symbol.fn(*operands[0], **operands[1])  # type: ignore[misc]
                outputs = [o for o in _tensors_in(results, []) if o.requires_grad]
                gradients = torch.autograd.grad(
                    outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True
                )
            return tuple(i for i, g in zip(wanted, gradients, strict=True) if g is not None)
        except compat.DataDependentOutput:  # it looks at values: zeros have some
            continue
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
            # PyTorch's decompositions, which fake tensors run, refuse or divide by 0 where kernels do not
            if convert is not without:
                break
    return wanted


def _with_inputs(wanted: tuple, args: tuple, kwargs: dict, replaced) -> tuple[tuple, dict]:
    """Arguments for PyTorch, with `replaced(tensor)` in the wanted positions."""
    position = iter(range(1 << 30))

    def convert(x):
        if not isinstance(x, torch.Tensor):
            return as_torch(x)
        return replaced(x) if next(position) in wanted else x

    replaced_args = tuple(x if type(x) in _AS_THEY_ARE else map_structure(convert, x) for x in args)
    return replaced_args, map_structure(convert, kwargs)


_AS_THEY_ARE = {int, float, bool, str, type(None)}  # most arguments, in each call


@carries_out
def run_with_graph(function: Callable, wanted: tuple, args: tuple, kwargs: dict):
    """What an operation's function returns, detached, and its graph."""
    inputs: list[torch.Tensor] = []

    def detached(x):
        inputs.append(x.detach().requires_grad_())
        return inputs[-1]

    args, kwargs = _with_inputs(wanted, args, kwargs, detached)
    with torch.enable_grad():
        out = function(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out.detach(), Graph(inputs, [out])
    return map_structure(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out), Graph(
        inputs, _tensors_in(out, [])
    )


class _Inputs(torch.autograd.Function):
    """Where the graph of an operation begins that leads nowhere else: it keeps the gradients of all inputs. It is given
    them as a list, so that no graph behind them is reached; `leaf` makes it require grad."""

    @staticmethod
    def forward(ctx, leaf, inputs, gradients):
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple([x.detach() for x in inputs])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.gradients[:] = gradients
        return None, None, None


def grafted(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same values as results of a node of autograd behind which there is nothing: they require grad, are no leaves,
    and graphs that are computed from them end there. Asked for their gradients by name, the engine does not run it."""
    return _Ends.apply(tensors[0].detach().requires_grad_(), tensors)


class _Ends(torch.autograd.Function):
    """Where the graph of an eager call begins."""

    @staticmethod
    def forward(ctx, leaf, tensors):
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "a function that a compiled program calls as it is runs a backward through the tensors that it is given, "
            "whose graph is that of the program: run it outside of the compiled function"
        )


@carries_out
def run_with_whole_graph(function: Callable, wanted: tuple, args: tuple, kwargs: dict):
    """`run_with_graph` of an operation whose graph leads to its inputs alone. An engine that is asked for no inputs by
    name does not ask each node, thousands of a recurrent layer, whether one of them needs it."""
    if compat.in_functorch():  # whose transforms take a function of autograd apart
        return run_with_graph(function, wanted, args, kwargs)
    inputs, gradients = list[torch.Tensor](), list[torch.Tensor | None]()
    _with_inputs(wanted, args, kwargs, lambda x: inputs.append(x) or x)
    with torch.enable_grad():
        connected = iter(_Inputs.apply(inputs[0].detach().requires_grad_(), inputs, gradients))
        args, kwargs = _with_inputs(wanted, args, kwargs, lambda x: next(connected))
        out = function(*args, **kwargs)
    graph = Graph(inputs, _tensors_in(out, []), gradients)
    return map_structure(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out), graph


@carries_out
def run_backward(graph: Graph, cotangents: tuple):
    """The gradients of a graph's inputs. cotangents: one, or None, for each of its outputs."""
    pairs = [(o, g) for o, g in zip(graph.outputs, cotangents, strict=True) if g is not None and o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in graph.inputs)
    if graph.gradients is None:
        return _gradients(pairs, graph.inputs, compat.keeps_graph())
    compat.run_backward(*zip(*pairs, strict=True), compat.keeps_graph())
    gradients, graph.gradients[:] = graph.gradients[:] or [None] * len(graph.inputs), ()
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(graph.inputs, gradients, strict=True))


def _make_derivative(symbol: Symbol):
    """The rule by which PyTorch differentiates an operation: a forward that keeps the graph of autograd, and a backward
    that runs it."""

    def forward_meta(wanted, args, kwargs):
        return symbol.meta(*args, **kwargs) if symbol.meta else _detached_meta(symbol, args, kwargs), AnyProxy("")

    name = symbol.name
    random = tuple(symbol.tags & {OpTags.RANDOM_OP})
    run = functools.partial(run_with_whole_graph if derivatives.reaches_all.of(symbol) else run_with_graph, symbol.fn)
    forward = Symbol(
        f"{name}_with_graph", forward_meta, id=("with_graph", symbol.id), is_prim=True, tags=random, fn=run
    )
    once = (
        f"PyTorch's derivative of {name} saves its graph, which is run once: what draws random numbers cannot be run "
        "again"
    )
    derivatives.once_differentiable.set(once, forward)

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
        derivatives.once_differentiable.set(once, backward)
        derivatives.accepts_missing_cotangents.add(backward)
        return _as_structure(wanted, backward(graph, cotangents), args, kwargs)

    return rule


def vjp_of(symbol: Symbol) -> Symbol:
    """`vjp_of_X(wanted, args, kwargs, cotangents)`: the gradients of the tensors in the wanted positions of X's
    arguments. cotangents: one, or None, for each tensor."""
    vjp = _VJPS.get(symbol)
    if vjp is None:
        vjp = _VJPS[symbol] = _vjp_of(symbol)
    return vjp


_VJPS: dict[Symbol, Symbol] = {}


def run_vjp(function: Callable, wanted: tuple, args: tuple, kwargs: dict, cotangents: tuple):
    """The gradients of the arguments of an operation's function in the wanted positions."""
    inputs: list[torch.Tensor] = []
    _with_inputs(wanted, args, kwargs, lambda x: inputs.append(x))

    def of_inputs(*inputs):
        tensors = iter(inputs)
        args_, kwargs_ = _with_inputs(wanted, args, kwargs, lambda x: next(tensors))
        results = _tensors_in(function(*args_, **kwargs_), [])
        return tuple(o for o, g in zip(results, cotangents, strict=True) if g is not None)

    before = _generators(inputs)
    again = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors_in((args, kwargs, cotangents), []))
    gradients = _pulled_back(of_inputs, inputs, [g for g in cotangents if g is not None], again)
    if any(not torch.equal(a, b) for a, b in zip(before, _generators(inputs), strict=True)):
        raise RuntimeError(
            f"{getattr(function, '__name__', function)} draws random numbers: it has no derivative as a function. Draw "
            "them outside of the function that is differentiated"
        )
    return gradients


def _vjp_of(symbol: Symbol) -> Symbol:
    def meta(wanted, args, kwargs, cotangents):
        flat, _ = _wanted(args, kwargs)
        return tuple(like(flat[i]) for i in wanted)

    return Symbol(
        f"vjp_of_{symbol.name}", meta, id=("vjp_of", symbol.id), is_prim=True,
        fn=functools.partial(run_vjp, symbol.fn),
    )  # fmt: skip


def _functional_derivative(symbol: Symbol):
    """The rule by which PyTorch differentiates an operation without a kept graph: the backward runs the operation
    again, and can be differentiated itself."""
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
    return _gradients(pairs, inputs, again, again)


def _gradients(pairs: list[tuple], inputs: list[torch.Tensor], keep: bool, again: bool = False) -> tuple:
    """The gradients for pairs of an output and its cotangent; zeros where none of them depends on an input, which
    require no grad as those of materialize_grads=True do in torch 2.9."""
    outputs, cotangents = zip(*pairs)
    gradients = compat.gradients(outputs, cotangents, inputs, keep, again)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))


def _detached_meta(symbol: Symbol, args, kwargs):
    with detached():
        return map_structure(
            lambda x: like(x) if isinstance(x, TensorProxy) else x, symbol.decomposition(*args, **kwargs)
        )  # type: ignore[misc]
