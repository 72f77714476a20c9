"""Kept Numbers: Python numbers that a kernel on the CPU takes as an operand are tensors of its type, made once.

Before: `t2 = torch.mul(t1, 0.1)`. After: `t2 = torch.mul(t1, float32_0_1)`, a tensor without dimensions.

PyTorch makes a tensor of such a number in each call, of float64 or int64, and another one of the type that it computes
in, which takes as long as a small kernel. The values are those that it would make. Below float32 kernels read the
number itself.
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
from thunder.ops.torch_types import to_torch_dtype

__all__ = ["has_numbers_to_keep", "keep_numbers"]

# the types that numbers are converted to, with the largest numbers of theirs
_KINDS = {float32: torch.finfo(torch.float32).max, float64: torch.finfo(torch.float64).max}


def has_numbers_to_keep(trace: Trace) -> bool:
    """Whether a kernel would make a tensor of a number in each call."""
    return any(map(_takes_number, trace.bound_symbols))


def keep_numbers(trace: Trace) -> Trace:
    """The trace with tensors in the place of such numbers."""
    made: dict[tuple, torch.Tensor] = {}  # 0.0 and -0.0 are equal, and apart
    return trace.replace(bound_symbols=[_kept(b, made) if _takes_number(b) else b for b in trace.bound_symbols])


def _takes_number(operation: BoundSymbol) -> bool:
    """Whether an operation, in place or not, is PyTorch's of tensors on the CPU and a number, in the tensors' type."""
    if operation.sym.is_fusion or operation.kwargs:
        return False
    places = original_of(operation).sym.converts_numbers
    numbers = [x for i, x in enumerate(operation.args) if i in places and type(x) in (int, float)]
    kind = _kind(operation) if numbers else None
    # what overflows is refused by some kernels
    return kind is not None and all(abs(x) <= _KINDS[kind] or not math.isfinite(x) for x in numbers)


def _kind(operation: BoundSymbol) -> dtype | None:
    """The type that an operation computes in, where that is one of its tensors', and of those that are converted."""
    tensors = [p for p in operation.inputs if type(p) is TensorProxy]
    kinds = {p.dtype for p in tensors if p.dtype is not bool8}
    on_cpu = len(tensors) == len(operation.inputs) and all(p.device.type == "cpu" for p in tensors)
    return kinds.pop() if on_cpu and len(kinds) == 1 and kinds <= _KINDS.keys() else None


def _kept(operation: BoundSymbol, made: dict[tuple, torch.Tensor]) -> BoundSymbol:
    args, kind = list(operation.args), _kind(operation)
    assert kind is not None, "it takes a number"
    for i in original_of(operation).sym.converts_numbers:
        if type(number := args[i]) in (int, float):
            key = repr(number), kind
            if key not in made:
                made[key] = _tensor(number, kind)
            args[i] = made[key]
    return operation.replace(args=tuple(args), subsymbols=operation.subsymbols)


def _tensor(number: int | float, kind: dtype) -> torch.Tensor:
    """A tensor of no dimensions, converted as kernels convert numbers."""
    with compat.without_function_modes(), torch.inference_mode(False):
        made = torch.tensor(number, dtype=torch.int64 if type(number) is int else torch.float64, device="cpu")
        return made.to(to_torch_dtype(kind))


def _name(x: torch.Tensor) -> str:
    """`float32_0_1` for 0.1."""
    with compat.without_function_modes():
        return (
            re.sub(r"\W", "_", f"{x.dtype}_{x.item():g}".removeprefix("torch.")) if not x.dim() else "_torch_Tensor_0"
        )


OBJECT_NAMES[torch.Tensor] = _name
