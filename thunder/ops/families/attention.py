"""Scaled dot-product attention."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder import compat
from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.dtypes import float32, float64
from thunder.core.proxies import TensorProxy, element_count, like, map_structure, number_value
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, current_recorder, primitive
from thunder.ops import ltorch, pytorch_derivative
from thunder.ops.backward import sum_to
from thunder.ops.families.elementwise import broadcast_to
from thunder.ops.families.linalg import _folded
from thunder.ops.families.random import dropout_noise
from thunder.ops.families.shape import reshape, transpose
from thunder.ops.families.softmax import softmax
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import batching, splitting
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import from_tensor_dtype, to_torch_dtype


def _meta(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The type of attention's result. Raises PyTorch's error where shapes, types or devices do not fit."""
    q, k, v = query.shape, key.shape, value.shape
    require(len(q) >= 2 and len(k) >= 2 and len(v) >= 2)
    require(query.dtype is key.dtype and query.dtype is value.dtype)
    if query.device is not key.device or query.device is not value.device:
        raise RuntimeError("Expected query, key, and value to have the same device type")
    require((q[-1] is k[-1] or q[-1] == k[-1]) and (k[-2] is v[-2] or k[-2] == v[-2]))
    require(not is_causal or attn_mask is None)
    if enable_gqa:
        require(q[-3] % k[-3] == 0 and q[-3] % v[-3] == 0)
        batch = q[:-2]
    else:
        batch = q[:-2] if q[:-2] == k[:-2] == v[:-2] else broadcast_shapes(q[:-2], k[:-2], v[:-2])
    if isinstance(attn_mask, TensorProxy):
        _check_mask(attn_mask, query, (*batch, q[-2], k[-2]))
    return like(query, (*batch, q[-2], v[-1]))


def _check_mask(mask: TensorProxy, query: TensorProxy, wanted: tuple) -> None:
    require(mask.dtype.category == 0 or mask.dtype is query.dtype or mask.dtype.name == "float32")
    broadcast_shapes(mask.shape, wanted)


def _weights(query, key, attn_mask, is_causal, scale):
    """softmax(query @ key.T * scale + mask); a query that attends to nothing has weights 0."""
    length, sources = query.shape[-2], key.shape[-2]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = ltorch.matmul(query * factor, transpose(key, -2, -1))
    if is_causal:
        rows, columns = (ltorch.arange(n, device=query.device) for n in (length, sources))
        attn_mask = ltorch.unsqueeze(rows, 1) >= ltorch.unsqueeze(columns, 0)
    if attn_mask is None:
        return softmax(scores, -1)
    if attn_mask.dtype.category != 0:
        scores = scores + attn_mask
        hidden = ltorch.eq(scores, float("-inf"))
    else:
        hidden = ltorch.logical_not(broadcast_to(attn_mask, scores.shape))
        scores = ltorch.where(hidden, float("-inf"), scores)
    nothing = ltorch.all(hidden, -1, True)
    return ltorch.where(nothing, 0.0, softmax(scores, -1))


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if enable_gqa:
        key = ltorch.repeat_interleave(key, query.shape[-3] // key.shape[-3], -3)
        value = ltorch.repeat_interleave(value, query.shape[-3] // value.shape[-3], -3)
    weights = _weights(query, key, attn_mask, is_causal, scale)
    if dropout_p > 0.0:
        weights = ltorch.dropout(weights, dropout_p, True)
    return ltorch.to(ltorch.matmul(weights, ltorch.to(value, dtype=weights.dtype)), dtype=query.dtype)


_FUNCTION = F.scaled_dot_product_attention
scaled_dot_product_attention = composite(
    _FUNCTION, name="scaled_dot_product_attention", meta=_meta, autocast="lower", tags=(OpTags.MATMUL_OP,)
)(_attention)
# with dropout it draws random numbers, and is another operation for passes that merge or repeat
attention_with_dropout = composite(
    fn=_FUNCTION,
    name="scaled_dot_product_attention_with_dropout",
    meta=_meta,
    autocast="lower",
    tags=(OpTags.MATMUL_OP, OpTags.RANDOM_OP),
)(_attention)


def scores(query: TensorProxy, key: TensorProxy, is_causal: bool) -> int:
    """The multiply-adds of a product as large as that of queries and keys."""
    return element_count(query) * number_value(key.shape[-2]) // (2 if is_causal else 1)


cost.rules.set(
    Cost(multiply_adds=lambda b: 2 * scores(*b.args[:2], (*b.args[5:6], False)[0]), rate="attention"),
    scaled_dot_product_attention, attention_with_dropout,
)  # fmt: skip


def _run_among(backends, *args, **kwargs):
    with compat.attention_among(backends):
        return _FUNCTION(*args, **kwargs)


# under flags that the program itself sets (torch.nn.attention.sdpa_kernel); `backends` are these
attention_among, attention_among_with_dropout = (
    Symbol(
        name,
        lambda backends, *args, **kwargs: _meta(*args, **kwargs),
        id=name,
        is_prim=True,
        tags=(OpTags.MATMUL_OP, *tags),
        fn=_run_among,
    )
    for name, tags in (("attention_among", ()), ("attention_among_with_dropout", (OpTags.RANDOM_OP,)))
)
attention_among.autocast = attention_among_with_dropout.autocast = "lower"


@alias(_FUNCTION, over=scaled_dot_product_attention)
def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention` as programs call it: the operation without dropout or with it, among the backends
    that the program has enabled."""
    options = {} if scale is None else {"scale": scale}
    if enable_gqa:
        options["enable_gqa"] = True
    if (recorder := current_recorder()) is not None and (before := recorder.context.names.backends) is not None:
        recorder.context.names.attends |= query.device.type == "cuda"
        if (backends := compat.attention_backends()) != before:
            among = attention_among if dropout_p == 0.0 else attention_among_with_dropout
            return among(backends, query, key, value, attn_mask, dropout_p, is_causal, **options)
    symbol = scaled_dot_product_attention if dropout_p == 0.0 else attention_with_dropout
    return symbol(query, key, value, attn_mask, dropout_p, is_causal, **options)


# ----------------------------------------------------------------------------------------------------------------
# derivative: the CPU's flash kernel


@functools.cache
def _flash_spreads_one_head() -> bool:
    """Whether PyTorch's flash kernel for the CPU takes keys of one head for all heads of the query, as it does from
    torch 2.15 on."""
    with compat.probing(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        query, key = (torch.empty(1, heads, 1, 1, device="cpu") for heads in (2, 1))
        return compat.attention_choice(query, key, key) == SDPBackend.FLASH_ATTENTION.value


def fits_flash_for_cpu(query, key, value, attn_mask, dropout_p, enable_gqa: bool) -> bool:
    """Whether PyTorch takes its flash kernel for the CPU, as far as types and sizes decide
    (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp)."""
    q, k, v = query.shape, key.shape, value.shape
    if (
        query.device.type != "cpu"
        or dropout_p > 0.0
        or query.dtype.category != 2
        or not len(q) == len(k) == len(v) == 4
    ):
        return False
    if any(type(n) is int and n == 0 for n in (q[2], k[2], q[3])) or not (
        q[0] == k[0] == v[0] and q[3] == k[3] == v[3]
    ):
        return False
    if not (k[1] == v[1] and (q[1] == k[1] or enable_gqa or (k[1] == 1 and _flash_spreads_one_head()))):
        return False
    if attn_mask is None:
        return True
    whole = (q[0], q[1], q[2], k[2])
    shape = attn_mask.shape
    return (
        not attn_mask.requires_grad
        and len(shape) in (2, 4)
        and all(n == 1 or n == m for n, m in zip(reversed(shape), reversed(whole), strict=False))
    )


def _flash_meta(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    b, h, n, d = query.shape
    return like(query, (b, h, n, value.shape[-1])), like(
        query, (b, h, n), float64 if query.dtype is float64 else float32
    )


@primitive(_flash_meta, tags=(OpTags.MATMUL_OP,))
def flash_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    """(result, logarithms of the rows' sums). These are empty where the flags or the layout of the moment forbid the
    kernel, and PyTorch takes another way."""
    if torch.backends.cuda.flash_sdp_enabled() and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return compat.kernel("_scaled_dot_product_flash_attention_for_cpu")(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
    return _FUNCTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa), query.new_empty(
        0
    )


@primitive(lambda g, query, key, value, *rest: (like(query), like(key), like(value)), tags=(OpTags.MATMUL_OP,))
def flash_attention_backward(g, query, key, value, out, sums, attn_mask, is_causal, scale, enable_gqa):
    if sums.numel():
        return compat.kernel("_scaled_dot_product_flash_attention_for_cpu_backward")(
            g, query, key, value, out, sums, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = _FUNCTION(*leaves, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return torch.autograd.grad(out, leaves, g)


flash_attention.nondifferentiable = (1,)


@flash_attention.vjp
def _(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    out, sums = flash_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    g, _ = yield out, sums
    return flash_attention_backward(g, query, key, value, out, sums, attn_mask, is_causal, scale, enable_gqa)


# the same by products, which PyTorch can differentiate twice; the kernel's backward it cannot
@primitive(lambda *args: _flash_meta(*args)[0], tags=(OpTags.MATMUL_OP,))
def mathematical_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    with sdpa_kernel(SDPBackend.MATH):
        return _FUNCTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


@flash_attention_backward.vjp
def _(g, query, key, value, out, sums, attn_mask, is_causal, scale, enable_gqa):
    """`out` and `sums` are functions of query, key and value, and the derivative with respect to these is the whole
    one."""
    cotangents = yield flash_attention_backward(
        g, query, key, value, out, sums, attn_mask, is_causal, scale, enable_gqa
    )
    return differentiated_by_products(g, query, key, value, attn_mask, is_causal, scale, enable_gqa, cotangents)


def differentiated_by_products(g, query, key, value, attn_mask, is_causal, scale, enable_gqa, cotangents) -> tuple:
    """The cotangents of (g, query, key, value) of a kernel's backward, for those of its results."""
    once = pytorch_derivative.vjp_of(mathematical_attention)
    inside = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
    last = 3 if attn_mask is None else 4  # g comes after the other tensors
    gq, gk, gv, gg = pytorch_derivative.vjp_of(once)(
        (0, 1, 2, last), ((0, 1, 2), inside, {}, (g,)), {}, tuple(cotangents)
    )
    return gg, gq, gk, gv


def _run_bias(mask, dtype, hidden=float("-inf")):
    return torch.where(
        mask,
        torch.scalar_tensor(0.0, dtype=dtype, device=mask.device),
        torch.scalar_tensor(hidden, dtype=dtype, device=mask.device),
    )


def _bias(mask, dtype, hidden=float("-inf")):
    """The decomposition, which kernels compute."""
    return ltorch.to(ltorch.where(mask, 0.0, hidden), dtype=dtype)


attention_bias = Symbol(
    "attention_bias",
    lambda mask, dtype, hidden=float("-inf"): like(mask, dtype=from_tensor_dtype(dtype)),
    id="attention_bias",
    decomposition=_bias,
    fn=_run_bias,
)  # a mask of bools as what is added to the scores: 0 and -inf, or another number where a kernel wants one


# ----------------------------------------------------------------------------------------------------------------
# derivative: the way that has no kernel


def _is_mathematical(query, key, value, attn_mask, enable_gqa: bool) -> bool:
    """Whether `_by_products` computes what PyTorch does where it takes no kernel. In lower types PyTorch computes in
    float32, which is left to it."""
    if (
        query.device.type != "cpu"
        or enable_gqa
        or query.dtype not in (float32, float64)
        or not len(query.shape) == len(key.shape) == len(value.shape) == 4
    ):
        return False
    return attn_mask is None or attn_mask.dtype.category == 0 or attn_mask.dtype is query.dtype


@primitive(lambda query, sources: like(query, (query.shape[-2], sources)))
def causal_bias(query, sources: int):
    return _run_bias(torch.ones((query.shape[-2], sources), dtype=torch.bool, device=query.device).tril(), query.dtype)


def _by_products(query, key, value, attn_mask, dropout_p, is_causal, scale):
    """PyTorch's own composition (_scaled_dot_product_attention_math): the root of the scale on query and key, weights
    that are 0 where nothing is attended to."""
    lead = broadcast_shapes(query.shape[:2], key.shape[:2], value.shape[:2])
    rows = (*lead, query.shape[-2], key.shape[-2])
    root = math.sqrt(abs(scale)) if scale is not None else math.sqrt(1.0 / math.sqrt(query.shape[-1]))
    q = _folded(ltorch.mul(query, -root if scale is not None and scale < 0 else root), lead)
    k = _folded(ltorch.mul(transpose(key, -2, -1), root), lead)
    if is_causal:
        attn_mask = causal_bias(query, key.shape[-2])
    elif attn_mask is not None and attn_mask.dtype.category == 0:
        attn_mask = attention_bias(attn_mask, to_torch_dtype(query.dtype))
    scores = ltorch.bmm(q, k)
    if attn_mask is not None:
        scores = reshape(ltorch.add(reshape(scores, rows), attn_mask), scores.shape)
    weights = dropped = ltorch._safe_softmax(scores, -1)
    noise = None
    if dropout_p > 0.0:
        noise = dropout_noise(weights, dropout_p)
        dropped = ltorch.mul(weights, noise)
    v = _folded(value, lead)
    g = yield reshape(ltorch.bmm(dropped, v), (*lead, query.shape[-2], value.shape[-1]))
    g = reshape(g, (v.shape[0], query.shape[-2], value.shape[-1]))
    slope = ltorch.bmm(g, transpose(v, 1, 2))
    slope = ltorch.softmax_backward(slope if noise is None else ltorch.mul(slope, noise), weights, -1, weights.dtype)
    of_query = sum_to(reshape(ltorch.bmm(slope, transpose(k, 1, 2)), (*lead, *query.shape[-2:])), query.shape)
    of_key = sum_to(
        reshape(ltorch.bmm(transpose(q, 1, 2), slope), (*lead, *k.shape[-2:])), (*key.shape[:2], *k.shape[-2:])
    )
    of_value = sum_to(reshape(ltorch.bmm(transpose(dropped, 1, 2), g), (*lead, *value.shape[-2:])), value.shape)
    of_mask = (
        sum_to(reshape(slope, rows), attn_mask.shape) if attn_mask is not None and attn_mask.requires_grad else None
    )
    return (
        ltorch.mul(of_query, -root if scale is not None and scale < 0 else root),
        transpose(ltorch.mul(of_key, root), -2, -1),
        of_value,
        of_mask,
    )


def _attention_rule(symbol):
    """The derivative of attention: of the flash kernel on the CPU, of products and a softmax, or PyTorch's own."""

    def rule(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        if fits_flash_for_cpu(query, key, value, attn_mask, dropout_p, enable_gqa):
            if attn_mask is not None and attn_mask.dtype.category == 0:
                attn_mask = attention_bias(attn_mask, to_torch_dtype(query.dtype))
            out, sums = flash_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            g = yield out
            return flash_attention_backward(g, query, key, value, out, sums, attn_mask, is_causal, scale, enable_gqa)
        if _is_mathematical(query, key, value, attn_mask, enable_gqa) and 0.0 <= dropout_p < 1.0:
            return (yield from _by_products(query, key, value, attn_mask, dropout_p, is_causal, scale))
        return NotImplemented

    symbol.vjp(rule)


_attention_rule(scaled_dot_product_attention)
_attention_rule(attention_with_dropout)


@torch_prim(*compat.operators("_native_multi_head_attention"), name="native_multi_head_attention")
def native_multi_head_attention(
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """The way that nn.MultiheadAttention goes in evaluation without grad; PyTorch has no derivative of it. The weights
    are None where they are not asked for."""
    require(
        len(query.shape) == 3
        and query.shape[2] == embed_dim
        and qkv_weight.shape == (3 * embed_dim, embed_dim)
        and not embed_dim % num_head
    )
    batch, length = query.shape[:2]
    weights = (batch, length, length) if average_attn_weights else (batch, num_head, length, length)
    return like(query), like(query, weights) if need_weights else None


casts_inside(*native_multi_head_attention.torch_functions)


@batching.rule(scaled_dot_product_attention, flash_attention, flash_attention_backward)
def _attention_of_batch(batch: batching.Batch, operation: BoundSymbol):
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
        batched = batch.at(x) if x in batch.moved else ltorch.expand(x, (batch.size, *x.shape))
        return ltorch.reshape(batched, (batch.size * whole, *x.shape[1:]))

    results = operation.sym(*map(merged, operation.args), **operation.kwargs)
    return map_structure(lambda r: ltorch.reshape(r, (batch.size, whole, *r.shape[1:])), results)


def _lower_right_meta(query, key, value, scale=None, enable_gqa=False):
    return _meta(query, key, value, scale=scale, enable_gqa=enable_gqa)


def _lower_right(query, key, value, scale=None, enable_gqa=False):
    rows = ltorch.arange(query.shape[-2], device=query.device) + (key.shape[-2] - query.shape[-2])
    mask = ltorch.unsqueeze(rows, 1) >= ltorch.unsqueeze(ltorch.arange(key.shape[-2], device=query.device), 0)
    options = {} if scale is None else {"scale": scale}
    return attention(query, key, value, mask, 0.0, False, **options, **({"enable_gqa": True} if enable_gqa else {}))


# causal, where the last query is at the position of the last key: of some positions of a sequence, and all before them
lower_right_attention = Symbol(
    "lower_right_attention",
    _lower_right_meta,
    module="ltorch",
    id="lower_right_attention",
    decomposition=_lower_right,
    tags=(OpTags.MATMUL_OP,),
)


def attended_in_blocks(query, key, value, forward, backward):
    """The rule of `lower_right_attention` by kernels: of the keys before all queries, and of those at their positions,
    whose results are joined by the logarithms of the rows' sums (H. Liu et al. 2023, "Ring Attention"). Backwards of
    both read the joined result and sums. forward(query, key, value, is_causal) gives (result, sums of (batch, heads,
    queries)), backward(g, query, key, value, result, sums, is_causal) three gradients."""
    rows = query.shape[-2]
    before = key.shape[-2] - rows
    ranges = [(0, before, False), (before, rows, True)] if before else [(0, rows, True)]
    blocks = [(*(ltorch.narrow(x, -2, at, size) for x in (key, value)), causal) for at, size, causal in ranges]
    results = [forward(query, *block) for block in blocks]
    out, sums = results[0]
    if len(results) == 2:
        sums = ltorch.logaddexp(*(s for _, s in results))
        weighted = (ltorch.mul(o, ltorch.unsqueeze(ltorch.exp(ltorch.sub(s, sums)), -1)) for o, s in results)
        out = ltorch.to(ltorch.add(*weighted), dtype=query.dtype)
    g = yield out
    gradients = [backward(g, query, *block[:2], out, sums, block[2]) for block in blocks]
    if len(gradients) == 1:
        return gradients[0]
    of_query, of_key, of_value = zip(*gradients, strict=True)
    return ltorch.add(*of_query), ltorch.cat(of_key, -2), ltorch.cat(of_value, -2)


def _attention_of_positions(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Queries of this rank's positions attend to the keys of all ranks, which are gathered; under a causal mask to
    those before them."""
    query, key, value = operation.args[:3]
    part, rows = split.part(query), len(query.shape) - 2
    named = functools.partial(splitting.argument, operation)
    mask, scale, is_causal, shared = (named(n) for n in ("attn_mask", "scale", "is_causal", "enable_gqa"))
    if part is None or part.dim != rows or named("dropout_p") or part.axis.groups != 1:
        return None
    if is_causal and (key.shape[-2] != query.shape[-2] or split.part(key) is None):
        return None
    key, value = split.gathered_over(key, part.axis), split.gathered_over(value, part.axis)
    if not is_causal:
        if isinstance(mask, TensorProxy):
            of_rows = len(mask.shape) > 1 and mask.shape[-2] == query.shape[-2] and mask.shape[-2] > 1
            known = split.part(mask)
            if known is not None and (known.axis, known.dim) != (part.axis, len(mask.shape) - 2):
                return None
            cut = split.cut(mask, part.axis, len(mask.shape) - 2) if of_rows else split.copied(mask, part.axis)
            mask = cut if known is None else known.value
        out = operation.sym(part.value, key, value, mask, 0.0, False, **operation.kwargs)
        return splitting.Part(out, part.axis, rows)
    own, done = [], 0
    for end, size in part.axis.ends(query.shape[-2]):
        before = (ltorch.narrow(x, -2, 0, end) for x in (key, value))
        own.append(lower_right_attention(ltorch.narrow(part.value, rows, done, size), *before, scale, bool(shared)))
        done += size
    return splitting.Part(ltorch.cat(own, rows), part.axis, rows)


@splitting.rule(scaled_dot_product_attention)
def _attention_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Heads are computed apart. Dropout would draw one mask on all ranks."""
    if split.shares_positions:
        return _attention_of_positions(split, operation)
    mask, dropout = (
        (*operation.args[3:5], None, 0.0)[:2]
        if len(operation.args) > 4
        else (operation.args[3] if len(operation.args) > 3 else None, 0.0)
    )
    one_for_all = (
        not isinstance(mask, TensorProxy) or not mask.requires_grad and (len(mask.shape) < 3 or mask.shape[-3] == 1)
    )
    return _attention_of_heads(split, operation) if one_for_all and not dropout else None


@splitting.rule(lower_right_attention)
def _attention_of_heads(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    parts = [split.part(p) for p in operation.args[:3]]
    heads = len(operation.output.shape) - 3
    if None in parts or heads < 0 or {(part.axis, part.dim) for part in parts} != {(parts[0].axis, heads)}:
        return None
    return split.computed(
        operation, {p: part.value for p, part in zip(operation.args[:3], parts)}, parts[0].axis, heads
    )
