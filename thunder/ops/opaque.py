"""Any torch function without a definition here: typed by running it on fake tensors, executed by calling it.

Operators registered with torch.library come the same way; their author gave them a rule for fake tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.core.symbol import OpTags, Symbol, current_recorder, user_location
from thunder.errors import CaptureError, noting
from thunder.ops.infer import typed_by_running
from thunder.ops.registry import alias, lookup, torch_path

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
    """The operation for a PyTorch function under autocast: it runs, and is typed, with autocast to these types on."""
    plain, typed = _make(function), _TYPED_UNDER_AUTOCAST.get(function)
    name = f"autocast_{plain.name}"

    def run(*args, **kwargs):
        with compat.autocast_on(kinds):
            return function(*args, **kwargs)

    def typed_under(*args, **kwargs):
        return typed(dict(kinds), *args, **kwargs)

    meta = typed_by_running(run, plain.name) if typed is None else typed_under
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
    """The operation for a PyTorch function that thunder has no definition of: it runs the function, and is typed by
    running it."""
    path = torch_path(function)
    name = path[1] if path else _identifier(function)

    meta = typed_by_running(function, name)
    custom = _custom_path(function)
    if custom is not None:
        module, name = custom
        overload = getattr(function, "_overloadname", "default")
        identity = f"{module}.{name}" if overload == "default" else f"{module}.{name}.{overload}"
        typed = noting(f"the fake implementation of {identity}", meta)
        symbol = Symbol(name, typed, module=module, id=identity, is_prim=True, tags=(OpTags.DONT_DCE,), fn=function)
        symbol.declared_outside = True
        return symbol
    symbol = Symbol(
        name,
        meta,
        module=path[0] if path else None,
        id=("opaque", name, id(function)),
        is_prim=True,
        tags=(OpTags.OPAQUE,) if _is_pure(function) else (OpTags.OPAQUE, OpTags.DONT_DCE),
        fn=function,
    )
    symbol.typed_by_running = True  # which results require grad is known as well
    return symbol


def _is_pure(function) -> bool:
    """Whether the schemas of an operator, or of a function of PyTorch's own, say that it gives tensors and does nothing
    else. What an in-place function does to a copy of its first argument is pure where it writes to nothing else."""
    in_place = getattr(function, "in_place", None)
    function, first = (function, 0) if in_place is None else (in_place, 1)
    if isinstance(function, compat.OpOverload):
        overloads = [function]
    else:
        is_own = isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType))
        packet = getattr(torch.ops.aten, function.__name__, None) if is_own else function
        if not isinstance(packet, compat.OpOverloadPacket):
            return False
        overloads = [getattr(packet, name) for name in packet.overloads()]
    if overloads[0].namespace in _COLLECTIVES:
        return False
    return all(
        o._schema.returns
        and torch.Tag.nondeterministic_seeded not in o.tags
        and not any(map(_is_written, o._schema.arguments[first:]))
        for o in overloads
        if not any(a.is_out for a in o._schema.arguments)
    )


_COLLECTIVES = ("c10d", "_c10d_functional")  # whose schemas do not say that ranks wait for each other


def _custom_path(function) -> tuple[str, str] | None:
    """("torch.ops.<namespace>", name) of an operator that somebody registered with torch.library: its author's fake
    rule types it, so it is not opaque."""
    if not isinstance(function, (compat.OpOverload, compat.OpOverloadPacket)):
        return None
    packet = function if isinstance(function, compat.OpOverloadPacket) else function.overloadpacket
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace in ("aten", "prims", "prim", "torchvision", "quantized", *_COLLECTIVES):
        return None
    return (
        (f"torch.ops.{namespace}", name)
        if packet is function
        else (f"torch.ops.{namespace}.{name}", function._overloadname)
    )


def written_by(function, args: tuple, kwargs: dict) -> list[TensorProxy]:
    """The tensors among the arguments that an operator writes to, as its schema says."""
    operator = custom_operator(function)
    return [] if operator is None else _written(operator, args, kwargs)


def custom_operator(function):
    """The overload that a function is, where somebody registered it with torch.library; otherwise None."""
    if isinstance(function, compat.OpOverloadPacket):
        if _custom_path(function) is None or function.overloads() != ["default"]:
            return None
        function = function.default
    return function if isinstance(function, compat.OpOverload) and _custom_path(function) is not None else None


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
    written: list = []
    for i, argument in enumerate(function._schema.arguments):
        if _is_written(argument):
            proxies_in(args[i] if i < len(args) else kwargs.get(argument.name), written)
    return written


def _is_written(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _identifier(function) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        name = f"{name.strip('_')}_{getattr(function.__self__, '__name__', 'attribute')}"
    name = name.partition(".")[0]  # of `name.overload`
    return name if name.isidentifier() else "torch_function"
