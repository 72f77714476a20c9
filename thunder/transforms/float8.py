"""Linear layers in float8, on GPUs of compute capability 8.9 and later, and on CPUs.

    thunder.jit(model, transforms=[Float8Transform()])

Before: `t0 = ltorch.linear(x, weight, None)`. After:

    t1 = ltorch.float8_largest(x)
    (t2, t3, t4) = ltorch.float8_quantize(x, t1, dtypes.float8_e4m3fn, True)
    t5 = ltorch.float8_largest(weight)
    (t6, t7, t8) = ltorch.float8_quantize(weight, t5, dtypes.float8_e4m3fn, True)
    t0 = ltorch.float8_linear(x, weight, None, (t2, t3, t4, t3), (t6, t7, t8, t7), dtypes.float8_e5m2)

Scales are found anew in each call, from what is rounded. The backward rounds its cotangents, and reads the transposes
that the forward made. What several layers read is rounded once. Parameters, their gradients and the optimizer keep
their type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.errors import OptionError, warn_user
from thunder.ops import ltorch
from thunder.ops.families.float8 import LARGEST, Quantized, float8_linear, has_products, quantized
from thunder.ops.torch_types import from_tensor_dtype, to_torch_device
from thunder.transforms.base import Transform

_SCALINGS = ("tensorwise", "rowwise")


class Float8Transform(Transform):
    """Computes linear layers by float8 products, forward and backward.

    scaling: "tensorwise", one scale for each matrix; "rowwise", one for each row of each operand, which is nearer and
    slower. gradient_dtype: of the cotangents, torch.float8_e5m2 or torch.float8_e4m3fn; None for the first with
    tensorwise scales and the second with rowwise ones. filter(module, name): which layers, by the module that holds the
    weight and its path; (None, "") where the weight is no parameter of the compiled module. None means all.

    Taken are layers with a weight (n, k) of bfloat16, float16 or float32, n and k divisible by 16, and in training a
    number of rows divisible by 16. Others stay as they are. Weights are rounded in each call, which products of several
    hundred rows and more win back. Raises OptionError for options it does not know.
    """

    executors = ("float8",)

    def __init__(
        self,
        *,
        scaling: str = "tensorwise",
        gradient_dtype: torch.dtype | None = None,
        filter: Callable[[Any, str], bool] | None = None,
    ):
        if scaling not in _SCALINGS:
            raise OptionError(f"Float8Transform(scaling={scaling!r}): valid: {', '.join(map(repr, _SCALINGS))}")
        if gradient_dtype is None:
            gradient_dtype = torch.float8_e5m2 if scaling == "tensorwise" else torch.float8_e4m3fn
        if not isinstance(gradient_dtype, torch.dtype) or from_tensor_dtype(gradient_dtype).name not in LARGEST:
            raise OptionError(
                f"Float8Transform(gradient_dtype={gradient_dtype}): valid: torch.float8_e4m3fn, torch.float8_e5m2"
            )
        if filter is not None and not callable(filter):
            raise OptionError(
                f"Float8Transform(filter=...) is a function of a module and its path, not a {type(filter).__name__}"
            )
        self.scaling, self.gradient_dtype, self.filter = scaling, gradient_dtype, filter

    def __repr__(self) -> str:
        return f"Float8Transform(scaling={self.scaling!r}, gradient_dtype={self.gradient_dtype})"

    def transform_traces_pre_prologue(
        self, prologue_trace: Trace, computation_trace: Trace, epilogue_trace: Trace | None, *, model=None, **kwargs
    ) -> tuple:
        layers = _Layers(self, computation_trace, model)
        changed = rewrite(computation_trace, layers.rule)
        if layers.refused and not layers.taken:
            warn_user(f"Float8Transform takes no layer: {'; '.join(dict.fromkeys(layers.refused))}", UserWarning)
        return prologue_trace, changed if layers.taken else computation_trace, epilogue_trace


class _Layers:
    """The rewriting of one program."""

    def __init__(self, options: Float8Transform, trace: Trace, model):
        self.options, self.model = options, model
        self.by_rows = options.scaling == "rowwise"
        self.paths = trace.info.parameters
        self.cast_of: dict[Proxy, Proxy] = {}
        self.known: dict[tuple, Quantized] = {}
        self.refused: list[str] = []
        self.taken = 0
        self.transposed: dict[Proxy, bool] = {}
        for operation in trace.bound_symbols:
            if operation.sym is ltorch.linear:
                trains = operation.output.requires_grad
                for a, other in (operation.args[:2], operation.args[1::-1]):
                    self.transposed[a] = self.transposed.get(a, False) or trains and other.requires_grad

    def rule(self, operation: BoundSymbol, out: Rewriter) -> None:
        """Writes a linear layer as a product of float8, or as it is."""
        if operation.sym is ltorch.to and isinstance(operation.output, TensorProxy):
            self.cast_of[operation.output] = operation.args[0]
        if operation.sym is not ltorch.linear:
            return out.write(operation)
        reason = self.refusal(operation)
        if reason is None:
            self.taken += 1
            return out.trace(lambda x, weight, bias=None: self.layer(operation, x, weight, bias), operation)
        if reason:
            self.refused.append(reason)
        out.write(operation)

    def refusal(self, operation: BoundSymbol) -> str | None:
        """Why a layer stays as it is; empty where the user says so, None where it does not."""
        x, weight = operation.args[:2]
        if len(weight.shape) != 2 or any(not isinstance(n, int) for n in (*x.shape, *weight.shape)):
            return "its sizes are symbolic, or its weight is no matrix"
        if weight.dtype not in (dtypes.bfloat16, dtypes.float16, dtypes.float32):
            return f"its type is {weight.dtype}"
        rows = math.prod(x.shape[:-1])
        if any(n % 16 for n in weight.shape) or not rows or operation.output.requires_grad and rows % 16:
            return f"sizes are not divisible by 16: {rows} rows, weight {list(weight.shape)}"
        if not has_products(device := to_torch_device(weight.device)):
            return f"float8 products need a GPU of compute capability 8.9, and {device} is older, or none"
        return None if self.options.filter is None or self.options.filter(*self.module(weight)) else ""

    def module(self, weight: Proxy) -> tuple[Any, str]:
        """(module, path) of the module that holds a weight."""
        while weight in self.cast_of:
            weight = self.cast_of[weight]
        path = self.paths.get(weight.name)
        if path is None or self.model is None:
            return None, ""
        name = path.rpartition(".")[0]
        return self.model.get_submodule(name), name

    def layer(self, operation: BoundSymbol, x, weight, bias):
        matrix = x if len(x.shape) == 2 else ltorch.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        qx = self.quantized(operation, x, matrix)
        qw = self.quantized(operation, weight, weight)
        return float8_linear(x, weight, bias, tuple(qx), tuple(qw), from_tensor_dtype(self.options.gradient_dtype))

    def quantized(self, operation: BoundSymbol, value: TensorProxy, matrix) -> Quantized:
        """In a checkpoint what stands there is recomputed, so that it is not shared with what stands outside."""
        key = value, operation.context.checkpoint if operation.context is not None else ()
        if key not in self.known:
            self.known[key] = quantized(matrix, dtypes.float8_e4m3fn, self.by_rows, self.transposed.get(value, False))
        return self.known[key]
