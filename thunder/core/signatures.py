"""Parameters of operations by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, KeysView
from typing import Any


def spelled(keyword: str, parameters: Collection[str], defaults: Collection[str], places: Callable[[], dict]) -> str:
    """The name of a parameter for a keyword: operands are found by their places in PyTorch's functions, `axis` is
    dim."""
    # an opaque operation is called as the user calls it
    if keyword in parameters or keyword in defaults or not parameters:
        return keyword
    position = places().get(keyword)
    if position is not None and position < len(parameters):
        return list(parameters)[position]
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
