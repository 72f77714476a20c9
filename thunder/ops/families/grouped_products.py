"""A product for each group of rows or columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import BoundSymbol
from thunder.ops import ltorch, opaque
from thunder.ops.families.linalg import MATMUL, of_second
from thunder.ops.registry import SUBSTITUTES, torch_prim
from thunder.ops.shape_rules import require


def _grouped_meta(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    a, b = mat_a.shape, mat_b.shape
    require((offs is None) == (len(a) == len(b) == 3))
    if len(a) == 2 and len(b) == 2:
        return like(mat_a, (offs.shape[0], a[0], b[1]))  # groups of the summed dimension
    require(a[-1] is b[-2] or a[-1] == b[-2])
    return like(mat_a, (a[0], a[1], b[2]) if len(a) == len(b) else (a[-2], b[-1]))


@torch_prim(getattr(F, "grouped_mm", None), tags=MATMUL)  # from torch 2.10 on
def grouped_mm(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    """A product for each group of rows or columns, which end at `offs`."""
    return _grouped_meta(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)


def _grouped_fallback(input, weight, offs):
    """transformers' loop of products for compilers that do not know grouped_mm: where eager takes grouped_mm, so do we.

    Its kernels want rows of whole 16 bytes; CUDA's want compute capability 8.0.
    """
    whole = all(type(n) is int and n * input.dtype.bytes % 16 == 0 for n in weight.shape[1:])
    capable = input.device.type == "cpu" or (
        input.device.type == "cuda" and torch.cuda.get_device_capability(input.device.index or 0) >= (8, 0)
    )
    if (
        whole
        and capable
        and input.dtype is weight.dtype
        and input.dtype.name in ("float32", "bfloat16", "float16")
        and offs.dtype.name == "int32"
    ):
        return (grouped_mm if hasattr(F, "grouped_mm") else ltorch._grouped_mm)(input, weight, offs=offs)
    return opaque.symbol_for(torch.ops.transformers.grouped_mm_fallback)(input, weight, offs)


def grouped_operands(operation: BoundSymbol) -> tuple[TensorProxy, TensorProxy, TensorProxy] | None:
    """(rows, a matrix for each group of them, where groups end) of an operation that is a product for each group of
    rows."""
    if operation.sym in (grouped_mm, _grouped_mm):
        a, b = operation.args[:2]
        places = dict(zip(operation.sym.parameters, operation.args, strict=False)) | operation.kwargs
        offs = places.get("offs")
        plain = places.get("bias") is None and (len(a.shape), len(b.shape)) == (2, 3)
        return (a, b, offs) if plain and offs is not None else None
    if operation.sym.name == "grouped_mm_fallback" and len(operation.args) == 3:
        return operation.args
    return None


SUBSTITUTES["transformers::grouped_mm_fallback"] = _grouped_fallback


@grouped_mm.vjp
def _(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    if (len(mat_a.shape), len(mat_b.shape)) != (2, 3):
        return NotImplemented
    g = yield grouped_mm(mat_a, mat_b, offs=offs)
    return grouped_mm(g, ltorch.transpose(mat_b, -2, -1), offs=offs), of_second(mat_a, g, mat_b, offs)


@torch_prim(*compat.operators("_grouped_mm"), name="_grouped_mm")
def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    """Products of groups of rows (2-D and 3-D), of columns (3-D and 2-D), of either side's inner dimension (2-D twice),
    or of batches; offs: where groups end."""
    ranks = len(a.shape), len(b.shape)
    require(
        set(ranks) <= {2, 3}
        and a.dtype is b.dtype
        and (offs is None) == (ranks == (3, 3))
        and (a.shape[-1] == b.shape[-2] or ranks == (2, 2))
    )
    shape = {
        (2, 3): (a.shape[0], b.shape[-1]),
        (3, 2): (a.shape[-2], b.shape[-1]),
        (3, 3): (a.shape[0], a.shape[1], b.shape[-1]),
    }
    return like(
        a,
        (offs.shape[0], a.shape[0], b.shape[1]) if ranks == (2, 2) else shape[ranks],
        None if out_dtype is None else to_dtype(out_dtype),
    )
