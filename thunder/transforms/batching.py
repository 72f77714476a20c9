"""Batching: the lines of a function, made to compute for every element of a batch at once (`vmap`).

Each value is mapped, with the batch as its first dimension, or the same for all elements. Lines that read nothing
mapped stay. For the most frequent operations a rule says which call of the same operation computes the batch; whatever
has no rule, or where the rule declines, becomes one operation that `torch.vmap` carries out.

Before, for x: f32[3] mapped over 4: `t0 = ltorch.sum(x, 0, False)`. After, with x: f32[4, 3]: `t1 = ltorch.sum(x, 1,
False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder import compat
from thunder.core.dtypes import bool8
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, like, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, detached
from thunder.errors import MissingImplementationError
from thunder.ops import LTORCH
from thunder.ops.attention import flash_attention, flash_attention_backward
from thunder.ops.explain import as_torch
from thunder.transforms.autodiff import by_formula
from thunder.transforms.levels import write

__all__ = ["batched", "RULES"]


def batched(
    lines: Iterable[BoundSymbol], moved: dict[Proxy, Proxy], size, randomness: str, recorder: Recorder
) -> dict[Proxy, Proxy]:
    """Writes the lines to `recorder`, the current one, for a batch. moved: mapped values and what they are with the
    batch first; returned with those that the lines make.

    randomness: "same": random lines draw once for all elements; "different": for each; "error": they raise
    RuntimeError. Raises MissingImplementationError where an operation cannot be mapped.
    """
    batch = _Batch(dict(moved), size, randomness, recorder)
    outer = recorder.context, recorder.location
    try:
        for line in lines:
            batch.line(line)
    finally:
        recorder.context, recorder.location = outer
    return batch.moved


class _Batch:
    """The batch that lines are written for."""

    def __init__(self, moved: dict[Proxy, Proxy], size, randomness: str, recorder: Recorder):
        self.moved, self.size, self.randomness, self.recorder = moved, size, randomness, recorder
        self.grad = recorder.context.grad_enabled

    def at(self, x):
        """A value, with the batch first where it is mapped."""
        return self.moved.get(x, x) if isinstance(x, Proxy) else x

    def line(self, line: BoundSymbol) -> None:
        recorder = self.recorder
        recorder.location = lambda: line.location
        if line.context is not None:
            recorder.context = line.context.replace(grad_enabled=line.context.grad_enabled and self.grad)
        random = OpTags.RANDOM_OP in line.sym.tags
        if random and self.randomness == "error":
            raise RuntimeError(
                "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
                "'different' randomness flags on vmap or perform "
                "the randomness operation out of vmap"
            )
        if not any(i in self.moved for i in line.inputs) and not (random and self.randomness == "different"):
            write(recorder, [line], {})
            return
        result = None if random else self.by_rule(line)
        if result is None:
            result = self.by_torch(line)
        if result is not None:
            self.moved |= zip(line.outputs, proxies_in(result, []), strict=True)

    def by_rule(self, line: BoundSymbol):
        """What the operation's rule computes, if that is what it has to be."""
        rule = _elementwise if line.sym.elementwise else RULES.get(line.sym)
        if rule is None or any(isinstance(p, TensorProxy) for p in proxies_in(line.kwargs, [])):
            return None
        before = len(self.recorder.bound_symbols)
        result = rule(self, line)
        if result is not None and self.fits(line, proxies_in(result, [])):
            return result
        del self.recorder.bound_symbols[before:]
        return None

    def fits(self, line: BoundSymbol, found: list) -> bool:
        return len(found) == len(line.outputs) and all(
            isinstance(f, TensorProxy) and f.shape == (self.size, *o.shape) and f.dtype is o.dtype
            for f, o in zip(found, line.outputs, strict=True)
        )

    def by_torch(self, line: BoundSymbol):
        """One operation that torch.vmap carries out; where the operation is none of PyTorch's, its decomposition."""
        symbol = line.sym
        if any(
            isinstance(n, NumberProxy) and n.unbacked
            for o in line.outputs
            if isinstance(o, TensorProxy)
            for n in o.shape
        ):
            raise RuntimeError(
                "vmap: We do not support batching operators that can output dynamic shape. Attempted to vmap over "
                f"{symbol.name}."
            )
        differentiated = any(isinstance(o, TensorProxy) and o.requires_grad for o in line.outputs)
        if symbol.formula and differentiated:
            for sub in by_formula(line):
                self.line(sub)
            return None
        if symbol.fn is not None and symbol.executor is None and not (line.subsymbols and _unknown_to_torch(line)):
            mapped = tuple(p in self.moved for p in line.inputs if isinstance(p, TensorProxy))
            args, kwargs = map_structure(self.at, line.args), map_structure(self.at, line.kwargs)
            return mapped_symbol(symbol)(mapped, self.size, self.randomness, args, kwargs)
        if symbol.own_derivative and differentiated:
            raise MissingImplementationError(
                f"vmap of {symbol.name}, which has a derivative of its own, is differentiated: differentiate inside "
                "of vmap instead"
            )
        if not line.subsymbols:
            raise MissingImplementationError(
                f"{symbol.qualified_name} cannot be mapped by vmap: define it by like=, or call it outside of the "
                "mapped function"
            )
        for sub in line.subsymbols:
            self.line(sub)
        for old, new in line.aliases.items():
            if new in self.moved:
                self.moved[old] = self.moved[new]
            else:
                write(self.recorder, [LTORCH["detach"].bind(new, output=old, context=line.context)], {})
        return None


# ---------------------------------------------------------------------------------------------------------------- by
# torch.vmap


def _unknown_to_torch(line: BoundSymbol) -> bool:
    """Whether torch.vmap refuses the operation, or computes something else (index_select at one place, by a tensor
    without dimensions): then its decomposition is mapped."""
    name = line.sym.name
    if name == "setitem":
        return any(x.dtype is bool8 for x in proxies_in(line.args[1], []) if isinstance(x, TensorProxy))
    return name == "column_stack" or (
        name == "index_select" and any(isinstance(x, TensorProxy) and not x.shape for x in line.args[1:])
    )


_MAPPED: dict[Symbol, Symbol] = {}
_KEPT = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.DETACHED, OpTags.VIEW, OpTags.OPAQUE, OpTags.DEVICE_SYNC_OP}


def mapped_symbol(symbol: Symbol) -> Symbol:
    """`vmap_of_X(mapped, size, randomness, args, kwargs)`: X for each element. mapped: for each tensor among the
    arguments, whether its first dimension is the batch."""
    made = _MAPPED.get(symbol)
    if made is None:
        made = _MAPPED[symbol] = _mapped_symbol(symbol)
    return made


def _mapped_symbol(symbol: Symbol) -> Symbol:
    def run(mapped, size, randomness, args, kwargs):
        values: list[torch.Tensor] = []
        _replaced(mapped, args, kwargs, values.append, torch.Tensor)
        structure: list = []

        def one(_, *values):
            given = iter(values)
            args_, kwargs_ = _replaced(mapped, args, kwargs, lambda x: next(given), torch.Tensor)
            leaves, spec = compat.tree_flatten(symbol.fn(*args_, **kwargs_))  # type: ignore[misc]
            structure[:] = [spec, leaves]
            return tuple(x for x in leaves if isinstance(x, torch.Tensor))

        device = values[0].device if values else None
        found = iter(torch.func.vmap(one, randomness=randomness)(torch.empty(size, device=device), *values))
        spec, leaves = structure
        return compat.tree_unflatten([next(found) if isinstance(x, torch.Tensor) else x for x in leaves], spec)

    def meta(mapped, size, randomness, args, kwargs):
        args, kwargs = _replaced(mapped, args, kwargs, lambda x: like(x, x.shape[1:]), TensorProxy)
        with detached():
            out = (symbol.meta or symbol.decomposition)(*args, **kwargs)  # type: ignore[misc]
        return map_structure(lambda x: like(x, (size, *x.shape)) if isinstance(x, TensorProxy) else x, out)

    made = Symbol(
        f"vmap_of_{symbol.name}", meta, id=("vmap_of", symbol.id), is_prim=True, tags=tuple(symbol.tags & _KEPT), fn=run
    )
    detaches = symbol.detaches
    if detaches is not None:
        made.detaches = lambda mapped, size, randomness, args, kwargs: detaches(*args, **kwargs)
    made.once_differentiable, made.nondifferentiable = symbol.once_differentiable, symbol.nondifferentiable
    return made


def _replaced(mapped: tuple, args, kwargs, function: Callable, kind: type) -> tuple:
    """Arguments with `function` applied to the mapped tensors among them."""
    position = iter(mapped)

    def convert(x):
        if not isinstance(x, kind):
            return as_torch(x) if kind is torch.Tensor else x
        return function(x) if next(position) else x

    return map_structure(convert, args), map_structure(convert, kwargs)


# ---------------------------------------------------------------------------------------------------------------- rules

RULES: dict[Symbol, Callable[[_Batch, BoundSymbol], Any]] = {}


def _rule(*names: str):
    def define(function: Callable) -> Callable:
        for name in names:
            RULES[LTORCH[name]] = function
        return function

    return define


def _mapped_only_first(batch: _Batch, line: BoundSymbol) -> bool:
    return (
        isinstance(line.args[0], TensorProxy)
        and line.args[0] in batch.moved
        and not any(p in batch.moved for p in proxies_in(line.args[1:], []))
    )


def _aligned(batch: _Batch, x, rank: int):
    """A mapped value with ones after the batch, so that the rest of its shape is of this rank."""
    found = batch.at(x)
    if x in batch.moved and len(x.shape) < rank:
        return LTORCH["reshape"](found, (batch.size, *(1,) * (rank - len(x.shape)), *x.shape))
    return found


def _elementwise(batch: _Batch, line: BoundSymbol):
    tensors = [x for x in line.args if type(x) is TensorProxy]
    typed = [x for x in tensors if not (line.sym is LTORCH["where"] and x is line.args[0])]
    # a tensor of rank 0 counts less in PyTorch's rules of types; mapped, it has another rank
    if len({x.dtype for x in typed}) > 1:
        return None
    rank = max(len(x.shape) for x in tensors)
    return line.sym(*(_aligned(batch, x, rank) if type(x) is TensorProxy else x for x in line.args), **line.kwargs)


_rule("where", "round", "clone", "detach", "contiguous", "addcmul", "addcdiv", "lerp", "clamp")(_elementwise)


@_rule("zeros_like", "ones_like", "full_like", "to", "masked_fill", "nan_to_num")
def _same(batch: _Batch, line: BoundSymbol):
    """The same call."""
    return line.sym(batch.at(line.args[0]), *line.args[1:], **line.kwargs) if _mapped_only_first(batch, line) else None


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
def _along(batch: _Batch, line: BoundSymbol):
    a, rank = line.args[0], len(line.args[0].shape)
    dim = line.args[1] if len(line.args) > 1 else None
    if (
        not rank
        or not _mapped_only_first(batch, line)
        or (dim is None and line.sym in (LTORCH["softmax"], LTORCH["log_softmax"]))
    ):
        return None
    if dim is None or dim == ():
        dim = tuple(range(rank))
    dim = _shifted(dim, rank)
    if line.sym is LTORCH["permute"]:
        dim = (0, *dim)
    return line.sym(batch.at(a), dim, *line.args[2:], **line.kwargs)


@_rule("transpose", "movedim")
def _two_dims(batch: _Batch, line: BoundSymbol):
    a, first, second = line.args
    rank = len(a.shape)
    return line.sym(batch.at(a), _shifted(first, rank), _shifted(second, rank)) if rank else None


@_rule("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshaped(batch: _Batch, line: BoundSymbol):
    a = line.args[0]
    # a view as another dtype
    return LTORCH["reshape"](batch.at(a), (batch.size, *line.output.shape)) if a.dtype is line.output.dtype else None


@_rule("t")
def _t(batch: _Batch, line: BoundSymbol):
    return LTORCH["transpose"](batch.at(line.args[0]), 1, 2) if len(line.args[0].shape) == 2 else batch.at(line.args[0])


@_rule("expand")
def _expanded(batch: _Batch, line: BoundSymbol):
    return LTORCH["expand"](_aligned(batch, line.args[0], len(line.output.shape)), (batch.size, *line.output.shape))


@_rule("getitem")
def _getitem(batch: _Batch, line: BoundSymbol):
    a, key = line.args
    keys = key if isinstance(key, tuple) else (key,)
    if any(type(k) not in (int, slice, type(None), type(...)) for k in keys):
        return None
    return line.sym(batch.at(a), (slice(None), *keys))


@_rule("cat", "stack")
def _joined(batch: _Batch, line: BoundSymbol):
    tensors, dim = line.args[0], line.args[1] if len(line.args) > 1 else 0
    if any(not isinstance(x, TensorProxy) or x.shape == (0,) for x in tensors):
        return None
    whole = [batch.at(x) if x in batch.moved else LTORCH["expand"](x, (batch.size, *x.shape)) for x in tensors]
    return line.sym(whole, _shifted(dim, len(line.output.shape)))


@_rule("matmul")
def _matmul(batch: _Batch, line: BoundSymbol):
    a, b = line.args
    rank = max(len(a.shape), len(b.shape), 2)
    left = _matrix(batch, a, rank, -2)
    right = _matrix(batch, b, rank, -1)
    return LTORCH["reshape"](LTORCH["matmul"](left, right), (batch.size, *line.output.shape))


def _matrix(batch: _Batch, x: TensorProxy, rank: int, new: int):
    """An operand of a matrix product as a stack of matrices of this rank; a vector gets a dimension of one."""
    shape = x.shape if len(x.shape) > 1 else (1, *x.shape) if new == -2 else (*x.shape, 1)
    shape = (*(1,) * (rank - len(shape)), *shape)
    found = batch.at(x)
    shape = (batch.size, *shape) if x in batch.moved else shape
    return found if found.shape == shape else LTORCH["reshape"](found, shape)


@_rule("linear")
def _linear(batch: _Batch, line: BoundSymbol):
    a, weight, bias = (*line.args, None)[:3]
    if _mapped_only_first(batch, line):
        return line.sym(batch.at(a), weight, bias)
    if len(weight.shape) != 2:
        return None
    rank = max(len(a.shape), 2)
    product = LTORCH["matmul"](
        _matrix(batch, a, rank, -2), LTORCH["transpose"](_matrix(batch, weight, rank, -2), -2, -1)
    )
    out = LTORCH["reshape"](product, (batch.size, *line.output.shape))
    return out if bias is None else LTORCH["add"](out, _aligned(batch, bias, len(line.output.shape)))


@_rule("layer_norm")
def _layer_norm(batch: _Batch, line: BoundSymbol):
    return _same(batch, line)


@_rule("embedding")
def _embedding(batch: _Batch, line: BoundSymbol):
    a, weight, *rest = line.args
    return line.sym(batch.at(a), weight, *rest, **line.kwargs) if _mapped_only_first(batch, line) else None


@_rule("scaled_dot_product_attention")
def _attention(batch: _Batch, line: BoundSymbol):
    """The kernels have one batch dimension: the batch is put in front of it. An attention mask would have to be
    stretched."""
    tensors = [x for x in line.args if isinstance(x, TensorProxy)]
    whole = tensors[0].shape[0]
    mask = line.args[6] if line.sym is flash_attention_backward else line.args[3] if len(line.args) > 3 else None
    if mask is not None or len(tensors[0].shape) < 3 or any(x.shape[0] != whole for x in tensors):
        return None

    def merged(x):
        if not isinstance(x, TensorProxy):
            return x
        found = batch.at(x) if x in batch.moved else LTORCH["expand"](x, (batch.size, *x.shape))
        return LTORCH["reshape"](found, (batch.size * whole, *x.shape[1:]))

    results = line.sym(*map(merged, line.args), **line.kwargs)
    return map_structure(lambda r: LTORCH["reshape"](r, (batch.size, whole, *r.shape[1:])), results)


RULES |= {flash_attention: _attention, flash_attention_backward: _attention}
