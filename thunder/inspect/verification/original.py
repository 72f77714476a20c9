"""The original function beside the captured program: where the two part, operation by operation.

What capture believes (a declaration, a value that it took for a constant, an order of calls) is in every trace, so that
traces agree with each other. So the original runs once, on copies of the tensors, and each call of PyTorch's that it
makes is compared with the bound symbol of the same operation at the same line.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from thunder import compat
from thunder.core.proxies import TensorProxy, leaves, map_structure
from thunder.core.symbol import BoundSymbol
from thunder.errors import calling_line
from thunder.inspect.verification.programs import generators_restored
from thunder.ops.registry import inplace_of, lookup

Key = tuple[str, int, Any, int]  # file, line, operation, how many of it the line has had before


class _Calls(TorchFunctionMode):
    """Notes the results of the calls of torch functions that are operations of thunder's, by line."""

    def __init__(self):
        super().__init__()
        self.results: dict[Key, Any] = {}
        self.counts: Counter = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = lookup(func) or inplace_of(func)
        line = calling_line() if operation is not None else None
        if line is not None:
            key = (line[0], line[1], getattr(operation, "id", operation))
            self.results[(*key, self.counts[key])] = map_structure(_noted, result)
            self.counts[key] += 1
        return result


def _noted(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and not compat.is_batch(x) else x


def run_original(fn: Callable, args: tuple, kwargs: dict, tensors: list, has_effects: bool) -> tuple[Any, dict] | None:
    """The result of the original, and the results of its calls by `Key`. Tensors are what they were afterwards. None
    where it has effects on Python objects that cannot be copied: it would have them twice."""
    if has_effects:
        try:
            fn, args, kwargs = copy.deepcopy((fn, args, kwargs))
        except Exception:  # noqa: BLE001  whatever an object there raises
            return None
        if not isinstance(fn, torch.nn.Module):
            return None  # what a function writes to is not in it
    every = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    every += [x for x in tensors if isinstance(x, torch.Tensor)]
    plain = [x for x in {id(x): x for x in every}.values() if x.layout is torch.strided]
    before = [(x, x.detach().clone(), x.grad if x.is_leaf else None) for x in plain if not x.is_inference()]
    with generators_restored(), _Calls() as calls:
        result = fn(*args, **kwargs)
    with torch.no_grad():
        for x, content, grad in before:
            if not torch.equal(x, content):  # kernels of norms write statistics without a new version
                x.copy_(content)
            if x.is_leaf and x.grad is not grad:
                x.grad = grad
    return map_structure(_noted, result), calls.results


def matched(
    operations: tuple[BoundSymbol, ...], where: Callable, results: dict[Key, Any]
) -> list[tuple[BoundSymbol, Any]]:
    """The operations of a captured program with the results of the original's calls that they stand for, in order."""
    counts: Counter = Counter()
    pairs = []
    for b in operations:
        if not b.location:
            continue
        line_and_operation = (*where(b.location)[:2], b.sym.id)
        key = (*line_and_operation, counts[line_and_operation])
        counts[line_and_operation] += 1
        if key in results and isinstance(b.output, TensorProxy) and isinstance(results[key], torch.Tensor):
            pairs.append((b, results[key]))
    return pairs
