"""Copies of one tensor's elements in another order or number, and views that are no reshaping: diagonals, windows,
strides."""

from __future__ import annotations

import torch

from thunder.analysis import aliases
from thunder.core.dtypes import complex_of, real_of
from thunder.core.proxies import like
from thunder.ops import backward, ltorch, prims
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.shape import MOVES, VIEW, reshape, slice_dim, transpose
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import batching, derivatives, kernels
from thunder.ops.shape_rules import require, wrap_dim, wrap_dims
from thunder.ops.signature import packed

# ----------------------------------------------------------------------------------------------------------------
# repeating


def _repeated(a, repeats) -> tuple[tuple, tuple]:
    new = len(repeats) - len(a.shape)
    require(new >= 0)
    return (1,) * new + a.shape, tuple(repeats)


@composite(torch.Tensor.repeat, canonicalize=packed, tags=MOVES)
def repeat(a, repeats):
    have, times = _repeated(a, repeats)
    spread = tuple(x for pair in zip(times, have, strict=True) for x in pair)
    dims = tuple(2 * i + 1 for i in range(len(have)))[len(have) - len(a.shape) :]
    return prims.reshape(
        prims.broadcast_in_dim(a, spread, dims), tuple(m * n for m, n in zip(times, have, strict=True))
    )


@repeat.typed_by
def _(a, repeats):
    have, times = _repeated(a, repeats)
    return like(a, tuple([m * n for m, n in zip(times, have, strict=True)]))


@composite(torch.tile, torch.Tensor.tile, canonicalize=packed, tags=MOVES)
def tile(a, dims):
    return repeat(a, (1,) * (len(a.shape) - len(dims)) + tuple(dims))


# ----------------------------------------------------------------------------------------------------------------
# reversing and turning


@composite(torch.flip, torch.Tensor.flip, canonicalize=packed, tags=MOVES)
def flip(a, dims):
    return prims.flip(a, wrap_dims(dims, len(a.shape)))


@flip.typed_by
def _(a, dims):
    wrap_dims(dims, len(a.shape))
    return like(a)


@composite(torch.fliplr, torch.Tensor.fliplr, tags=MOVES)
def fliplr(a):
    require(len(a.shape) >= 2)
    return flip(a, (1,))


@composite(torch.flipud, torch.Tensor.flipud, tags=MOVES)
def flipud(a):
    require(a.shape)
    return flip(a, (0,))


@composite(torch.roll, torch.Tensor.roll, tags=MOVES)
def roll(a, shifts, dims=()):
    """The decomposition of `roll`: two slices along each dimension, joined in the other order."""
    shifts = tuple(shifts) if isinstance(shifts, (tuple, list)) else (shifts,)
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    if not dims and len(shifts) == 1:
        return reshape(roll(reshape(a, (-1,)), shifts, (0,)), a.shape)
    require(len(shifts) == len(dims) and shifts)
    for shift, d in zip(shifts, dims, strict=True):
        d = wrap_dim(d, len(a.shape))
        n = a.shape[d]
        if n == 0:
            return prims.flip(a, ())
        at = (n - shift) % n
        a = prims.cat([slice_dim(a, d, at, n), slice_dim(a, d, 0, at)], d)
    return a


@composite(torch.rot90, torch.Tensor.rot90, tags=MOVES)
def rot90(a, k=1, dims=(0, 1)):
    d0, d1 = wrap_dims(dims, len(a.shape))
    turns = {
        1: lambda: transpose(flip(a, (d1,)), d0, d1),
        2: lambda: flip(a, (d0, d1)),
        3: lambda: transpose(flip(a, (d0,)), d0, d1),
    }
    return turns.get(k % 4, lambda: ltorch.clone(a))()


# ---------------------------------------------------------------------------------------------------------------- other
# views


def atleast(rank: int, shape_of):
    """The tensor, or each of several, with at least `rank` dimensions; `shape_of` gives the new shape."""

    def apply(*tensors):
        if len(tensors) == 1:
            x = tensors[0]
            return (
                tuple(map(apply, x))
                if isinstance(x, (tuple, list))
                else x
                if len(x.shape) >= rank
                else reshape(x, shape_of(x.shape))
            )
        return tuple(map(apply, tensors))

    return apply


alias(torch.atleast_1d)(atleast(1, lambda s: (1,)))
alias(torch.atleast_2d)(atleast(2, lambda s: (1, s[0]) if s else (1, 1)))
alias(torch.atleast_3d)(atleast(3, lambda s: (*s, 1) if len(s) == 2 else (1, s[0], 1) if s else (1, 1, 1)))


@torch_prim(torch.view_as_real, tags=VIEW)
def view_as_real(a):
    require(a.dtype.category == 3)
    return like(a, (*a.shape, 2), real_of(a.dtype))


@torch_prim(torch.view_as_complex, tags=VIEW, autocast="cpu:float32")
def view_as_complex(a):
    require(a.shape and a.shape[-1] == 2)
    return like(a, a.shape[:-1], complex_of(a.dtype))


gradient_of_first(view_as_real, lambda g, y, a: view_as_complex(ltorch.contiguous(g)))


gradient_of_first(view_as_complex, lambda g, y, a: view_as_real(ltorch.resolve_conj(ltorch.contiguous(g))))


@torch_prim(torch.as_strided, torch.Tensor.as_strided, tags=VIEW)
def as_strided(a, size, stride, storage_offset=None):
    require(len(size) == len(stride))
    return like(a, tuple(size))


@torch_prim(torch.Tensor.unfold, tags=VIEW)
def unfold(a, dimension, size, step):
    d = wrap_dim(dimension, len(a.shape))
    n = a.shape[d] if a.shape else 1
    require(size <= n and step > 0)
    return like(a, (*a.shape[:d], (n - size) // step + 1, *a.shape[d + 1 :], size) if a.shape else (size,))


def _diagonal_length(rows, columns, offset):
    return max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))


@torch_prim(torch.diagonal, torch.Tensor.diagonal, tags=VIEW)
def diagonal(a, offset=0, dim1=0, dim2=1):
    d1, d2 = wrap_dims((dim1, dim2), len(a.shape))
    rest = tuple(n for i, n in enumerate(a.shape) if i not in (d1, d2))
    return like(a, (*rest, _diagonal_length(a.shape[d1], a.shape[d2], offset)))


@alias(torch.linalg.diagonal)
def linalg_diagonal(A, *, offset=0, dim1=-2, dim2=-1):
    return diagonal(A, offset, dim1, dim2)


@torch_prim(torch.diag_embed, torch.Tensor.diag_embed)
def diag_embed(a, offset=0, dim1=-2, dim2=-1):
    rank = len(a.shape) + 1
    d1, d2 = wrap_dims((dim1, dim2), rank)
    n = a.shape[-1] + abs(offset)
    rest = iter(a.shape[:-1])
    return like(a, tuple(n if i in (d1, d2) else next(rest) for i in range(rank)))


@torch_prim(torch.diag, torch.Tensor.diag)
def diag(a, diagonal=0):
    require(len(a.shape) in (1, 2))
    if len(a.shape) == 1:
        return like(a, (a.shape[0] + abs(diagonal),) * 2)
    return like(a, (_diagonal_length(*a.shape, diagonal),))


@composite(torch.diagflat, torch.Tensor.diagflat)
def diagflat(a, offset=0):
    return diag(ltorch.reshape(a, (-1,)), offset)


# ----------------------------------------------------------------------------------------------------------------
# derivatives: the way back


@repeat.vjp
def _(a, repeats):
    g = yield repeat(a, repeats)
    if any(type(n) is int and n == 0 for n in repeats):
        return (ltorch.zeros(a.shape, device=g.device, dtype=g.dtype),)
    for _ in range(len(repeats) - len(a.shape)):  # one after the other, as PyTorch adds them up
        g, repeats = ltorch.sum(g, 0), repeats[1:]
    shape = [m for k, n in zip(repeats, a.shape, strict=True) for m in ((n,) if type(k) is int and k == 1 else (k, n))]
    summed, at = [], 0
    for k in repeats:
        if type(k) is int and k == 1:
            at += 1
        else:
            summed.append(at)
            at += 2
    return (ltorch.sum(reshape(g, tuple(shape)), tuple(summed)) if summed else g,)


gradient_of_first(flip, lambda g, y, a, dims: flip(g, dims))


gradient_of_first(
    roll,
    lambda g, y, a, shifts, dims=(): roll(
        g, tuple(-n for n in shifts) if isinstance(shifts, (tuple, list)) else -shifts, dims
    ),
)


gradient_of_first(rot90, lambda g, y, a, k=1, dims=(0, 1): rot90(g, -k, dims))


gradient_of_first(diag_embed, lambda g, y, a, offset=0, dim1=-2, dim2=-1: diagonal(g, offset, dim1, dim2))


gradient_of_first(
    diag,
    lambda g, y, a, diagonal_=0: (
        diagonal(g, diagonal_, 0, 1) if len(a.shape) == 1 else backward.diagonal_backward(g, a.shape, diagonal_, 0, 1)
    ),
)


# PyTorch composes these of the same operations
derivatives.composed.set(True, tile)
kernels.layout.set("row-major", roll)
kernels.layout.set("preserved", flip, prims.flip)
kernels.no_loop_of_inductor.add(ltorch.as_strided)  # it depends on how its operand lies in memory
aliases.may_copy.add(ltorch.as_strided)


batching.rule.set(batching.along, flip)


gradient_of_first(
    diagonal, lambda g, y, a, offset=0, dim1=0, dim2=1: backward.diagonal_backward(g, a.shape, offset, dim1, dim2)
)
gradient_of_first(
    unfold, lambda g, y, a, dimension, size, step: backward.unfold_backward(g, a.shape, dimension, size, step)
)
