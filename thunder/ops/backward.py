"""What derivatives are made of: PyTorch's own backward kernels as operations, and the sum that undoes broadcasting.

Formulas are those of PyTorch's autograd, so that a compiled backward computes what eager computes.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import NumberProxy, TensorProxy, like, same_shape
from thunder.core.symbol import OpTags, Symbol, primitive
from thunder.core.utils import has_triton
from thunder.ops import ltorch, prims
from thunder.ops.layout import empty_rows, is_dense
from thunder.ops.registry import torch_prim
from thunder.ops.rules import derivatives, kernels, operands

aten = torch.ops.aten


def sum_to(g: TensorProxy, shape: tuple) -> TensorProxy:
    """A gradient summed back to the shape its operand had before broadcasting."""
    if same_shape(g.shape, shape):
        return g
    if not shape:
        return ltorch.sum(g)
    if any(
        isinstance(n, NumberProxy) and n.unbacked and (n == g.shape[i - len(shape)]) is not True
        for i, n in enumerate(shape)
    ):
        return ltorch.sum_to_size(g, tuple(shape))  # whether it was stretched is data-dependent
    lead = len(g.shape) - len(shape)
    dims = (
        *range(lead),
        *(i + lead for i, n in enumerate(shape) if type(n) is int and n == 1 and not _is_one(g.shape[i + lead])),
    )
    out = ltorch.sum(g, dims, True) if dims else g
    return ltorch.reshape(out, shape) if lead else out


def _is_one(n) -> bool:
    return type(n) is int and n == 1


def _like_first(g, *args, **kwargs):
    return like(g)


def is_pointwise(symbol: Symbol) -> bool:
    """Whether a kernel's operands and its result are tensors of one shape."""
    return symbol.meta is _like_first


KERNELS: dict[str, Symbol] = {}  # by PyTorch's name


def kernel(
    name: str, overload: str = "default", meta: Callable = _like_first, tags: tuple[OpTags, ...] = (), public: str = ""
) -> Symbol:
    """A kernel of PyTorch's that no function of its Python API calls: `torch.ops.aten.<name>.<overload>`, typed by
    `meta`. public: what the operation is called that programs get which call the kernel by its name."""
    fn = compat.kernel(name, overload)
    if public:
        symbol = torch_prim(fn, *compat.operators(name), name=public, tags=tags)(meta)
    else:
        printed = (name, "torch") if isinstance(fn, types.BuiltinFunctionType) else (overload, f"torch.ops.aten.{name}")
        symbol = Symbol(
            printed[0], meta, id=f"aten.{name}.{overload}", module=printed[1], is_prim=True, tags=tags, fn=fn
        )
        if name.endswith("_backward"):
            derivatives.conjugates.add(symbol)
    return KERNELS.setdefault(name, symbol)


def gradient_of_first(symbol: Symbol, gradient: Callable) -> None:
    """The derivative of an operation of one differentiable tensor: gradient(cotangent, result, *arguments). What it
    reads is saved, and no more."""

    @symbol.vjp
    def _(*args, **kwargs):
        y = symbol(*args, **kwargs)
        g = yield y
        return (gradient(g, y, *args, **kwargs),)


def gradients_of(symbol: Symbol, gradients: Callable, operands: tuple[int, ...] = (0, 1)) -> None:
    """The derivative of a kernel: gradients(cotangent, *arguments) are the cotangents of its arguments. operands: the
    positions that it has one for; PyTorch differentiates, or refuses, with respect to others."""

    @symbol.vjp
    def _(*args, **kwargs):
        if any(isinstance(a, TensorProxy) and a.requires_grad for i, a in enumerate(args) if i not in operands):
            return NotImplemented
        cotangent = yield symbol(*args, **kwargs)
        return gradients(cotangent, *args, **kwargs)


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


tanh_backward = kernel("tanh_backward")
sigmoid_backward = kernel("sigmoid_backward")


def _rows(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor as a matrix: of one row where nothing is between its elements, of its last dimension otherwise."""
    if is_dense(x):
        return x.as_strided((1, x.numel()), (x.numel(), 1))
    if x.stride(-1) != 1 or x.stride()[:-1] != tuple(
        x.stride(-2) * math.prod(x.shape[d:-1]) for d in range(1, x.dim())
    ):
        return None
    return x.flatten(0, -2)


def is_read_again(saved: torch.Tensor) -> bool:
    """Whether a saved value that only a backward uses is used after this run as well: its graph is kept, hooks hold it,
    or a CUDA graph that is recorded runs again."""
    return compat.keeps_graph() or saved.is_cuda and torch.cuda.is_current_stream_capturing()


# a saved gradient for a cotangent of 1, for another one: written over where it is not read again
@primitive(lambda gradient, cotangent: like(gradient))
def times_cotangent(gradient: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """On a GPU, where looking at the cotangent would wait for it, a kernel looks."""
    if is_read_again(gradient):
        return (
            gradient * cotangent
            if is_dense(gradient)
            else torch.mul(gradient, cotangent, out=empty_rows(gradient, gradient.shape))
        )
    if gradient.is_cuda and has_triton() and (rows := _rows(gradient)) is not None:
        from thunder.ops.families.scale_kernel import scale

        scale(rows, cotangent)
        return gradient
    return gradient if not cotangent.is_cuda and cotangent == 1 else gradient.mul_(cotangent)


embedding_backward = kernel(
    "embedding_dense_backward", "default", lambda g, indices, count, padding_idx, scale: like(g, (count, g.shape[-1]))
)


pdist_backward = kernel("_pdist_backward", "default", lambda g, a, p, y: like(a))
operands.holds.set(operands.of_distances, pdist_backward)
logit_backward = kernel("logit_backward")
select_backward = kernel("select_backward", "default", lambda g, sizes, dim, index: like(g, tuple(sizes)))
slice_backward = kernel("slice_backward", "default", lambda g, sizes, dim, start, end, step: like(g, tuple(sizes)))


diagonal_backward = kernel("diagonal_backward", "default", lambda g, sizes, offset, dim1, dim2: like(g, tuple(sizes)))
unfold_backward = kernel("unfold_backward", "default", lambda g, sizes, dim, size, step: like(g, tuple(sizes)))
kernels.layout.set(
    "row-major", select_backward, slice_backward, diagonal_backward, unfold_backward
)  # written into zeros


# zeros of a shape, the cotangent added at index tensors (None: all of a dimension), which the forward has checked;
# distinct: no place is there twice, so that PyTorch does not have to sort them
@primitive(lambda g, shape, indices, distinct=False: like(g, tuple(shape)))
def index_backward(g, shape, indices, distinct=False):
    return compat.kernel("_index_put_impl_")(g.new_zeros(shape), indices, g, not distinct, True)


# ----------------------------------------------------------------------------------------------------------------
# what kernels compute, in operations


@tanh_backward.decomposed_by
def _(g, y):
    return g * (1.0 - y * y)


@sigmoid_backward.decomposed_by
def _(g, y):
    return g * (1.0 - y) * y


@slice_backward.decomposed_by
def _(g, sizes, dim, start, end, step):
    dim = dim % len(sizes)
    start = _begin(start, sizes[dim])
    if step != 1:  # zeros around each element, so that slices of one step are apart in each row of `step`
        before, behind = g.shape[:dim], g.shape[dim + 1 :]
        ahead = start % step if isinstance(start, int) and isinstance(step, int) else 0
        apart = prims.reshape(g, (*before, g.shape[dim], 1, *behind))
        around = [(ahead, step - 1 - ahead) if d == dim + 1 else (0, 0) for d in range(len(sizes) + 1)]
        g = prims.reshape(prims.pad(apart, 0, tuple(around)), (*before, g.shape[dim] * step, *behind))
        start = start - ahead
    return prims.pad(g, 0, tuple((start, n - start - g.shape[d]) if d == dim else (0, 0) for d, n in enumerate(sizes)))


def _begin(start, n):
    """Where a slice of n elements begins, as `slice.indices` says it, which takes no symbolic numbers."""
    if start is None:
        return 0
    start = start + n if start < 0 else start
    return 0 if start < 0 else n if start > n else start


@select_backward.decomposed_by
def _(g, sizes, dim, index):
    dim = dim % len(sizes)
    before = index if index >= 0 else index + sizes[dim]
    return prims.pad(
        ltorch.unsqueeze(g, dim),
        0,
        tuple((before, n - before - 1) if d == dim else (0, 0) for d, n in enumerate(sizes)),
    )


# ----------------------------------------------------------------------------------------------------------------
# second derivatives PyTorch differentiates its kernels where autograd has to; for these it computes their formula in
# operations as soon as a second derivative may follow


def formula(symbol: Symbol) -> Callable:
    """The decorated function computes what a kernel computes, in operations: differentiating the kernel differentiates
    that."""

    def define(function: Callable) -> Callable:
        derivatives.formula.set(function, symbol)
        return function

    return define


@formula(logit_backward)
def _logit_backward(g, x, eps=None):
    low = 0.0 if eps is None else eps
    return ltorch.where((x >= low) & (x <= 1.0 - low), g / (x * (1.0 - x)), float("nan") if eps is None else 0.0)


@primitive(lambda g, shape, key: like(g, tuple(shape)))
def getitem_backward(g, shape, key):
    out = g.new_zeros(tuple(shape))
    if any(isinstance(k, (torch.Tensor, list)) for k in (key if isinstance(key, tuple) else (key,))):
        keys = key if isinstance(key, tuple) else (key,)
        if all(isinstance(k, torch.Tensor) and (k.dim() or k.dtype != torch.bool) for k in keys):
            return out.index_put_(keys, g, accumulate=True)
        position = torch.arange(out.numel(), device=g.device).view(out.shape)[key]
        return out.view(-1).index_add_(0, position.reshape(-1), g.reshape(-1)).view(out.shape)
    out[key] = g
    return out
