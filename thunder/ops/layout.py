"""How tensors lie in memory, and how PyTorch's functions lay out their results: operations that run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import NumberProxy, Proxy, map_structure
from thunder.core.symbol import BoundSymbol
from thunder.ops.infer import as_torch

__all__ = ["assign", "is_dense", "run_line"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in any order of dimensions: they neither overlap nor have gaps."""
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def run_line(
    operation: BoundSymbol, values: dict[Proxy, object], number: Callable[[Any], Any] = NumberProxy.concrete
) -> None:
    """Calls the PyTorch functions of an operation, or of its decomposition, with the values known so far, and adds its
    results to them. number: the value of one that stays symbolic."""
    if operation.sym.fn is None:
        for sub in operation.subsymbols:
            run_line(sub, values, number)
        values.update({old: values.get(new, new) for old, new in operation.aliases.items()})
        return

    def real(x):
        return values[x] if isinstance(x, Proxy) else number(x) if isinstance(x, NumberProxy) else as_torch(x)

    try:
        result = operation.sym.fn(*map_structure(real, operation.args), **map_structure(real, operation.kwargs))
    except (
        ValueError
    ) as error:  # of a view of fake tensors that strides do not allow, where PyTorch's functions raise RuntimeError
        raise RuntimeError(str(error)) from error
    assign(operation.output, result, values)


def assign(said, result, values: dict[Proxy, Any]) -> None:
    """Notes the results of an operation under its proxies."""
    if isinstance(said, Proxy):
        values[said] = result
    elif isinstance(said, (tuple, list)):
        for s, r in zip(said, result, strict=True):
            assign(s, r, values)
    elif isinstance(said, dict):
        for k, s in said.items():
            assign(s, result[k], values)
