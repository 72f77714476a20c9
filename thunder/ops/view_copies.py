"""`torch.permute_copy` and its kin, the copy of a view, and `diagonal_scatter` and its kin, a copy with
other values in the place of a view."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like, map_structure
from thunder.core.symbol import OpTags, Symbol
from thunder.ops.define import LTORCH, composite, torch_prim
from thunder.ops.rearrange import diagonal

# ----------------------------------------------------------------------------------------------------------------
# copies of views


def _copy(a: TensorProxy) -> TensorProxy:
    return LTORCH["clone"](a, memory_format=torch.contiguous_format)


def _slice(a, dim=0, start=None, end=None, step=1):
    return LTORCH["getitem"](a, (*(slice(None),) * (dim % max(len(a.shape), 1)), slice(start, end, step)))


def _split_with_sizes(a, split_sizes, dim=0):
    return LTORCH["split"](a, list(split_sizes), dim)


def _expand(a, size, *, implicit=False):
    return LTORCH["expand"](a, size)


# by the copy's name without `_copy`, the view
_VIEWS = {
    "alias": lambda a: a,
    "as_strided": lambda a, size, stride, storage_offset=None: LTORCH["as_strided"](a, size, stride, storage_offset),
    "diagonal": lambda a, offset=0, dim1=0, dim2=1: diagonal(a, offset, dim1, dim2),
    "expand": _expand,
    "narrow": lambda a, dim, start, length: LTORCH["narrow"](a, dim, start, length),
    "permute": lambda a, dims: LTORCH["permute"](a, dims),
    "select": lambda a, dim, index: LTORCH["select"](a, dim, index),
    "slice": _slice,
    "split": lambda a, split_size, dim=0: LTORCH["split"](a, split_size, dim),
    "split_with_sizes": _split_with_sizes,
    "squeeze": lambda a, dim=None: LTORCH["squeeze"](a) if dim is None else LTORCH["squeeze"](a, dim),
    "t": lambda a: LTORCH["t"](a),
    "transpose": lambda a, dim0, dim1: LTORCH["transpose"](a, dim0, dim1),
    "unbind": lambda a, dim=0: LTORCH["unbind"](a, dim),
    "unfold": lambda a, dimension, size, step: LTORCH["unfold"](a, dimension, size, step),
    "unsqueeze": lambda a, dim: LTORCH["unsqueeze"](a, dim),
    "view": lambda a, size: LTORCH["view"](a, size),
    "view_as_complex": lambda a: LTORCH["view_as_complex"](a),
    "view_as_real": lambda a: LTORCH["view_as_real"](a),
}


def _view_copy(name: str, view) -> None:
    functions = [f for space in (torch, torch.Tensor) if (f := getattr(space, f"{name}_copy", None)) is not None]

    def meta(a, *args, **kwargs):
        viewed = view(like(a), *args, **kwargs)
        return map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, viewed)

    def decomposition(*args, **kwargs):
        return map_structure(lambda x: _copy(x) if isinstance(x, TensorProxy) else x, view(*args, **kwargs))

    symbol = composite(*functions, name=f"{name}_copy", autocast=LTORCH[name].autocast if name in LTORCH else None)(
        decomposition
    )
    symbol.parameters, symbol.defaults = Symbol(name, view).parameters, Symbol(name, view).defaults


for _name, _view in _VIEWS.items():
    _view_copy(_name, _view)


@composite(torch.detach_copy, tags=(OpTags.DETACHED,))
def detach_copy(a):
    return _copy(a)


# --- what shows conjugates or negatives, written out: the tensor itself where it shows none, which its type can say


@torch_prim(torch.resolve_conj, torch.Tensor.resolve_conj, tags=(OpTags.VIEW,))
def resolve_conj(a):
    return like(a) if a.dtype.category == dtypes.COMPLEX else a


@torch_prim(torch.resolve_neg, torch.Tensor.resolve_neg, tags=(OpTags.VIEW,))
def resolve_neg(a):
    return like(a) if a.dtype.category >= dtypes.FLOAT else a


for _symbol in (resolve_conj, resolve_neg):

    @_symbol.vjp
    def _(a, symbol=_symbol):
        g = yield symbol(a)
        return (g,)


# ---------------------------------------------------------------------------------------------------------------- other
# values in the place of a view


def _check_source(src: TensorProxy, shape: tuple) -> None:
    if src.shape != shape:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = "
            f"{list(shape)}"
        )


@torch_prim(torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def diagonal_scatter(a, src, offset=0, dim1=0, dim2=1):
    _check_source(src, diagonal.meta(a, offset, dim1, dim2).shape)
    return like(a)


@diagonal_scatter.vjp
def _(a, src, offset=0, dim1=0, dim2=1):
    g = yield diagonal_scatter(a, src, offset, dim1, dim2)
    return diagonal_scatter(g, LTORCH["zeros_like"](src), offset, dim1, dim2), diagonal(g, offset, dim1, dim2)


@torch_prim(torch.as_strided_scatter, torch.Tensor.as_strided_scatter)
def as_strided_scatter(a, src, size, stride, storage_offset=None):
    if len(size) != len(stride):
        raise RuntimeError("mismatch in length of strides and shape")
    _check_source(src, tuple(size))
    return like(a)
