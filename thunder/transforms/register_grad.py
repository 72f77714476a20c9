"""Derivatives that users register for operations, in the two spellings that Lightning Thunder's users know. Both become
the operation's own rule (`autodiff.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.core.rule_table import RuleTable
from thunder.core.symbol import Symbol
from thunder.errors import MissingImplementationError
from thunder.extend import get_all_executors, operation_id
from thunder.ops import LTORCH, PRIMS
from thunder.ops.gradients import check_count
from thunder.ops.registry import operation_of

# the augmented forward and the backward that a user registered
_HALVES: RuleTable[list[Callable | None] | None] = RuleTable(None)


class VJPDual(NamedTuple):
    """The return value of an augmented forward: the result of the operation, and the residuals for its backward."""

    primal: Any
    residuals: Any


def _operation(function_or_id: Any) -> Symbol:
    """An operation given as itself, as its id (`ltorch.sin`, `prims.sin`) or as a torch function that stands for it."""
    if isinstance(function_or_id, Symbol):
        return function_or_id
    if isinstance(function_or_id, str):
        operation_id(function_or_id)  # raises where there is none
    symbol = (
        _by_id().get(function_or_id)
        if isinstance(function_or_id, str)
        else operation_of(function_or_id)
        if callable(function_or_id)
        else None
    )
    if symbol is None:
        raise TypeError(
            f"{getattr(function_or_id, '__name__', repr(function_or_id))} is no operation of thunder's: give an "
            "operation (thunder.torch.sin), its id ('ltorch.sin') or a torch function"
        )
    return symbol


REGISTERED: dict[str, Symbol] = {}  # id -> operation whose derivative is not the one that it came with


def _by_id() -> dict[str, Symbol]:
    of_executors = [executor.opmap for executor in get_all_executors()]
    symbols = (s for table in (PRIMS, LTORCH, *of_executors) for s in table.values() if isinstance(s, Symbol))
    return {symbol.id: symbol for symbol in symbols}


def _give(operation: Symbol, rule: Callable) -> None:
    """The operation has this rule from now on. Programs that are compiled already are compiled again."""
    REGISTERED[operation.id] = operation
    operation.grad_rule = rule
    compat.note_registration()


def register_grad(sym_or_id: Symbol | str | Callable, gradfn: Callable | None = None):
    """Gives an operation its derivative, in the place of the one it had. Usable as a decorator.

    gradfn takes the operation's arguments, computes and returns its result, asks for its cotangent with get_grad, and
    gives the arguments theirs with put_grads. An executor's grad_transform comes before it. The derivative of a
    primitive is that of the operation which is nothing else. Functions that are compiled already compile again.

    Raises TypeError for what is no operation or no function, OptionError for an id that no operation has.
    """
    operation = _operation(sym_or_id)
    if gradfn is None:
        return lambda function: register_grad(operation, function)
    if not callable(gradfn):
        raise TypeError(
            f"register_grad({operation.qualified_name}): the derivative is a function, not a {type(gradfn).__name__}"
        )

    @functools.wraps(gradfn)
    def rule(*args, **kwargs):
        yield gradfn(*args, **kwargs)
        return ()  # the gradients are put already

    _give(operation, rule)
    return gradfn


def register_augmented_forward(sym_or_id: Symbol | str | Callable):
    """Decorator: `forward(*args, **kwargs)` returns VJPDual(result, residuals), or the pair as a tuple.
    `register_backward` gives the other half."""
    return lambda function: _register(_operation(sym_or_id), 0, function)


def register_backward(sym_or_id: Symbol | str | Callable):
    """Decorator: `backward(*residuals, *cotangents)` returns a gradient, or None, for each argument: one value where
    there is one argument.

    The cotangents are those of the result's tensors, in order.
    """
    return lambda function: _register(_operation(sym_or_id), 1, function)


def _register(operation: Symbol, half: int, function: Callable) -> Callable:
    halves = _HALVES.of(operation) or [None, None]
    _HALVES.set(halves, operation)
    halves[half] = function
    _give(operation, _joined(operation, halves))
    return function


def _joined(operation: Symbol, halves: list) -> Callable:
    """The derivative rule of a forward and a backward that were registered one by one."""

    @functools.wraps(halves[0] or halves[1])
    def rule(*args, **kwargs):
        forward, backward = halves
        if forward is None or backward is None:
            missing = "register_augmented_forward" if forward is None else "register_backward"
            raise MissingImplementationError(
                f"{operation.qualified_name} was given one half of a derivative: {missing} gives the other"
            )
        pair = forward(*args, **kwargs)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise MissingImplementationError(
                f"the augmented forward of {operation.qualified_name} returned {type(pair).__name__}: return "
                "VJPDual(result, residuals)"
            )
        result, residuals = pair
        cotangents = yield result
        cotangent_list = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents,)
        residual_list = residuals if isinstance(residuals, (tuple, list)) else (residuals,)
        gradients = backward(*residual_list, *cotangent_list)
        gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)
        tensors = sum(isinstance(a, TensorProxy) for a in args)
        if len(gradients) != tensors or len(gradients) == len(args):
            check_count(f"the backward of {operation.qualified_name}", len(args), gradients)
            return gradients
        remaining = iter(gradients)  # one for each tensor
        return tuple(next(remaining) if isinstance(a, TensorProxy) else None for a in args)

    return rule
