"""Numbers as constants: convert those that are operands of kernels on the CPU to tensors once, at compile time.
The pass Constants does it.

Before: `t2 = torch.mul(t1, 0.1)`. After: `t2 = torch.mul(t1, float32_0_1)`, a tensor without dimensions.

In each call PyTorch converts such a number to a tensor of float64 or int64, and that to one of the type of the kernel,
which takes as long as a small kernel. The values are the same. Kernels of types below float32 read the number itself.
"""

from __future__ import annotations

import math
import re

import torch

from thunder import compat
from thunder.analysis.cost import original_of
from thunder.core.codegen import OBJECT_NAMES
from thunder.core.dtypes import bool8, dtype, float32, float64
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops.rules import kernels
from thunder.ops.torch_types import to_torch_dtype

# the types that numbers are converted to, with their largest values
_KINDS = {float32: torch.finfo(torch.float32).max, float64: torch.finfo(torch.float64).max}

_NUMBERS = {int, float}


def keep_numbers(trace: Trace) -> Trace:
    """The trace with a tensor in the place of each number that a kernel would convert in each call."""
    tensors: dict[tuple, torch.Tensor] = {}  # by the text of a number: 0.0 and -0.0 are equal
    operations = [_with_tensors(b, tensors) if _takes_number(b) else b for b in trace.bound_symbols]
    return trace.replace(bound_symbols=operations) if tensors else trace


def _takes_number(operation: BoundSymbol) -> bool:
    """Whether PyTorch runs an operation, in place or not, on tensors on the CPU and a number of their type."""
    if operation.sym.is_fusion or operation.kwargs or _NUMBERS.isdisjoint(map(type, operation.args)):
        return False
    places = kernels.converts_numbers.of(original_of(operation).sym)
    numbers = [x for i, x in enumerate(operation.args) if i in places and type(x) in _NUMBERS]
    kind = _kind(operation) if numbers else None
    # some kernels refuse a number that overflows
    return kind is not None and all(abs(x) <= _KINDS[kind] or not math.isfinite(x) for x in numbers)


def _kind(operation: BoundSymbol) -> dtype | None:
    """The type that an operation computes in, where all its tensors have it and numbers are converted to it."""
    tensors = [p for p in operation.inputs if type(p) is TensorProxy]
    kinds = {p.dtype for p in tensors if p.dtype is not bool8}
    on_cpu = len(tensors) == len(operation.inputs) and all(p.device.type == "cpu" for p in tensors)
    return kinds.pop() if on_cpu and len(kinds) == 1 and kinds <= _KINDS.keys() else None


def _with_tensors(operation: BoundSymbol, tensors: dict[tuple, torch.Tensor]) -> BoundSymbol:
    args, kind = list(operation.args), _kind(operation)
    assert kind is not None, "it takes a number"
    for i in kernels.converts_numbers.of(original_of(operation).sym):
        if type(number := args[i]) in _NUMBERS:
            key = repr(number), kind
            if key not in tensors:
                tensors[key] = _tensor(number, kind)
            args[i] = tensors[key]
    return operation.replace(args=tuple(args), subsymbols=operation.subsymbols)


def _tensor(number: int | float, kind: dtype) -> torch.Tensor:
    """A tensor of no dimensions, converted as kernels convert numbers."""
    with compat.without_function_modes(), torch.inference_mode(False):
        tensor = torch.tensor(number, dtype=torch.int64 if type(number) is int else torch.float64, device="cpu")
        return tensor.to(to_torch_dtype(kind))


def _name(x: torch.Tensor) -> str:
    """`float32_0_1` for 0.1."""
    with compat.without_function_modes():
        return (
            re.sub(r"\W", "_", f"{x.dtype}_{x.item():g}".removeprefix("torch.")) if not x.dim() else "_torch_Tensor_0"
        )


OBJECT_NAMES[torch.Tensor] = _name
