"""`thunder.opaque`: a Python function that thunder calls as it is, with real tensors, and never looks into."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy, like, map_structure, proxies_in
from thunder.core.symbol import Names, OpTags, Symbol, current_recorder, detached
from thunder.errors import DerivativeError, MissingImplementationError, OptionError, noted
from thunder.ops.gradients import (
    check_count,
    check_device,
    check_kind,
    check_real,
    is_wanted,
    may_be_summed_to,
    wrong_shape,
)
from thunder.ops.methods import call_torch


def opaque(
    fn: Callable | None = None,
    *,
    meta: Callable | None = None,
    backward: Callable | None = None,
    name: str | None = None,
):
    """Turns a Python function into an opaque operation: compiled programs call it with real tensors and numbers.

    Can be used as a decorator:

        @thunder.opaque(meta=lambda x: torch.empty_like(x))
        def through_numpy(x):
            return torch.from_numpy(numpy.sort(x.numpy()))

    Outside of a compiled program, the operation is the function itself.

    Args:
        fn: The function.
        meta: A function with the parameters of `fn`. It receives proxies in place of tensors, and returns a proxy for
            each result, or a value computed from proxies with torch functions. Only the shapes, dtypes and devices of
            what it returns are used.
        backward: `backward(args, result, cotangent)` returns a gradient, or None, for each positional argument. Without
            it, differentiating a call raises an error.
        name: The name of the operation in traces. By default the name of `fn`.

    Raises:
        OptionError: If `meta` is missing or is not a function.
    """
    if fn is None:
        return functools.partial(opaque, meta=meta, backward=backward, name=name)
    for what, function in (("fn", fn), ("meta", meta), ("backward", backward)):
        if not callable(function) and not (function is None and what == "backward"):
            raise OptionError(
                f"thunder.opaque: {what}= is a function, not {function!r}: thunder does not look into {_name(fn)}, so "
                "that meta= has to say what it returns"
            )
    assert meta is not None, "it is callable"
    name = name or _name(fn)
    symbol = Symbol(
        name,
        _typed(meta, name),
        id=("opaque function", name, id(fn), id(meta), id(backward)),
        is_prim=True,
        tags=(OpTags.DONT_DCE, OpTags.OPAQUE),
        fn=_detaching(fn),
    )
    symbol.declared_outside = True
    symbol.canonicalize = functools.partial(_by_position, fn)
    symbol.grad_rule = _rule(symbol, backward) if backward is not None else _missing(symbol)
    return symbol


def _by_position(fn: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments that are given by name, in the places of their parameters: a backward gives gradients by position."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # native code has none, and fn raises the error itself
        return args, kwargs
    return bound.args, bound.kwargs


def _name(fn) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if name.isidentifier() else "opaque_function"


def _detaching(fn: Callable) -> Callable:
    """fn, for which derivatives are somebody else's matter where grad mode is off: its `.numpy()` of a parameter is no
    error there."""

    def detached(x):
        return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x

    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            args, kwargs = map_structure(detached, args), map_structure(detached, kwargs)
        return fn(*args, **kwargs)

    return functools.wraps(fn)(run) if hasattr(fn, "__name__") else run


class _Recording(torch.overrides.TorchFunctionMode):
    """Records the calls of PyTorch's functions that a meta rule makes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return call_torch(func, args, kwargs or {})


def _typed(meta: Callable, name: str) -> Callable:
    """The meta rule of an opaque operation: `meta` under a recorder of its own, with its errors named."""

    def rule(*args, **kwargs):
        recorder = current_recorder()
        # names of what is not computed are not taken
        context = recorder.context.replace(names=Names()) if recorder is not None else None
        # behind the capture, as where a trace is checked, nothing else records the torch functions that meta calls
        alone = recorder is not None and not compat.function_modes()
        with detached(context), _Recording() if alone else contextlib.nullcontext():
            with noted(f"the meta of {name}"):
                result = meta(*args, **kwargs)
        return map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, result)

    return rule


def _missing(symbol: Symbol) -> Callable:
    def rule(*args, **kwargs):
        raise MissingImplementationError(
            f"{symbol.name} has no derivative: give thunder.opaque a backward=, call it under torch.no_grad(), or "
            "detach what it gets"
        )

    return rule


def _rule(symbol: Symbol, backward: Callable) -> Callable:
    """The derivative rule of an opaque operation, from the backward that the user has written."""

    def run(args, result, cotangent, wanted):
        with noted(f"the backward of {symbol.name}"):
            gradients = backward(args, result, cotangent)
        gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)
        who = f"the backward of {symbol.name}"
        check_count(who, len(args), gradients)
        return tuple(_fitting(who, i, args[i], gradients[i]) for i in wanted)

    def rule(*args, **kwargs):
        if is_wanted(kwargs):
            raise DerivativeError(
                f"{symbol.name} is given a tensor that requires grad by keyword alone, for which its backward gives no "
                "gradient: let it take the tensor by position"
            )
        result = symbol(*args, **kwargs)
        if not proxies_in(result, []):
            raise DerivativeError(f"the meta of {symbol.name} returns no tensor, so that its backward has no cotangent")
        cotangent = yield result
        wanted = tuple(i for i, a in enumerate(args) if isinstance(a, TensorProxy) and a.requires_grad)
        gradients = backward_symbol(args, result, cotangent, wanted)
        table = dict(zip(wanted, gradients, strict=True))
        return tuple(table.get(i) for i in range(len(args)))

    def meta(args, result, cotangent, wanted):
        return tuple(like(args[i]) for i in wanted)

    backward_symbol = Symbol(f"{symbol.name}_backward", meta, id=("opaque backward", symbol.id), is_prim=True, fn=run)
    return rule


def _fitting(who: str, i: int, argument: torch.Tensor, gradient) -> torch.Tensor:
    """`ops.gradients.fitted` for a gradient that a backward gives when it runs."""
    if gradient is None:
        return torch.zeros_like(argument)
    check_kind(who, i, gradient, torch.Tensor)
    check_device(who, i, argument, gradient)
    check_real(who, i, not argument.is_complex(), not gradient.is_complex())
    if gradient.shape != argument.shape:
        if not may_be_summed_to(tuple(gradient.shape), tuple(argument.shape)):
            raise DerivativeError(wrong_shape(who, i, gradient.shape, argument.shape))
        gradient = gradient.sum_to_size(argument.shape)
    return gradient.to(argument.device, argument.dtype)
