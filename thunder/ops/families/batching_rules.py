"""Batching rules: how operations compute for each element of a batch, whose dimension comes first (`vmap`).

A rule returns None where it does not know the arguments; then, and where there is no rule, torch.vmap carries the
operation out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from thunder.core.dtypes import bool8, is_integer
from thunder.core.proxies import TensorProxy, map_structure, proxies_in, same_shape
from thunder.core.symbol import BoundSymbol
from thunder.ops.families.attention import flash_attention, flash_attention_backward
from thunder.ops.registry import LTORCH
from thunder.ops.rules import batching


class Batch(Protocol):
    """size: of the batch. moved: values of the program for which there are values with the batch in front."""

    size: Any
    moved: dict

    def at(self, x) -> Any:
        """The batched value of `x`, or `x` itself, which is the same for all elements."""


def _rule(*names: str):
    def define(function: Callable) -> Callable:
        for name in names:
            batching.rule.set(function, LTORCH[name])
        return function

    return define


def _mapped_only_first(batch: Batch, operation: BoundSymbol) -> bool:
    return (
        isinstance(operation.args[0], TensorProxy)
        and operation.args[0] in batch.moved
        and not any(p in batch.moved for p in proxies_in(operation.args[1:], []))
    )


def _aligned(batch: Batch, x, rank: int):
    """A mapped value with ones after the batch, so that the rest of its shape is of this rank."""
    found = batch.at(x)
    if x in batch.moved and len(x.shape) < rank:
        return LTORCH["reshape"](found, (batch.size, *(1,) * (rank - len(x.shape)), *x.shape))
    return found


def elementwise(batch: Batch, operation: BoundSymbol):
    tensors = [x for x in operation.args if type(x) is TensorProxy]
    typed = [x for x in tensors if not (operation.sym is LTORCH["where"] and x is operation.args[0])]
    # a tensor of rank 0 counts less in PyTorch's rules of types; mapped, it has another rank
    if len({x.dtype for x in typed}) > 1:
        return None
    rank = max(len(x.shape) for x in tensors)
    return operation.sym(
        *(_aligned(batch, x, rank) if type(x) is TensorProxy else x for x in operation.args), **operation.kwargs
    )


_rule("where", "round", "clone", "detach", "contiguous", "addcmul", "addcdiv", "lerp", "clamp")(elementwise)


@_rule("zeros_like", "ones_like", "full_like", "to", "masked_fill", "nan_to_num")
def _same(batch: Batch, operation: BoundSymbol):
    """The same call."""
    return (
        operation.sym(batch.at(operation.args[0]), *operation.args[1:], **operation.kwargs)
        if _mapped_only_first(batch, operation)
        else None
    )


def _shifted(dim, rank: int):
    """A dim, or several, of an element as dims of the batch."""
    return tuple(d % rank + 1 for d in dim) if isinstance(dim, (tuple, list)) else dim % rank + 1


@_rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "logsumexp",
    "var",
    "std",
    "var_mean",
    "all",
    "any",
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "flip",
    "permute",
)
def _along(batch: Batch, operation: BoundSymbol):
    a, rank = operation.args[0], len(operation.args[0].shape)
    dim = operation.args[1] if len(operation.args) > 1 else None
    if (
        not rank
        or not _mapped_only_first(batch, operation)
        or (dim is None and operation.sym in (LTORCH["softmax"], LTORCH["log_softmax"]))
    ):
        return None
    if dim is None or dim == ():
        dim = tuple(range(rank))
    dim = _shifted(dim, rank)
    if operation.sym is LTORCH["permute"]:
        dim = (0, *dim)
    return operation.sym(batch.at(a), dim, *operation.args[2:], **operation.kwargs)


@_rule("transpose", "movedim")
def _two_dims(batch: Batch, operation: BoundSymbol):
    a, first, second = operation.args
    rank = len(a.shape)
    return operation.sym(batch.at(a), _shifted(first, rank), _shifted(second, rank)) if rank else None


@_rule("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshaped(batch: Batch, operation: BoundSymbol):
    a = operation.args[0]
    # a view as another dtype
    return (
        LTORCH["reshape"](batch.at(a), (batch.size, *operation.output.shape))
        if a.dtype is operation.output.dtype
        else None
    )


@_rule("t")
def _t(batch: Batch, operation: BoundSymbol):
    return (
        LTORCH["transpose"](batch.at(operation.args[0]), 1, 2)
        if len(operation.args[0].shape) == 2
        else batch.at(operation.args[0])
    )


@_rule("expand")
def _expanded(batch: Batch, operation: BoundSymbol):
    return LTORCH["expand"](
        _aligned(batch, operation.args[0], len(operation.output.shape)), (batch.size, *operation.output.shape)
    )


@_rule("getitem")
def _getitem(batch: Batch, operation: BoundSymbol):
    a, key = operation.args
    keys = key if isinstance(key, tuple) else (key,)
    if keys and all(type(k) is TensorProxy and is_integer(k.dtype) and k.dtype.signed for k in keys):
        rank = max(len(k.shape) for k in keys)
        at = tuple(_aligned(batch, k, rank) for k in keys)
        if a in batch.moved:  # each element reads its own
            own = LTORCH["arange"](batch.size, device=a.device)
            at = (LTORCH["reshape"](own, (batch.size, *(1,) * rank)), *at)
        return operation.sym(batch.at(a), at)
    if any(type(k) not in (int, slice, type(None), type(...)) for k in keys):
        return None
    return operation.sym(batch.at(a), (slice(None), *keys))


@_rule("cat", "stack")
def _joined(batch: Batch, operation: BoundSymbol):
    tensors, dim = operation.args[0], operation.args[1] if len(operation.args) > 1 else 0
    if any(not isinstance(x, TensorProxy) or x.shape == (0,) for x in tensors):
        return None
    whole = [batch.at(x) if x in batch.moved else LTORCH["expand"](x, (batch.size, *x.shape)) for x in tensors]
    return operation.sym(whole, _shifted(dim, len(operation.output.shape)))


@_rule("matmul")
def _matmul(batch: Batch, operation: BoundSymbol):
    a, b = operation.args
    rank = max(len(a.shape), len(b.shape), 2)
    left = _matrix(batch, a, rank, -2)
    right = _matrix(batch, b, rank, -1)
    return LTORCH["reshape"](LTORCH["matmul"](left, right), (batch.size, *operation.output.shape))


def _matrix(batch: Batch, x: TensorProxy, rank: int, new: int):
    """An operand of a matrix product as a stack of matrices of this rank; a vector gets a dimension of one."""
    shape = x.shape if len(x.shape) > 1 else (1, *x.shape) if new == -2 else (*x.shape, 1)
    shape = (*(1,) * (rank - len(shape)), *shape)
    found = batch.at(x)
    shape = (batch.size, *shape) if x in batch.moved else shape
    return found if same_shape(found.shape, shape) else LTORCH["reshape"](found, shape)


@_rule("linear")
def _linear(batch: Batch, operation: BoundSymbol):
    a, weight, bias = (*operation.args, None)[:3]
    if _mapped_only_first(batch, operation):
        return operation.sym(batch.at(a), weight, bias)
    if len(weight.shape) != 2:
        return None
    rank = max(len(a.shape), 2)
    product = LTORCH["matmul"](
        _matrix(batch, a, rank, -2), LTORCH["transpose"](_matrix(batch, weight, rank, -2), -2, -1)
    )
    out = LTORCH["reshape"](product, (batch.size, *operation.output.shape))
    return out if bias is None else LTORCH["add"](out, _aligned(batch, bias, len(operation.output.shape)))


@_rule("layer_norm")
def _layer_norm(batch: Batch, operation: BoundSymbol):
    return _same(batch, operation)


@_rule("embedding")
def _embedding(batch: Batch, operation: BoundSymbol):
    a, weight, *rest = operation.args
    return (
        operation.sym(batch.at(a), weight, *rest, **operation.kwargs) if _mapped_only_first(batch, operation) else None
    )


@_rule("scaled_dot_product_attention")
def _attention(batch: Batch, operation: BoundSymbol):
    """The kernels have one batch dimension: the batch is put in front of it. An attention mask would have to be
    stretched."""
    tensors = [x for x in operation.args if isinstance(x, TensorProxy)]
    whole = tensors[0].shape[0]
    mask = (
        operation.args[6]
        if operation.sym is flash_attention_backward
        else operation.args[3]
        if len(operation.args) > 3
        else None
    )
    if mask is not None or len(tensors[0].shape) < 3 or any(x.shape[0] != whole for x in tensors):
        return None

    def merged(x):
        if not isinstance(x, TensorProxy):
            return x
        found = batch.at(x) if x in batch.moved else LTORCH["expand"](x, (batch.size, *x.shape))
        return LTORCH["reshape"](found, (batch.size * whole, *x.shape[1:]))

    results = operation.sym(*map(merged, operation.args), **operation.kwargs)
    return map_structure(lambda r: LTORCH["reshape"](r, (batch.size, whole, *r.shape[1:])), results)


batching.rule.set(_attention, flash_attention, flash_attention_backward)


# ----------------------------------------------------------------------------------------------------------------
# what torch.vmap refuses, or computes otherwise: the decomposition is mapped


def _sets_by_mask(operation: BoundSymbol) -> bool:
    return any(x.dtype is bool8 for x in proxies_in(operation.args[1], []) if isinstance(x, TensorProxy))


def _selects_one(operation: BoundSymbol) -> bool:
    return any(isinstance(x, TensorProxy) and not x.shape for x in operation.args[1:])


batching.unknown_to_vmap.add(LTORCH["setitem"], when=_sets_by_mask)
batching.unknown_to_vmap.add(LTORCH["index_select"], when=_selects_one)
batching.unknown_to_vmap.add(LTORCH["column_stack"])
