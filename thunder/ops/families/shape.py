"""Views and rearrangements of one tensor."""

from __future__ import annotations

import math

import torch

from thunder.analysis import aliases
from thunder.core.dtypes import dtype, to_dtype
from thunder.core.proxies import METHODS, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.ops import ltorch, prims
from thunder.ops.backward import gradient_of_first, sum_to
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, prim
from thunder.ops.rules import batching, splitting
from thunder.ops.shape_rules import numel, require, sizes_with_minus_one, wrap_dim, wrap_dims
from thunder.ops.signature import packed
from thunder.ops.torch_types import to_torch_dtype

VIEW = (OpTags.SHAPE_OP, OpTags.VIEW)
MOVES = (OpTags.SHAPE_OP,)


def property_alias(*names: str):
    """The decorated function says what reading an attribute of a tensor (`x.mT`) means."""

    def define(function):
        for name in names:
            METHODS.properties[name] = function
            alias(getattr(torch.Tensor, name).__get__)(function)
        return function

    return define


# ---------------------------------------------------------------------------------------------------------------- sizes


@composite(torch.reshape, torch.Tensor.reshape, canonicalize=packed, tags=VIEW)
def reshape(a, shape):
    full = sizes_with_minus_one(shape, numel(a.shape), "input")
    return prims.reshape(a, full)


@reshape.typed_by
def _(a, shape):
    return like(a, sizes_with_minus_one(shape, math.prod(a.shape), "input"))


@prim(lambda a, dtype: a.view(to_torch_dtype(dtype)), tags=VIEW)
def bitcast(a, dtype):
    """The same bytes as elements of another type; the last dimension shrinks or grows with the element's size."""
    if not a.shape or a.dtype.bytes == dtype.bytes:
        return like(a, dtype=dtype)
    require(a.shape[-1] * a.dtype.bytes % dtype.bytes == 0)
    return like(a, (*a.shape[:-1], a.shape[-1] * a.dtype.bytes // dtype.bytes), dtype)


def _view_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    wanted = kwargs.get("dtype", args[1] if len(args) == 2 else None)
    if isinstance(wanted, (torch.dtype, dtype)):
        return (args[0], to_dtype(wanted)), {}
    return packed(args, kwargs)


def _is_dtype(x) -> bool:
    return isinstance(x, dtype)


@composite(torch.Tensor.view, canonicalize=_view_arguments, tags=VIEW, fn=torch.Tensor.view)
def view(a, size):
    return (
        bitcast(a, size) if _is_dtype(size) else prims.reshape(a, sizes_with_minus_one(size, numel(a.shape), "input"))
    )


# the same memory read as another type is not differentiated
view.detaches = lambda a, size: _is_dtype(size)


@view.typed_by
def _(a, size):
    return (
        bitcast.meta(a, size) if _is_dtype(size) else like(a, sizes_with_minus_one(size, math.prod(a.shape), "input"))
    )


@alias(torch.Tensor.view_as)
def view_as(a, other):
    return view(a, other.shape)


@alias(torch.Tensor.reshape_as)
def reshape_as(a, other):
    return reshape(a, other.shape)


def _flat_shape(a, start_dim, end_dim) -> tuple:
    rank = len(a.shape)
    start, end = wrap_dim(start_dim, rank), wrap_dim(end_dim, rank)
    require(start <= end)
    if rank == 0:
        return (1,)
    return a.shape if start == end else (*a.shape[:start], math.prod(a.shape[start : end + 1]), *a.shape[end + 1 :])


@composite(torch.flatten, torch.Tensor.flatten, tags=VIEW)
def flatten(a, start_dim=0, end_dim=-1):
    shape = _flat_shape(a, start_dim, end_dim)
    return a if same_shape(shape, a.shape) else prims.reshape(a, shape)


@flatten.typed_by
def _(a, start_dim=0, end_dim=-1):
    shape = _flat_shape(a, start_dim, end_dim)
    return a if shape is a.shape else like(a, shape)


@alias(torch.ravel, torch.Tensor.ravel)
def ravel(a):
    return flatten(ltorch.contiguous(a))


def _unflat_shape(a, dim, sizes) -> tuple:
    d = wrap_dim(dim, len(a.shape))
    require(len(sizes))
    return (*a.shape[:d], *sizes_with_minus_one(tuple(sizes), a.shape[d], "unflatten: dimension"), *a.shape[d + 1 :])


@composite(torch.unflatten, torch.Tensor.unflatten, tags=VIEW)
def unflatten(a, dim, sizes):
    return prims.reshape(a, _unflat_shape(a, dim, sizes))


@unflatten.typed_by
def _(a, dim, sizes):
    return like(a, _unflat_shape(a, dim, sizes))


# ---------------------------------------------------------------------------------------------------------------- order
# of dimensions


def _permuted(a, dims) -> tuple[int, ...]:
    rank = len(a.shape)
    require(len(dims) == rank)
    out = tuple([d if type(d) is int and 0 <= d < rank else wrap_dim(d, rank) for d in dims])
    require(len(set(out)) == rank)
    return out


@composite(torch.permute, torch.Tensor.permute, canonicalize=packed, tags=VIEW)
def permute(a, dims):
    return prims.transpose(a, _permuted(a, dims))


@permute.typed_by
def _(a, dims):
    shape = a.shape
    return like(a, tuple([shape[d] for d in _permuted(a, dims)]))


def _swapped(rank: int, dim0, dim1) -> list[int]:
    d0, d1 = wrap_dim(dim0, rank), wrap_dim(dim1, rank)
    order = list(range(rank))
    if rank:
        order[d0], order[d1] = d1, d0
    return order


@composite(torch.transpose, torch.Tensor.transpose, tags=VIEW)
def transpose(a, dim0, dim1):
    return prims.transpose(a, tuple(_swapped(len(a.shape), dim0, dim1)))


@transpose.typed_by
def _(a, dim0, dim1):
    shape = a.shape
    rank = len(shape)
    d0, d1 = wrap_dim(dim0, rank), wrap_dim(dim1, rank)
    swapped = list(shape)
    if rank:
        swapped[d0], swapped[d1] = shape[d1], shape[d0]
    return like(a, tuple(swapped))


@alias(torch.swapdims, torch.Tensor.swapdims)
def swapdims(a, dim0, dim1):
    return transpose(a, dim0, dim1)


@alias(torch.swapaxes, torch.Tensor.swapaxes)
def swapaxes(a, axis0, axis1):
    return transpose(a, axis0, axis1)


@composite(torch.t, torch.Tensor.t, tags=VIEW)
def t(a):
    require(len(a.shape) <= 2)
    return prims.transpose(a, (1, 0)) if len(a.shape) == 2 else prims.transpose(a, tuple(range(len(a.shape))))


@t.typed_by
def _(a):
    require(len(a.shape) <= 2)
    return like(a, a.shape[::-1])


@property_alias("T")
def reverse_dims(a):
    return permute(a, tuple(reversed(range(len(a.shape)))))


@property_alias("mT")
def matrix_transpose(a):
    if len(a.shape) < 2:
        raise RuntimeError(
            "tensor.mT is only supported on matrices or batches of matrices. Got " + f"{len(a.shape)}-D tensor."
        )
    return transpose(a, -2, -1)


@property_alias("mH")
@alias(torch.adjoint, torch.Tensor.adjoint)
def adjoint(a):
    out = matrix_transpose(a)
    return ltorch.conj(out) if a.dtype.category == 3 else out


@property_alias("H")
def hermitian(a):
    if len(a.shape) not in (0, 2):
        raise RuntimeError(f"tensor.H is only supported on matrices (2-D tensors). Got {len(a.shape)}-D tensor.")
    return adjoint(a) if a.shape else a


def _moved(a, source, destination) -> tuple[int, ...]:
    rank = len(a.shape)
    sources, targets = wrap_dims(source, rank), wrap_dims(destination, rank)
    require(len(sources) == len(targets))
    rest = iter(d for d in range(rank) if d not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return tuple(placed[d] if d in placed else next(rest) for d in range(rank))


@composite(torch.movedim, torch.Tensor.movedim, torch.moveaxis, torch.Tensor.moveaxis, tags=VIEW)
def movedim(a, source, destination):
    return prims.transpose(a, _moved(a, source, destination))


@movedim.typed_by
def _(a, source, destination):
    return like(a, tuple(a.shape[d] for d in _moved(a, source, destination)))


def slice_dim(a, dim: int, start, stop):
    """Elements start <= i < stop of one dimension, in prims."""
    rank = len(a.shape)
    starts, stops = [0] * rank, list(a.shape)
    starts[dim], stops[dim] = start, stop
    return prims.slice_prim(a, tuple(starts), tuple(stops), (1,) * rank)


# ----------------------------------------------------------------------------------------------------------------
# dimensions of size 1


@composite(torch.unsqueeze, torch.Tensor.unsqueeze, tags=VIEW)
def unsqueeze(a, dim):
    d = wrap_dim(dim, len(a.shape) + 1)
    shape = [*a.shape[:d], 1, *a.shape[d:]]
    return prims.broadcast_in_dim(a, shape, [i for i in range(len(shape)) if i != d])


@unsqueeze.typed_by
def _(a, dim):
    d = wrap_dim(dim, len(a.shape) + 1)
    return like(a, (*a.shape[:d], 1, *a.shape[d:]))


def _squeezed(a, dim) -> tuple[int, ...]:
    shape = a.shape
    dims = range(len(shape)) if dim is None else wrap_dims(dim, len(shape))
    return tuple([d for d in dims if d < len(shape) and shape[d] == 1])


@composite(torch.squeeze, torch.Tensor.squeeze, tags=VIEW)
def squeeze(a, dim=None):
    return prims.squeeze(a, _squeezed(a, dim))


@squeeze.typed_by
def _(a, dim=None):
    gone = _squeezed(a, dim)
    return like(a, tuple([n for i, n in enumerate(a.shape) if i not in gone]))


# ----------------------------------------------------------------------------------------------------------------
# stretching and repeating


def _expanded(a, size) -> tuple:
    """The sizes of `expand`, with -1 replaced. Raises PyTorch's error where a dimension does not fit."""
    have = a.shape
    new = len(size) - len(have)
    require(new >= 0)
    out = list(size)
    for i, n in enumerate(have):
        m = out[new + i]
        if m is n:
            continue
        if type(m) is int and m == -1:
            out[new + i] = n
        elif n != 1 and n != m:
            raise RuntimeError(
                f"The expanded size of the tensor ({m}) must match the existing size ({n}) at non-singleton "
                f"dimension {new + i}."
            )
    require(not any(type(m) is int and m < 0 for m in out))
    return tuple(out)


@composite(torch.Tensor.expand, torch.broadcast_to, torch.Tensor.broadcast_to, canonicalize=packed, tags=VIEW)
def expand(a, size):
    shape = _expanded(a, size)
    return prims.broadcast_in_dim(a, shape, tuple(range(len(shape) - len(a.shape), len(shape))))


@expand.typed_by
def _(a, size):
    return like(a, _expanded(a, size))


@alias(torch.Tensor.expand_as)
def expand_as(a, other):
    return expand(a, other.shape)


@alias(torch.broadcast_tensors, torch.functional.broadcast_tensors)
def broadcast_tensors(*tensors):
    tensors = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    shape = broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x if same_shape(x.shape, shape) else expand(x, shape) for x in tensors)


# --- derivatives: the way back


def _reshaped_back(symbol):
    def rule(a, *args, **kwargs):
        g = yield symbol(a, *args, **kwargs)
        return (g if same_shape(g.shape, a.shape) else reshape(g, a.shape),)

    symbol.vjp(rule)


for _symbol in (reshape, flatten, unflatten, unsqueeze, squeeze):
    _reshaped_back(_symbol)


gradient_of_first(
    view, lambda g, y, a, size: reshape(g, a.shape) if isinstance(size, (tuple, list)) else view(g, a.dtype)
)


@permute.vjp
def _(a, dims):
    g = yield permute(a, dims)
    order = [d % len(a.shape) for d in dims]
    return (permute(g, tuple(order.index(i) for i in range(len(order)))),)


gradient_of_first(transpose, lambda g, y, a, dim0, dim1: transpose(g, dim0, dim1))


gradient_of_first(t, lambda g, y, a: t(g))


gradient_of_first(movedim, lambda g, y, a, source, destination: movedim(g, destination, source))


gradient_of_first(expand, lambda g, y, a, size: sum_to(g, a.shape))


for _symbol in (reshape, view, flatten, unflatten, unsqueeze, squeeze):
    _symbol.reshapes = True
aliases.may_copy.add(ltorch.reshape, ltorch.flatten, prims.reshape)


# ----------------------------------------------------------------------------------------------------------------
# of batches


@batching.rule(transpose, movedim)
def _two_dims_of_batch(batch: batching.Batch, operation: BoundSymbol):
    a, first, second = operation.args
    rank = len(a.shape)
    return operation.sym(batch.at(a), batching.shifted(first, rank), batching.shifted(second, rank)) if rank else None


@batching.rule(permute)
def _permute_of_batch(batch: batching.Batch, operation: BoundSymbol):
    a, dims = operation.args
    return permute(batch.at(a), (0, *batching.shifted(dims, len(a.shape)))) if a.shape else None


@batching.rule(ltorch.reshape, ltorch.view, ltorch.flatten, ltorch.unflatten, ltorch.squeeze, ltorch.unsqueeze)
def _reshaped_of_batch(batch: batching.Batch, operation: BoundSymbol):
    a = operation.args[0]
    # a view as another dtype
    return (
        ltorch.reshape(batch.at(a), (batch.size, *operation.output.shape))
        if a.dtype is operation.output.dtype
        else None
    )


@batching.rule(t)
def _t_of_batch(batch: batching.Batch, operation: BoundSymbol):
    return (
        ltorch.transpose(batch.at(operation.args[0]), 1, 2)
        if len(operation.args[0].shape) == 2
        else batch.at(operation.args[0])
    )


@batching.rule(expand)
def _expanded_of_batch(batch: batching.Batch, operation: BoundSymbol):
    return ltorch.expand(
        batching.aligned(batch, operation.args[0], len(operation.output.shape)), (batch.size, *operation.output.shape)
    )


# ----------------------------------------------------------------------------------------------------------------
# of one rank's parts


@splitting.rule(ltorch.reshape, ltorch.view, ltorch.flatten, ltorch.unflatten, prims.reshape)
def _reshaped_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """The dimension becomes another one with the same elements before it, which the ranks divide as well. Where ranks
    share positions, it may also become one that several sequences follow each other in."""
    part = split.part(operation.inputs[0])
    if part is None or len(operation.inputs) != 1 or operation.output.dtype is not operation.inputs[0].dtype:
        return None
    shape, n = tuple(operation.output.shape), part.axis.size
    sequences = math.prod(operation.inputs[0].shape[: part.dim]) * part.axis.groups
    for dim, size in enumerate(shape):
        before = math.prod(shape[:dim])
        groups = sequences // before if before and not sequences % before else 0
        if not groups or size % groups or size == groups or groups > 1 and not split.shares_positions:
            continue
        axis = part.axis.in_groups(groups)
        if size % axis.pieces:
            return None
        return splitting.Part(ltorch.reshape(part.value, (*shape[:dim], size // n, *shape[dim + 1 :])), axis, dim)
    return None


@splitting.rule(transpose, prims.transpose, permute, t)
def _transposed_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """A permutation of a value that is split over ranks: the dimension of the split moves with it."""
    part = split.part(operation.inputs[0])
    rank = len(operation.output.shape)
    if part is None or rank < 2:
        return None
    if operation.sym.name == "permute":
        order = [d % rank for d in operation.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, 1) if operation.sym.name == "t" else (d % rank for d in operation.args[1:3])
        order[a % rank], order[b % rank] = b % rank, a % rank
    return split.computed(operation, {operation.inputs[0]: part.value}, part.axis, order.index(part.dim))


@splitting.rule(unsqueeze)
def _unsqueezed_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    part, dim = (
        split.part(operation.inputs[0]),
        (operation.args[1] if len(operation.args) > 1 else operation.kwargs["dim"]) % len(operation.output.shape),
    )
    return (
        None
        if part is None
        else split.computed(operation, {operation.inputs[0]: part.value}, part.axis, part.dim + (dim <= part.dim))
    )


@splitting.rule(expand)
def _expanded_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    part, shape = split.part(operation.inputs[0]), tuple(operation.output.shape)
    if part is None or len(operation.inputs) != 1:
        return None
    dim = part.dim + len(shape) - len(operation.inputs[0].shape)
    return splitting.Part(
        ltorch.expand(part.value, (*shape[:dim], shape[dim] // part.axis.size, *shape[dim + 1 :])),
        part.axis,
        dim,
    )
