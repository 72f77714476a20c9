"""Rows of a table that indices name, one by one or summed up by bags."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.definition import InPlaceForm
from thunder.core.dtypes import bfloat16, float32
from thunder.core.proxies import like
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.ops import backward, infer, ltorch, prims
from thunder.ops.backward import kernel
from thunder.ops.families.scatter import INTEGERS, take
from thunder.ops.families.shape import expand, reshape
from thunder.ops.functionalize.histories import grad_enabled
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import batching, kernels, operands, splitting
from thunder.ops.shape_rules import require


def _plain_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Options that say nothing are left out."""
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = dict(zip(names, args[2:], strict=False)) | kwargs
    return args[:2], {
        k: v for k, v in options.items() if k != "max_norm" and k != "norm_type" and v is not None and v is not False
    }


def _embedding_meta(a, weight, *, padding_idx=None, scale_grad_by_freq=False, sparse=False):
    if a.dtype.name not in INTEGERS:
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but "
            f"got {a.dtype} instead"
        )
    require(len(weight.shape) == 2)
    require(padding_idx is None or -weight.shape[0] <= padding_idx < weight.shape[0])
    return like(weight, (*a.shape, weight.shape[1]))


@torch_prim(fn=F.embedding)
def sparse_embedding(a, weight, *, padding_idx=None, scale_grad_by_freq=False, sparse=True):
    """What no kernel of others computes, since a derivative of theirs is dense."""
    return _embedding_meta(a, weight, padding_idx=padding_idx)


@composite(F.embedding, meta=_embedding_meta, canonicalize=_plain_arguments)
def embedding(a, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if sparse:
        return sparse_embedding(a, weight, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=True)
    rows = take(weight, 0, prims.reshape(a, (a.numel_value,)))
    return prims.reshape(rows, (*a.shape, weight.shape[1]))


@embedding.vjp
def _(a, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if sparse:  # PyTorch's derivative makes the sparse gradient
        return NotImplemented
    g = yield embedding(a, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return None, backward.embedding_backward(g, a, weight.shape[0], padding, scale_grad_by_freq)


@splitting.rule(embedding)
def _embedding_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Positions are looked up apart."""
    ids, weight = operation.args[:2]
    part = split.part(ids)
    if not split.shares_positions or part is None or splitting.argument(operation, "sparse"):
        return None
    table = {ids: part.value, weight: split.gathered_over(weight, part.axis)}
    return split.computed(operation, table, part.axis, part.dim)


@torch_prim(
    fn=lambda weight, indices, max_norm, norm_type: torch.embedding_renorm_(
        weight.clone(), indices, max_norm, norm_type
    ),
    tags=(OpTags.DETACHED,),
)
def embedding_renorm(weight, indices, max_norm, norm_type):
    """The table with the rows that are named, and longer than max_norm, scaled down to it."""
    if indices.dtype.name not in INTEGERS:
        raise RuntimeError(
            "Expected tensor for argument #2 'indices' to have one of the following scalar types: Long, Int; but "
            f"got {indices.dtype} instead"
        )
    return like(weight)


embedding_renorm.in_place = InPlaceForm(torch.embedding_renorm_, {0: 0})


def _renormalize(weight, indices, max_norm, norm_type) -> None:
    """As PyTorch does: without grad."""
    with torch.no_grad(), grad_enabled(False):
        overwrite(weight, embedding_renorm(weight, indices, max_norm, norm_type))


@alias(F.embedding, over=embedding)
def _embedding(a, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    """With a greatest norm the rows that are read are written to before."""
    if max_norm is not None:
        _renormalize(weight, a, max_norm, norm_type)
    return embedding(a, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)


@alias(torch.embedding_renorm_)
def _embedding_renorm_alias(weight, indices, max_norm, norm_type):
    return overwrite(weight, embedding_renorm(weight, indices, max_norm, norm_type))


@alias(torch.embedding)
def _aten_embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return embedding(
        indices,
        weight,
        padding_idx=None if padding_idx == -1 else padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )


# ---------------------------------------------------------------------------------------------------------------- bags


@composite(F.embedding_bag)
def embedding_bag(
    a, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode="mean", sparse=False,
    per_sample_weights=None, include_last_offset=False,
    padding_idx=None,
):  # fmt: skip
    """Each row goes to the bag whose offset is the last one at or before its place."""
    require(mode in ("sum", "mean", "max") and a.dtype.name in INTEGERS and weight.dtype.category >= 2)
    require(len(weight.shape) == 2 and (mode != "max" or (not scale_grad_by_freq and not sparse)))
    require(per_sample_weights is None or (per_sample_weights.shape == a.shape and mode == "sum"))
    require(offsets is None if len(a.shape) == 2 else len(a.shape) == 1 and offsets is not None)
    count, width = a.numel_value, weight.shape[1]
    places = ltorch.arange(count, device=a.device)
    if len(a.shape) == 2:
        bags, bag = a.shape[0], ltorch.floor_divide(places, a.shape[1])
    else:
        offsets = offsets[:-1] if include_last_offset else offsets
        bags, bag = offsets.shape[0], ltorch.searchsorted(ltorch.to(offsets, dtype=torch.int64), places, right=True) - 1
    index = reshape(a, (count,))
    rows = take(weight, 0, index)
    is_counted = ltorch.ones_like(places) if padding_idx is None else ltorch.ne(index, padding_idx % weight.shape[0])
    is_counted = ltorch.to(is_counted, dtype=weight.dtype)
    if mode == "max":
        rows = ltorch.where(ltorch.unsqueeze(is_counted, 1) > 0, rows, float("-inf"))
        empty = ltorch.full((bags, width), float("-inf"), dtype=weight.dtype, device=a.device)
        extremes = ltorch.scatter_reduce(empty, 0, expand(ltorch.unsqueeze(bag, 1), (count, width)), rows, "amax")
        return ltorch.where(ltorch.eq(extremes, float("-inf")), 0.0, extremes)
    scale = is_counted if per_sample_weights is None else is_counted * reshape(per_sample_weights, (count,))
    total = ltorch.index_add(
        ltorch.zeros((bags, width), dtype=weight.dtype, device=a.device),
        0,
        bag,
        rows * ltorch.unsqueeze(scale, 1),
    )
    if mode == "sum":
        return total
    sizes = ltorch.index_add(ltorch.zeros((bags,), dtype=weight.dtype, device=a.device), 0, bag, is_counted)
    return total / ltorch.unsqueeze(ltorch.clamp(sizes, 1.0), 1)


@alias(F.embedding_bag, over=embedding_bag)
def _embedding_bag(a, weight, offsets=None, max_norm=None, norm_type=2, *options, **named):
    if max_norm is not None:
        _renormalize(weight, a, max_norm, norm_type)
    return embedding_bag(a, weight, offsets, None, norm_type, *options, **named)


def _bag_types(function: Callable) -> Callable:
    """The last three results are what PyTorch's kernel keeps for its backward. On the CPU their sizes are a matter of
    the way it takes, and they are typed by running."""
    run = infer.typed_by_running(function, "embedding_bag")

    def meta(weight, *args, **kwargs):
        if weight.device.type == "cuda":
            return _types_on_gpus(weight, *args, **kwargs)
        # PyTorch's own rule does not know that bfloat16 goes the way of float32
        wide = like(weight, dtype=float32) if weight.dtype is bfloat16 else weight
        out, *others = run(wide, *args, **kwargs)
        return like(out, dtype=weight.dtype), *others

    return meta


def _types_on_gpus(
    weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=None,
):  # fmt: skip
    """Fake tensors know them as well, but import Dynamo, which takes longer than all the rest of a program."""
    whole = ("int32", "int64")
    require(indices.dtype.name in whole and offsets.dtype.name in whole and weight.dtype.category >= 2)
    require(len(weight.shape) == 2 and len(indices.shape) == len(offsets.shape) == 1)
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    require(bags >= 0 and (per_sample_weights is None or mode == 0 and per_sample_weights.shape == indices.shape))
    largest = (bags, weight.shape[1]) if mode == 2 else (0,)
    out = like(weight, (bags, weight.shape[1]))
    return out, like(indices), like(indices, offsets.shape), like(indices, largest)


native_embedding_bag = torch_prim(torch.embedding_bag, name="native_embedding_bag")(_bag_types(torch.embedding_bag))
native_embedding_bag.nondifferentiable = (1, 2, 3)


cost.rules.set(Cost(selects=True), embedding)


def _embedding_backward_meta(g, indices, num_weights, padding_idx, scale_grad_by_freq, sparse):
    require(not sparse, "with sparse=True it gives a sparse tensor, of which thunder knows no type")
    return like(g, (num_weights, g.shape[-1]))


embedding_backward = kernel("embedding_backward", "default", _embedding_backward_meta, public="embedding_backward")


_bag_kernel = kernel("_embedding_bag", "default", lambda weight, *args: _run_bag(weight, *args))
_run_bag = _bag_types(_bag_kernel.fn)  # type: ignore[arg-type]
_bag_kernel.nondifferentiable = (1, 2, 3)
_bag_backward = kernel("_embedding_bag_backward", "default", lambda g, *args: like(g, (args[5], g.shape[1])))
operands.holds.set(operands.of_bags, _bag_backward)
operands.holds.set(operands.of_rows, embedding_backward, backward.embedding_backward)
operands.by_values.add(_bag_backward, embedding_backward, backward.embedding_backward)


@embedding_bag.vjp
def _(
    a, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode="mean", sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=None,
):  # fmt: skip
    if sparse or not weight.requires_grad or per_sample_weights is not None and per_sample_weights.requires_grad:
        return NotImplemented
    if len(a.shape) == 2:
        offsets = ltorch.arange(0, a.numel_value, a.shape[1], dtype=a.dtype, device=a.device)
        a = reshape(a, (a.numel_value,))
        per_sample_weights = None if per_sample_weights is None else reshape(per_sample_weights, a.shape)
    a, offsets = ltorch.contiguous(a), ltorch.contiguous(offsets)  # the kernel reads memory in order
    rows, kind = weight.shape[0], ("sum", "mean", "max").index(mode)
    left_out = -1 if padding_idx is None else padding_idx % rows
    out, *others = _bag_kernel(
        weight, a, offsets, scale_grad_by_freq, kind, sparse, per_sample_weights, include_last_offset, left_out
    )
    g = yield out
    gradient = _bag_backward(
        g, a, offsets, *others, rows, scale_grad_by_freq, kind, sparse, per_sample_weights, left_out
    )
    return None, gradient


kernels.layout.set("row-major", embedding)


batching.rule.set(batching.same, embedding)
