"""softmax and log_softmax, and their backward kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import BoundSymbol
from thunder.ops import backward, ltorch
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.data import convert
from thunder.ops.families.norm_kernels import compute_dtype, in_rows
from thunder.ops.registry import composite
from thunder.ops.rules import batching, kernels, splitting
from thunder.ops.shape_rules import is_empty, require, wrap_dim


def _softmax_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """softmax(a, dim, dtype=): what F.softmax and Tensor.softmax take besides is left out, its implicit dimension
    written down."""
    a, dim, *rest = (*args, None) if len(args) == 1 else args
    dtype = kwargs.get("dtype", next((x for x in reversed(rest) if x is not None and type(x) is not int), None))
    if unknown := kwargs.keys() - {"dtype", "_stacklevel"}:
        raise TypeError(f"softmax() got an unexpected keyword argument {min(unknown)!r}")
    if dim is None:
        dim = 0 if len(a.shape) in (0, 1, 3) else 1
    return (a, dim), {} if dtype is None else {"dtype": dtypes.to_dtype(dtype)}


def _softmax_meta(a, dim, *, dtype=None):
    wrap_dim(dim, len(a.shape))
    require(dtype is not None or a.dtype.category >= 2)
    return like(a, dtype=dtype)


def _exponentials(a, dim, dtype):
    """`a` less its maximum, and the dtype to compute in and to return."""
    out = dtype or a.dtype
    x = convert(convert(a, out), compute_dtype(out))
    return (x - ltorch.amax(x, dim, True) if not is_empty(a) else x), out


_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax)
_LOG_SOFTMAX = (torch.log_softmax, torch.Tensor.log_softmax, F.log_softmax, torch.special.log_softmax)


@composite(*_SOFTMAX, meta=_softmax_meta, canonicalize=_softmax_arguments, autocast="cuda:float32")
def softmax(a, dim=None, *, dtype=None):
    x, out = _exponentials(a, dim, dtype)
    e = ltorch.exp(x)
    return in_rows(convert(e / ltorch.sum(e, dim, True), out))


@composite(*_LOG_SOFTMAX, meta=_softmax_meta, canonicalize=_softmax_arguments, autocast="cuda:float32")
def log_softmax(a, dim=None, *, dtype=None):
    x, out = _exponentials(a, dim, dtype)
    return in_rows(convert(x - ltorch.log(ltorch.sum(ltorch.exp(x), dim, True)), out))


def _of_softmax(grad_output, output, dim, input_dtype):
    require(grad_output.shape == output.shape)
    return like(grad_output, dtype=dtypes.to_dtype(input_dtype))


softmax_backward = backward.kernel("_softmax_backward_data", "default", _of_softmax, public="softmax_backward")
log_softmax_backward = backward.kernel(
    "_log_softmax_backward_data", "default", _of_softmax, public="log_softmax_backward"
)


@softmax_backward.decomposed_by
def _(g, y, dim, dtype):
    gy = g * y
    return convert(gy - y * ltorch.sum(gy, dim, True), dtypes.to_dtype(dtype))


@log_softmax_backward.decomposed_by
def _(g, y, dim, dtype):
    return convert(g - ltorch.exp(y) * ltorch.sum(g, dim, True), dtypes.to_dtype(dtype))


def _exponential_rule(symbol, kernel):
    """softmax and log_softmax: the kernel reads the result; the cotangent returns to the argument's type."""

    def rule(a, dim=None, *, dtype=None):
        y = symbol(a, dim, dtype=dtype)
        g = yield y
        return (convert(kernel(g, y, wrap_dim(dim, len(a.shape)), y.dtype), a.dtype),)

    symbol.vjp(rule)


_exponential_rule(softmax, softmax_backward)
_exponential_rule(log_softmax, log_softmax_backward)


@composite(*compat.operators("_safe_softmax"))
def _safe_softmax(a, dim, dtype=None):
    """softmax, 0 where all of a row is -inf."""
    out = softmax(a, dim, dtype=dtype)
    hidden = ltorch.all(ltorch.eq(a, float("-inf")), dim, True)
    return ltorch.where(hidden, 0.0, out)


gradient_of_first(
    _safe_softmax, lambda g, y, a, dim, dtype=None: convert(softmax_backward(g, y, dim, y.dtype), a.dtype)
)


kernels.layout.set("row-major", softmax, log_softmax, softmax_backward, log_softmax_backward)


def _softmax_twice(c, g, y, dim, dtype):
    total = ltorch.sum(y * g, dim, True)
    return softmax_backward(c, y, dim, dtype), g * c - total * c - g * ltorch.sum(y * c, dim, True)


def _log_softmax_twice(c, g, y, dim, dtype):
    p = ltorch.exp(y)
    return c - ltorch.sum(c * p, dim, True), -ltorch.sum(g, dim, True) * p * c


backward.gradients_of(softmax_backward, _softmax_twice)
backward.gradients_of(log_softmax_backward, _log_softmax_twice)


@batching.rule(softmax, log_softmax)
def _softmax_of_batch(batch: batching.Batch, operation: BoundSymbol):
    return None if len(operation.args) < 2 or operation.args[1] is None else batching.along(batch, operation)


@splitting.rule(softmax, log_softmax)
def _softmax_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """softmax and its like, of another dimension than that of the parts."""
    part = split.part(operation.inputs[0])
    dim = (
        operation.args[1] % len(operation.output.shape)
        if len(operation.args) > 1 and isinstance(operation.args[1], int)
        else None
    )
    return (
        None
        if part is None or dim is None or part.dim == dim
        else split.computed(operation, {operation.inputs[0]: part.value}, part.axis, part.dim)
    )


# ----------------------------------------------------------------------------------------------------------------
# by sums of rows, as kernels that store no weights compute it


def wide_type(t: TensorProxy) -> dtypes.dtype:
    """The type that sums of rows have."""
    return dtypes.float64 if t.dtype is dtypes.float64 else dtypes.float32


def softmax_with_sums(x):
    """The softmax of rows, the largest element of each, and the sum of the exponentials of the differences from it."""
    wide = convert(x, wide_type(x))
    largest = ltorch.amax(wide, -1, True)
    e = ltorch.exp(wide - ltorch.where(ltorch.eq(largest, float("-inf")), 0.0, largest))
    total = ltorch.sum(e, -1, True)
    return convert(e / total, x.dtype), largest, total


def softmax_by_sums(x, sums):
    """The same from the logarithms of the sums of the exponentials of rows."""
    known = ltorch.where(ltorch.eq(sums, float("-inf")), 0.0, sums)
    return convert(ltorch.exp(convert(x, wide_type(x)) - known), x.dtype)


def softmax_backward_by_differences(g, y, differences, dtype):
    """`softmax_backward` with the sums of rows of g * y."""
    wide = wide_type(y)
    return convert(convert(y, wide) * (convert(g, wide) - differences), dtypes.to_dtype(dtype))


def products_of_rows(a, b):
    """The sum of the products of two rows."""
    return ltorch.sum(convert(a, wide_type(a)) * convert(b, wide_type(b)), -1, True)
