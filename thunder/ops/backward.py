"""What derivatives are made of: PyTorch's own backward kernels as operations, and the sum that undoes broadcasting.

Formulas are those of PyTorch's autograd, so that a compiled backward computes what eager computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.dtypes import bfloat16, bool8, float16, float32
from thunder.core.proxies import NumberProxy, TensorProxy, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, adopt, recording
from thunder.core.utils import has_triton
from thunder.ops.define import LTORCH

__all__ = ["sum_to", "kernel", "op", "in_operations", "parts", "times_cotangent"]

aten = torch.ops.aten


def op(name: str) -> Symbol:
    """An operation by name, found when it is called: derivatives of one family use operations of the others."""
    return LTORCH[name]


def sum_to(g: TensorProxy, shape: tuple) -> TensorProxy:
    """A gradient summed back to the shape its operand had before broadcasting."""
    if same_shape(g.shape, shape):
        return g
    if not shape:
        return op("sum")(g)
    if any(
        isinstance(n, NumberProxy) and n.unbacked and (n == g.shape[i - len(shape)]) is not True
        for i, n in enumerate(shape)
    ):
        return op("sum_to_size")(g, tuple(shape))  # whether it was stretched, only the run tells
    lead = len(g.shape) - len(shape)
    dims = (
        *range(lead),
        *(i + lead for i, n in enumerate(shape) if type(n) is int and n == 1 and not _is_one(g.shape[i + lead])),
    )
    out = op("sum")(g, dims, True) if dims else g
    return op("reshape")(out, shape) if lead else out


def _is_one(n) -> bool:
    return type(n) is int and n == 1


def kernel(name: str, overload: str, meta: Callable, tags: tuple[OpTags, ...] = ()) -> Symbol:
    """A kernel of PyTorch's that no function of its Python API calls: `torch.ops.aten.<name>.<overload>`, typed by
    `meta`."""
    return Symbol(
        overload,
        meta,
        id=f"aten.{name}.{overload}",
        module=f"torch.ops.aten.{name}",
        is_prim=True,
        tags=tags,
        fn=getattr(getattr(aten, name), overload),
    )


def memory_format(t: torch.Tensor) -> torch.memory_format:
    """The layout that PyTorch's kernels keep for an image, by its strides alone, as `suggest_memory_format` in
    c10/core/MemoryFormat.h: channels last where they are."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    if layout is None or 0 in t.shape or t.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        if t.stride(d) < least or (d == 0 and least == t.stride(1)):  # what could be either is row-major
            return torch.contiguous_format
        least = t.stride(d) * t.shape[d]
    return layout


def _like_first(g, *args, **kwargs):
    return like(g)


tanh_backward = kernel("tanh_backward", "default", _like_first)
sigmoid_backward = kernel("sigmoid_backward", "default", _like_first)
gelu_backward = kernel("gelu_backward", "default", _like_first)
silu_backward = kernel("silu_backward", "default", _like_first)
threshold_backward = kernel("threshold_backward", "default", _like_first)
leaky_relu_backward = kernel("leaky_relu_backward", "default", _like_first)
elu_backward = kernel("elu_backward", "default", _like_first)
hardswish_backward = kernel("hardswish_backward", "default", _like_first)
hardsigmoid_backward = kernel("hardsigmoid_backward", "default", _like_first)
hardtanh_backward = kernel("hardtanh_backward", "default", _like_first)
softplus_backward = kernel("softplus_backward", "default", _like_first)
mish_backward = kernel("mish_backward", "default", _like_first)
softmax_backward = kernel("_softmax_backward_data", "default", _like_first)
safe_softmax = kernel("_safe_softmax", "default", _like_first)
log_softmax_backward = kernel("_log_softmax_backward_data", "default", _like_first)


def _times_cotangent(gradient: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """What a CUDA graph runs again does not write over what is saved either. On a GPU, where looking at the cotangent
    would wait for it, a kernel looks."""
    if compat.keeps_graph() or gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return gradient * cotangent
    # all of its memory, not a part with gaps
    if gradient.is_cuda and has_triton() and gradient.nbytes == gradient.untyped_storage().nbytes():
        from thunder.ops.scale_kernel import scale

        return scale(gradient, cotangent)
    return gradient if not cotangent.is_cuda and cotangent == 1 else gradient.mul_(cotangent)


# a saved gradient for a cotangent of 1, for another one: written over where autograd keeps no graph that would read it
# again. Nothing else may read it
times_cotangent = Symbol(
    "times_cotangent",
    lambda gradient, cotangent: like(gradient),
    id="times_cotangent",
    is_prim=True,
    fn=_times_cotangent,
)
embedding_backward = kernel(
    "embedding_dense_backward", "default", lambda g, indices, count, padding_idx, scale: like(g, (count, g.shape[-1]))
)


def _layer_norm_meta(a, normalized_shape, weight, bias, eps):
    """On a CPU, mean and deviation of a narrow type are float32 where weight and bias are, elsewhere always
    (ATen/native/layer_norm.cpp, cuda/layer_norm_kernel.cu)."""
    outer = a.shape[: len(a.shape) - len(normalized_shape)] + (1,) * len(normalized_shape)
    mixed = any(p is not None and p.dtype is float32 for p in (weight, bias))
    dtype = float32 if a.dtype in (bfloat16, float16) and (mixed or a.device.type != "cpu") else a.dtype
    return like(a), like(a, outer, dtype=dtype), like(a, outer, dtype=dtype)


native_layer_norm = kernel("native_layer_norm", "default", _layer_norm_meta, tags=(OpTags.REDUCTION_OP,))
native_layer_norm_backward = kernel(
    "native_layer_norm_backward", "default",
    lambda g, a, normalized_shape, mean, rstd, weight, bias, mask: (
        like(a) if mask[0] else None, like(weight) if mask[1] else None, like(bias) if mask[2] else None
    ),
)  # fmt: skip
native_dropout = kernel(
    "native_dropout",
    "default",
    lambda a, p, train: (like(a), like(a, dtype=bool8)),
    tags=(OpTags.RANDOM_OP, OpTags.DONT_DCE),
)
native_dropout_backward = kernel("native_dropout_backward", "default", _like_first)
pdist_backward = kernel("_pdist_backward", "default", lambda g, a, p, y: like(a))
logit_backward = kernel("logit_backward", "default", _like_first)
hardshrink_backward = kernel("hardshrink_backward", "default", _like_first)
softshrink_backward = kernel("softshrink_backward", "default", _like_first)
glu_backward = kernel("glu_backward", "default", lambda g, a, dim: like(a))
log_sigmoid_forward = kernel("log_sigmoid_forward", "default", lambda a: (like(a), like(a)))
log_sigmoid_forward.nondifferentiable = (1,)  # a buffer
log_sigmoid_backward = kernel("log_sigmoid_backward", "default", _like_first)
prelu_kernel = kernel("_prelu_kernel", "default", lambda a, weight: like(a))
prelu_kernel_backward = kernel("_prelu_kernel_backward", "default", lambda g, a, weight: (like(a), like(a)))
select_backward = kernel("select_backward", "default", lambda g, sizes, dim, index: like(g, tuple(sizes)))
slice_backward = kernel("slice_backward", "default", lambda g, sizes, dim, start, end, step: like(g, tuple(sizes)))


select_backward.layout = slice_backward.layout = "row-major"  # written into zeros


def _index_backward(g, shape, indices):
    return compat.kernel("_index_put_impl_")(g.new_zeros(shape), indices, g, True, True)


# zeros of a shape, the cotangent added at index tensors (None: all of a dimension), which the forward has checked
index_backward = Symbol(
    "index_backward",
    lambda g, shape, indices: like(g, tuple(shape)),
    id="index_backward",
    is_prim=True,
    fn=_index_backward,
)


# ----------------------------------------------------------------------------------------------------------------
# second derivatives PyTorch differentiates its kernels where autograd has to; for these it computes their formula in
# operations as soon as a second derivative may follow


def formula(symbol: Symbol) -> Callable:
    """The decorated function computes what a kernel computes, in operations: differentiating the kernel differentiates
    that."""

    def define(function: Callable) -> Callable:
        symbol.formula = function
        return function

    return define


def in_operations(symbol: Symbol) -> Callable:
    """The decorated function says what a kernel computes from what it is given, for executors that look into it; it
    returns None for arguments that it does not know."""

    def define(function: Callable) -> Callable:
        symbol.in_operations = function
        return function

    return define


def parts(line: BoundSymbol) -> tuple[tuple[BoundSymbol, ...], dict]:
    """The lines that compute what a line computes, and for outputs that they do not make, what these are."""
    formula = line.sym.in_operations
    if formula is None:
        return line.subsymbols, line.aliases
    if line._subsymbols is None:
        assert line.context is not None, "lines that were recorded have a context"
        with recording(Recorder(line.context.replace(autocast=None), lambda: line.location)) as recorder:
            result = formula(*line.args, **line.kwargs)
        if result is None:
            return (), {}
        lines, line.aliases = adopt(recorder.bound_symbols, result, line.output)
        line._subsymbols = tuple(lines)
    return line._subsymbols, line.aliases


@in_operations(silu_backward)
@formula(silu_backward)
def _silu_backward(g, x):
    s = op("sigmoid")(x)
    return g * s * (1 + x * (1 - s))


@in_operations(hardsigmoid_backward)
@formula(hardsigmoid_backward)
def _hardsigmoid_backward(g, x):
    return op("where")((x > -3.0) & (x < 3.0), g * (1.0 / 6.0), 0.0)


@native_dropout.vjp
def _(a, p, train):
    y, mask = native_dropout(a, p, train)
    g, _ = yield y, mask
    return (native_dropout_backward(g, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0),)


@in_operations(mish_backward)
@formula(mish_backward)
def _mish_backward(g, x):
    t = op("tanh")(op("softplus")(x))
    return g * (t + x * op("sigmoid")(x) * (1 - t * t))


@formula(logit_backward)
def _logit_backward(g, x, eps=None):
    low = 0.0 if eps is None else eps
    return op("where")((x >= low) & (x <= 1.0 - low), g / (x * (1.0 - x)), float("nan") if eps is None else 0.0)


def _getitem_backward(g, shape, key):
    out = g.new_zeros(tuple(shape))
    if any(isinstance(k, (torch.Tensor, list)) for k in (key if isinstance(key, tuple) else (key,))):
        keys = key if isinstance(key, tuple) else (key,)
        if all(isinstance(k, torch.Tensor) and (k.dim() or k.dtype != torch.bool) for k in keys):
            return out.index_put_(keys, g, accumulate=True)
        position = torch.arange(out.numel(), device=g.device).view(out.shape)[key]
        return out.view(-1).index_add_(0, position.reshape(-1), g.reshape(-1)).view(out.shape)
    out[key] = g
    return out


getitem_backward = Symbol(
    "getitem_backward",
    lambda g, shape, key: like(g, tuple(shape)),
    id="getitem_backward",
    is_prim=True,
    fn=_getitem_backward,
)
