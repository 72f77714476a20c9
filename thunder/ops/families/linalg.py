"""Products of vectors, matrices and batches of them. torch.linalg's norms and distances are in `norms`."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.dtypes import float32, int64
from thunder.core.proxies import TensorProxy, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, user_location
from thunder.errors import CaptureError
from thunder.ops import autocast, ltorch, prims
from thunder.ops.backward import sum_to, times_cotangent
from thunder.ops.families import aligned
from thunder.ops.families.binary import operator_methods
from thunder.ops.families.data import convert
from thunder.ops.families.shape import permute, reshape, unsqueeze
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import broadcast_shapes, result_type, same_device
from thunder.ops.registry import alias, composite, prim, torch_prim
from thunder.ops.rules import batching, derivatives, kernels, memory, products, splitting, views
from thunder.ops.shape_rules import check_tensor, require, wrap_dim

MATMUL = (OpTags.MATMUL_OP,)


def _same_types(*tensors) -> None:
    first = tensors[0]
    for t in tensors[1:]:
        require(t.dtype is first.dtype)
        if t.device is not first.device:
            same_device(*tensors)


@prim(F.linear, name="linear", tags=MATMUL)
def linear_prim(a, w, bias):
    return like(a, (*a.shape[:-1], w.shape[0]))


def _linear_meta(a, weight, bias=None):
    """The type of the result of `linear`. Raises where shapes or types do not fit."""
    shape, w = a.shape, weight.shape
    fits = len(w) in (1, 2) and shape and (shape[-1] is w[-1] or shape[-1] == w[-1]) and a.dtype is weight.dtype
    require(
        fits
        and (
            bias is None
            or (bias.dtype is a.dtype and (len(w) == 2 and bias.shape in ((), (1,), (w[0],)) or not bias.shape))
        )
    )
    return like(a, (*shape[:-1], w[0])) if len(w) == 2 else like(a, shape[:-1])


@composite(F.linear, meta=_linear_meta, autocast="lower", tags=MATMUL)
def linear(a, weight, bias=None):
    if len(weight.shape) == 1:
        out = matmul(a, weight)
        return out if bias is None else out + bias
    return linear_prim(a, weight, bias)


@alias(F.linear, over=linear)
def _linear(input, weight, *rest, **kwargs):
    """A bias that is a matrix is added as `addmm` adds it, and one of more dimensions, or to more, as to any tensor."""
    bias = (
        rest[0] if len(rest) == 1 and not kwargs else kwargs["bias"] if not rest and kwargs.keys() == {"bias"} else None
    )
    if bias is not None and len(bias.shape) == len(weight.shape) == len(input.shape) == 2:
        return ltorch.addmm(bias, input, permute(weight, (1, 0)))
    if bias is not None and len(bias.shape) > 1 and bias.dtype is input.dtype:
        product = linear(input, weight)
        if same_shape(broadcast_shapes(product.shape, bias.shape), product.shape):
            return product + convert(bias, product.dtype)
    return linear(input, weight, *rest, **kwargs)


# ----------------------------------------------------------------------------------------------------------------
# matmul


@prim(torch.matmul, name="matmul", tags=MATMUL)
def matmul_prim(a, b):
    """Matrix product of the last two dimensions; vectors are a row on the left, a column on the right; leading
    dimensions broadcast."""
    return like(a, _product_shape(a.shape, b.shape))


def _product_shape(x: tuple, y: tuple) -> tuple:
    require(x and y)
    inner = y[-2] if len(y) > 1 else y[0]
    require(x[-1] is inner or x[-1] == inner)
    if len(x) == 2 and len(y) == 2:
        return (x[0], y[1])
    batch = broadcast_shapes(x[:-2], y[:-2]) if len(x) > 2 and len(y) > 2 else x[:-2] if len(x) > 2 else y[:-2]
    return (*batch, *x[-2:-1], *((y[-1],) if len(y) > 1 else ()))


def _matmul_meta(a, b):
    if not isinstance(a, TensorProxy) or not isinstance(b, TensorProxy):
        check_tensor(a, "matmul")
        check_tensor(b, "matmul", "other", 2)
    _same_types(a, b)
    return like(a, _product_shape(a.shape, b.shape))


@composite(torch.matmul, torch.Tensor.matmul, torch.linalg.matmul, meta=_matmul_meta, autocast="lower", tags=MATMUL)
def matmul(a, other):
    return matmul_prim(a, other)


operator_methods(matmul, "matmul")


def _product(name: str, ranks: tuple[int, int], second: str, *functions, autocast="lower"):
    """mm, bmm, mv, dot: matmul for tensors of exactly these ranks; `second` is what PyTorch calls the second
    argument."""

    def meta(a, other):
        require((len(a.shape), len(other.shape)) == ranks)
        require(name != "bmm" or a.shape[0] == other.shape[0])
        return _matmul_meta(a, other)

    def decomposition(a, other):
        return matmul_prim(a, other)

    symbol = composite(*functions, name=name, meta=meta, autocast=autocast, tags=MATMUL)(decomposition)
    symbol.parameters = {"a": None, second: None}.keys()
    return symbol


mm = _product("mm", (2, 2), "mat2", torch.mm, torch.Tensor.mm)
bmm = _product("bmm", (3, 3), "mat2", torch.bmm, torch.Tensor.bmm)
mv = _product("mv", (2, 1), "vec", torch.mv, torch.Tensor.mv, autocast="cuda:lower")
dot = _product("dot", (1, 1), "tensor", torch.dot, torch.Tensor.dot, autocast="cuda:widest")


@composite(torch.vdot, torch.Tensor.vdot, autocast="cuda:widest")
def vdot(a, other):
    return dot(ltorch.conj(a) if a.dtype.category == 3 else a, other)


@torch_prim(torch.linalg.vecdot, autocast="lower")
def vecdot(x, y, *, dim=-1):
    shape = broadcast_shapes(x.shape, y.shape)
    d = wrap_dim(dim, len(shape))
    return like(x, (*shape[:d], *shape[d + 1 :]))


@composite(torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger)
def outer(a, vec2):
    require(len(a.shape) == len(vec2.shape) == 1)
    return unsqueeze(a, 1) * unsqueeze(vec2, 0)


@composite(torch.inner, torch.Tensor.inner, autocast="cpu:lower cuda:widest")
def inner(a, other):
    if not a.shape or not other.shape:
        return a * other
    require(a.shape[-1] == other.shape[-1])
    return tensordot(a, other, ([-1], [-1]))


# on the CPU it is the matrix product inside that is cast; a product of vectors or with a number is none
autocast.when.set(
    lambda kind, args, kwargs: (
        len(args[0].shape) > 0 < len(args[1].shape) and (kind != "cpu" or len(args[0].shape) + len(args[1].shape) > 2)
    ),
    inner,
)


# ---------------------------------------------------------------------------------------------------------------- sums
# with products


def _plus_product(name: str, product_shape, multiply, functions: tuple, *, autocast="lower"):
    """addmm and its kin: beta * a + alpha * (the product of two tensors)."""

    def meta(a, x, y, *, beta=1, alpha=1):
        if name != "addr":
            _same_types(a, x, y)
        shape = product_shape(x.shape, y.shape)
        require(broadcast_shapes(a.shape, shape) == shape)
        return like(a, shape, result_type(a, x, y), same_device(a, x, y))

    def decomposition(a, x, y, *, beta=1, alpha=1):
        if a.dtype.category < 2 and name != "addr":
            beta, alpha = int(beta), int(alpha)  # as PyTorch does with integer matrices
        out = multiply(x, y)
        out = out if alpha == 1 else out * alpha
        if beta == 0:
            return out
        return (a if beta == 1 else a * beta) + out

    return composite(*functions, name=name, meta=meta, autocast=autocast, tags=MATMUL)(decomposition)


def _shaped(x_rank: int, y_rank: int, shape):
    def product_shape(x, y):
        require(len(x) == x_rank and len(y) == y_rank)
        out = shape(x, y)
        require(out is not None)
        return out

    return product_shape


def _both(name: str) -> tuple:
    return getattr(torch, name), getattr(torch.Tensor, name)


addmm = _plus_product(
    "addmm", _shaped(2, 2, lambda x, y: (x[0], y[1]) if x[1] == y[0] else None), matmul_prim, _both("addmm")
)
addmv = _plus_product(
    "addmv",
    _shaped(2, 1, lambda x, y: (x[0],) if x[1] == y[0] else None),
    matmul_prim,
    _both("addmv"),
    autocast="cuda:lower",
)
addr = _plus_product("addr", _shaped(1, 1, lambda x, y: (x[0], y[0])), outer, _both("addr"), autocast="cuda:lower")
_batches = _shaped(3, 3, lambda x, y: (x[0], x[1], y[2]) if x[0] == y[0] and x[2] == y[1] else None)
baddbmm = _plus_product("baddbmm", _batches, matmul_prim, _both("baddbmm"))


def _addbmm_shape(x, y):
    return _batches(x, y)[1:]


addbmm = _plus_product("addbmm", _addbmm_shape, lambda x, y: ltorch.sum(matmul_prim(x, y), 0), _both("addbmm"))


def _no_growth_in_place(a, x, y, **factors):
    """PyTorch changes the shape of what it writes to here."""
    shape = _addbmm_shape(x.shape, y.shape)
    if len(a.shape) != len(shape) or any((m == n) is False for m, n in zip(a.shape, shape)):
        raise CaptureError(
            f"addbmm_ would change the shape of its argument from {list(a.shape)} to {list(shape)}",
            location=user_location(),
            remedy="use addbmm",
        )


views.check_in_place.set(_no_growth_in_place, addbmm)


# ----------------------------------------------------------------------------------------------------------------
# contractions


@composite(torch.tensordot, torch.functional.tensordot, autocast="cpu:lower cuda:widest")
def tensordot(a, b, dims=2, out=None):
    """The decomposition of `tensordot`: one matrix product of permuted and reshaped operands."""
    if isinstance(dims, int):
        left, right = list(range(len(a.shape) - dims, len(a.shape))), list(range(dims))
    else:
        left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
    left, right = [wrap_dim(d, len(a.shape)) for d in left], [wrap_dim(d, len(b.shape)) for d in right]
    for i, j in zip(left, right, strict=False):  # a dimension of size 1 goes with any: the other is summed
        if a.shape[i] != b.shape[j]:
            a, b = (
                (ltorch.sum(a, i, True), b)
                if b.shape[j] == 1
                else (a, ltorch.sum(b, j, True))
                if a.shape[i] == 1
                else (a, b)
            )
    require(len(left) == len(right) and not any(a.shape[i] != b.shape[j] for i, j in zip(left, right, strict=True)))
    keep_a, keep_b = (
        [i for i in range(len(a.shape)) if i not in left],
        [j for j in range(len(b.shape)) if j not in right],
    )
    inner_size = 1
    for i in left:
        inner_size = inner_size * a.shape[i]
    shape = (*(a.shape[i] for i in keep_a), *(b.shape[j] for j in keep_b))
    rows, columns = _count(a, keep_a), _count(b, keep_b)
    return reshape(
        matmul_prim(
            reshape(permute(a, (*keep_a, *left)), (rows, inner_size)),
            reshape(permute(b, (*right, *keep_b)), (inner_size, columns)),
        ),
        shape,
    )


# else refused, before anything is cast
autocast.when.set(lambda kind, args, kwargs: kind != "cpu" or args[0].dtype is args[1].dtype, tensordot)


def _count(a, dims):
    out = 1
    for d in dims:
        out = out * a.shape[d]
    return out


@torch_prim(torch.linalg.multi_dot, autocast="lower")
def multi_dot(tensors, *, out=None):
    require(len(tensors) >= 2)
    shape = tensors[0].shape
    for t in tensors[1:]:
        shape = _product_shape(shape, t.shape)
    return like(tensors[0], shape)


@alias(torch.chain_matmul)
def chain_matmul(*matrices, out=None):
    return multi_dot(list(matrices)) if len(matrices) > 1 else matrices[0]


@composite(torch.kron, torch.Tensor.kron)
def kron(a, other):
    rank = max(len(a.shape), len(other.shape))
    x, y = (1,) * (rank - len(a.shape)) + a.shape, (1,) * (rank - len(other.shape)) + other.shape
    left = reshape(a, tuple(n for m in x for n in (m, 1)))
    right = reshape(other, tuple(n for m in y for n in (1, m)))
    return reshape(left * right, tuple(m * n for m, n in zip(x, y, strict=True)))


@composite(F.bilinear)
def bilinear(input1, input2, weight, bias=None):
    """The decomposition of `bilinear`: an `einsum` of both inputs and the weight, and the bias."""
    require(
        len(weight.shape) == 3
        and input1.shape[:-1] == input2.shape[:-1]
        and (input1.shape[-1], input2.shape[-1]) == weight.shape[1:]
    )
    out = ltorch.einsum(
        "bi,oij,bj->bo", reshape(input1, (-1, input1.shape[-1])), weight, reshape(input2, (-1, input2.shape[-1]))
    )
    out = reshape(out, (*input1.shape[:-1], weight.shape[0]))
    return out if bias is None else out + bias


@torch_prim(torch.linalg.cross, autocast="cuda:widest")
def linalg_cross(a, other, *, dim=-1):
    shape = broadcast_shapes(a.shape, other.shape)
    require(shape[wrap_dim(dim, len(shape))] == 3)
    return like(a, shape, result_type(a, other))


@alias(torch.cross, torch.Tensor.cross)
def cross(a, other, dim=None):
    if dim is None:
        dim = next((i for i, n in enumerate(a.shape) if n == 3), None)
        if dim is None:
            raise RuntimeError("no dimension of size 3 in input")
    return linalg_cross(a, other, dim=dim)


@torch_prim(torch.trace, torch.Tensor.trace, autocast="cpu:float32")
def trace(a):
    require(len(a.shape) == 2)
    return like(a, (), a.dtype if a.dtype.category >= 2 else int64)


# --- derivatives: the products that PyTorch's autograd computes


def _mm_in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_cuda and torch.version.cuda is not None:
        return aligned.multiply_into(a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32), a, b)
    return torch.mm(a, b).to(torch.float32)


def _run_transposed_product(a, g, b, offs=None, mm=torch.mm):
    product = mm if offs is None else functools.partial(F.grouped_mm, offs=offs)
    if b.stride(-2) == 1 and b.stride(-1) >= max(1, b.shape[-2]):
        return product(g.t(), a).transpose(-2, -1)
    return product(a.t(), g)


# a.T @ g, the gradient of `b` in a @ b, laid out as b is: PyTorch computes it the other way round where b's columns are
# contiguous, so that it need not be copied
transposed_product = Symbol(
    "transposed_product",
    lambda a, g, b, offs=None: like(b),
    id="transposed_product",
    is_prim=True,
    tags=MATMUL,
    fn=_run_transposed_product,
)


def _transposed_in_float32(a, g, b, offs=None):
    return _run_transposed_product(a, g, b, offs, _mm_in_float32).to(torch.float32)


def of_second(a, g, b, offs=None):
    """The gradient of `b` in a @ b. Where b is saved anyway, for the gradient of `a`, its layout is followed."""
    if a.requires_grad:
        return transposed_product(a, g, b, *(() if offs is None else (offs,)))
    return mm(ltorch.t(a), g) if offs is None else ltorch.grouped_mm(ltorch.t(a), g, offs=offs)


def _rows(x):
    """A tensor as a matrix: all dimensions but the last in one."""
    return x if len(x.shape) == 2 else reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@linear.vjp
def _(a, weight, bias=None):
    if len(weight.shape) != 2:
        return NotImplemented
    g = yield linear(a, weight, bias)
    g2, a2 = (unsqueeze(x, 0) if len(a.shape) == 1 else _rows(x) for x in (g, a))
    ga = mm(g2, weight) if len(a.shape) == 2 else reshape(mm(g2, weight), a.shape)
    gw = mm(ltorch.t(g2), a2)
    if bias is None:
        return ga, gw, None
    return (
        ga,
        gw,
        ltorch.sum(g2, 0) if tuple(bias.shape) == (weight.shape[0],) else reshape(ltorch.sum(g2), bias.shape),
    )


def _swapped(x):
    return ltorch.transpose(x, -2, -1)


@mm.vjp
def _(a, other):
    g = yield mm(a, other)
    return mm(g, ltorch.t(other)), of_second(a, g, other)


@bmm.vjp
def _(a, other):
    g = yield bmm(a, other)
    return bmm(g, _swapped(other)), bmm(_swapped(a), g)


def _times(x, factor):
    return x if factor == 1 else x * factor


@addmm.vjp
def _(a, x, y, *, beta=1, alpha=1):
    g = yield addmm(a, x, y, beta=beta, alpha=alpha)
    return sum_to(_times(g, beta), a.shape), _times(mm(g, ltorch.t(y)), alpha), _times(of_second(x, g, y), alpha)


@baddbmm.vjp
def _(a, x, y, *, beta=1, alpha=1):
    g = yield baddbmm(a, x, y, beta=beta, alpha=alpha)
    return sum_to(_times(g, beta), a.shape), _times(bmm(g, _swapped(y)), alpha), _times(bmm(_swapped(x), g), alpha)


@mv.vjp
def _(a, vec):
    g = yield mv(a, vec)
    return outer(g, vec), mv(ltorch.t(a), g)


@dot.vjp
def _(a, tensor):
    g = yield dot(a, tensor)
    return g * tensor, g * a


def _folded(a, lead: tuple):
    """A batch of matrices with one batch dimension, stretched to `lead` before."""
    shape = (*lead, *a.shape[-2:])
    a = a if same_shape(a.shape, shape) else ltorch.expand(a, shape)
    return a if len(lead) == 1 else reshape(a, (math.prod(lead), *a.shape[-2:]))


def _of_batches(a, other):
    """As PyTorch: matrices with one batch dimension, which the backward reads as they were made, not folded and copied
    again."""
    lead = broadcast_shapes(a.shape[:-2], other.shape[:-2])
    x, y = _folded(a, lead), _folded(other, lead)

    def unfolded(z):
        return z if len(lead) == 1 else reshape(z, (*lead, *z.shape[-2:]))

    g = yield unfolded(bmm(x, y))
    g = g if len(lead) == 1 else reshape(g, (x.shape[0], *g.shape[-2:]))
    return sum_to(unfolded(bmm(g, _swapped(y))), a.shape), sum_to(unfolded(bmm(_swapped(x), g)), other.shape)


@matmul.vjp
def _(a, other):
    ranks = min(len(a.shape), 3), min(len(other.shape), 3)
    if ranks == (3, 3):
        return (yield from _of_batches(a, other))
    if ranks not in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (3, 1)):
        return NotImplemented
    g = yield matmul(a, other)
    if ranks == (1, 1):
        return g * other, g * a
    if ranks[1] == 1:
        rows = _rows(a)
        g = g if len(a.shape) == 2 else reshape(g, (-1,))
        of_a = outer(g, other)
        return of_a if rows is a else reshape(of_a, a.shape), mv(ltorch.t(rows), g)
    if ranks == (1, 2):
        g = unsqueeze(g, 0)
        return ltorch.squeeze(mm(g, ltorch.t(other)), 0), mm(unsqueeze(a, 1), g)
    g = _rows(g)
    of_a = mm(g, ltorch.t(other))
    return of_a if len(a.shape) == 2 else reshape(of_a, a.shape), of_second(_rows(a), g, other)


# PyTorch composes these of the same operations
derivatives.composed.set(True, kron, vdot, outer)
memory.owns_result.add(ltorch.linear, ltorch.matmul, ltorch.mm, ltorch.bmm, ltorch.addmm, ltorch.baddbmm)


kernels.layout.set("row-major", linear, mm, bmm, addmm)
products.aligned.set(aligned.linear, linear)
products.aligned.set(aligned.matmul, matmul, mm, bmm)
products.aligned.set(aligned.addmm, addmm)
memory.accumulates.add(addmm)
products.takes_rows_apart.add(linear, matmul, mm, bmm, addmm, times_cotangent)
for _narrow, _function in ((mm, _mm_in_float32), (transposed_product, _transposed_in_float32)):
    _wide = Symbol(
        f"{_narrow.name}_in_float32",
        lambda *args, narrow=_narrow: like(narrow.meta(*args), dtype=float32),
        id=f"{_narrow.name}_in_float32",
        is_prim=True,
        tags=tuple(_narrow.tags),
        fn=_function,
    )
    _wide.take_facts(_narrow)
    products.aligned.set(None, _wide)  # it pads its operands itself
    products.in_float32.set(_wide, _narrow)
cost.rules.set(Cost(factors=(1, 2)), ltorch.addmm, ltorch.addmv, ltorch.addbmm, ltorch.baddbmm)


# PyTorch composes it of others, which autocast casts
casts_inside(F.bilinear)


@batching.rule(matmul)
def _matmul_of_batch(batch: batching.Batch, operation: BoundSymbol):
    a, b = operation.args
    rank = max(len(a.shape), len(b.shape), 2)
    left = _matrix(batch, a, rank, -2)
    right = _matrix(batch, b, rank, -1)
    return ltorch.reshape(ltorch.matmul(left, right), (batch.size, *operation.output.shape))


def _matrix(batch: batching.Batch, x: TensorProxy, rank: int, new: int):
    """An operand of a matrix product as a stack of matrices of this rank; a vector gets a dimension of one."""
    shape = x.shape if len(x.shape) > 1 else (1, *x.shape) if new == -2 else (*x.shape, 1)
    shape = (*(1,) * (rank - len(shape)), *shape)
    batched = batch.at(x)
    shape = (batch.size, *shape) if x in batch.moved else shape
    return batched if same_shape(batched.shape, shape) else ltorch.reshape(batched, shape)


@batching.rule(linear)
def _linear_of_batch(batch: batching.Batch, operation: BoundSymbol):
    a, weight, bias = (*operation.args, None)[:3]
    if batching.only_first(batch, operation):
        return operation.sym(batch.at(a), weight, bias)
    if len(weight.shape) != 2:
        return None
    rank = max(len(a.shape), 2)
    product = ltorch.matmul(_matrix(batch, a, rank, -2), ltorch.transpose(_matrix(batch, weight, rank, -2), -2, -1))
    out = ltorch.reshape(product, (batch.size, *operation.output.shape))
    return out if bias is None else ltorch.add(out, batching.aligned(batch, bias, len(operation.output.shape)))


@splitting.rule(linear)
def _linear_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Positions are computed apart."""
    a, *parameters = operation.inputs
    part = split.part(a)
    if not split.shares_positions or part is None or part.dim == len(a.shape) - 1:
        return None
    table = {p: split.gathered_over(p, part.axis) for p in parameters} | {a: part.value}
    return split.computed(operation, table, part.axis, part.dim)


def _rows_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Rows of the first matrix are computed apart, by all of the second."""
    a, b = operation.args[:2]
    part = split.part(a)
    if part is None or part.dim != len(a.shape) - 2 or len(a.shape) < len(b.shape) or len(b.shape) < 2:
        return None
    table = {b: split.gathered_over(b, part.axis), a: part.value}
    return split.computed(operation, table, part.axis, part.dim)


@splitting.rule(matmul, prims.matmul)
def _product_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """All tensors are in parts along one of the dimensions that a product computes one by one."""
    if split.shares_positions and (rows := _rows_of_part(split, operation)) is not None:
        return rows
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    parts = {p: part for p in tensors if (part := split.part(p)) is not None}
    places = {(part.axis, part.dim - len(p.shape)) for p, part in parts.items()}
    if len(parts) != len(tensors) or len(places) != 1 or len({len(p.shape) for p in tensors}) != 1:
        return None
    axis, dim = places.pop()
    if dim in (-1, -2):
        return None
    table = {p: part.value for p, part in parts.items()}
    return split.computed(operation, table, axis, len(operation.output.shape) + dim)
