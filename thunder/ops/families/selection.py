"""Operations whose result is of a data-dependent size: places of what is true, chosen elements, different values."""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core import dtypes
from thunder.core.proxies import like
from thunder.core.symbol import OpTags
from thunder.core.unbacked import fresh_size
from thunder.ops import ltorch
from thunder.ops.backward import sum_to
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import torch_prim
from thunder.ops.rules import effects
from thunder.ops.shape_rules import require, wrap_dim
from thunder.ops.signature import named

# ---------------------------------------------------------------------------------------------------------------- where
# something is true


def _nonzero_meta(a, *, as_tuple=False):
    n = fresh_size()
    if as_tuple:
        return tuple(like(a, (n,), dtypes.int64) for _ in a.shape or (1,))
    return like(a, (n, len(a.shape)), dtypes.int64)


nonzero = torch_prim(torch.nonzero, torch.Tensor.nonzero, name="nonzero")(_nonzero_meta)


@torch_prim(torch.argwhere, torch.Tensor.argwhere)
def argwhere(a):
    return like(a, (fresh_size(), len(a.shape)), dtypes.int64)


@torch_prim(torch.nonzero_static, torch.Tensor.nonzero_static, tags=(OpTags.DETACHED,))
def nonzero_static(a, *, size, fill_value=-1):
    """`nonzero` with a number of rows that the program says: cut off, or filled up."""
    require(size >= 0)
    return like(a, (size, len(a.shape)), dtypes.int64)


@torch_prim(torch.bincount, torch.Tensor.bincount)
def bincount(a, weights=None, minlength=0):
    """How often each number from 0 to the largest one stands in `a`, or the sums of the weights there."""
    require(
        len(a.shape) == 1
        and a.dtype.category == dtypes.INTEGER
        and minlength >= 0
        and (weights is None or weights.shape == a.shape)
    )
    return like(
        a,
        (fresh_size(),),
        dtypes.int64 if weights is None else weights.dtype if weights.dtype is dtypes.float32 else dtypes.float64,
    )


# ----------------------------------------------------------------------------------------------------------------
# chosen elements


@torch_prim(torch.masked_select, torch.Tensor.masked_select)
def masked_select(a, mask):
    require(mask.dtype is dtypes.bool8)
    broadcast_shapes(a.shape, mask.shape)
    return like(a, (fresh_size(),))


@masked_select.vjp
def _(a, mask):
    g = yield masked_select(a, mask)
    shape = broadcast_shapes(a.shape, mask.shape)
    zeros = ltorch.zeros(shape, device=a.device, dtype=a.dtype)
    return (sum_to(ltorch.masked_scatter(zeros, mask, g), a.shape),)


# ----------------------------------------------------------------------------------------------------------------
# different values


def _unique_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    options, others = named(args[1:], kwargs, "sorted", "return_inverse", "return_counts", "dim")
    return args[:1], {k: v for k, v in (options | others).items() if v is not None}


def _consecutive_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    options, others = named(args[1:], kwargs, "return_inverse", "return_counts", "dim")
    return args[:1], {k: v for k, v in (options | others).items() if v is not None}


def _unique_meta(a, *, sorted=True, return_inverse=False, return_counts=False, dim=None):
    n = fresh_size()
    if dim is None:
        values, inverse = like(a, (n,)), like(a, a.shape, dtypes.int64)
    else:
        d = wrap_dim(dim, len(a.shape))
        values, inverse = like(a, (*a.shape[:d], n, *a.shape[d + 1 :])), like(a, (a.shape[d],), dtypes.int64)
    more = (*((inverse,) if return_inverse else ()), *((like(a, (n,), dtypes.int64),) if return_counts else ()))
    return (values, *more) if more else values


unique = torch_prim(
    torch.unique, torch.Tensor.unique, torch.functional.unique, name="unique", canonicalize=_unique_arguments
)(_unique_meta)
unique_consecutive = torch_prim(
    torch.unique_consecutive,
    torch.Tensor.unique_consecutive,
    torch.functional.unique_consecutive,
    name="unique_consecutive",
    canonicalize=_consecutive_arguments,
)(_unique_meta)


# ----------------------------------------------------------------------------------------------------------------
# packed sequences


@torch_prim(*compat.operators("_pack_padded_sequence"))
def _pack_padded_sequence(a, lengths, batch_first):
    """The elements that belong to sequences of these lengths, one time after the other, and how many sequences each
    time has."""
    return like(a, (fresh_size(), *a.shape[2:])), like(lengths, (fresh_size(),), dtypes.int64)


@torch_prim(*compat.operators("_pad_packed_sequence"))
def _pad_packed_sequence(a, batch_sizes, batch_first, padding_value, total_length):
    times, count = batch_sizes.shape[0] if total_length <= 0 else total_length, fresh_size()
    return like(a, ((count, times) if batch_first else (times, count)) + a.shape[1:]), like(
        batch_sizes, (count,), dtypes.int64
    )


effects.synchronises.add(
    ltorch.nonzero, ltorch.bincount, ltorch.masked_select, ltorch.unique, ltorch.unique_consecutive
)
effects.may_raise.add(bincount)  # negative numbers
