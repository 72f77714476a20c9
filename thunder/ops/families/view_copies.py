"""`torch.permute_copy` and its kin, the copy of a view, and `diagonal_scatter` and its kin, a copy with
other values in the place of a view."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags
from thunder.ops import ltorch
from thunder.ops.families.rearrange import diagonal
from thunder.ops.registry import LTORCH, by_example, composite, torch_prim
from thunder.ops.shape_rules import require

# ----------------------------------------------------------------------------------------------------------------
# copies of views


for _name in (
    "alias as_strided diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose unbind "
    "unfold unsqueeze view view_as_complex view_as_real"
).split():
    _functions = [f for space in (torch, torch.Tensor) if (f := getattr(space, f"{_name}_copy", None)) is not None]
    by_example(*_functions, name=f"{_name}_copy", autocast=LTORCH[_name].autocast if _name in LTORCH else None)


@composite(torch.detach_copy, tags=(OpTags.DETACHED,))
def detach_copy(a):
    return ltorch.clone(a, memory_format=torch.contiguous_format)


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
    require(src.shape == shape)


@torch_prim(torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def diagonal_scatter(a, src, offset=0, dim1=0, dim2=1):
    _check_source(src, diagonal.meta(a, offset, dim1, dim2).shape)
    return like(a)


@diagonal_scatter.vjp
def _(a, src, offset=0, dim1=0, dim2=1):
    g = yield diagonal_scatter(a, src, offset, dim1, dim2)
    return diagonal_scatter(g, ltorch.zeros_like(src), offset, dim1, dim2), diagonal(g, offset, dim1, dim2)


@torch_prim(torch.as_strided_scatter, torch.Tensor.as_strided_scatter)
def as_strided_scatter(a, src, size, stride, storage_offset=None):
    require(len(size) == len(stride))
    _check_source(src, tuple(size))
    return like(a)
