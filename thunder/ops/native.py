"""Kernels of PyTorch's that programs call by their own names: normalizations with their statistics, dropout with its
mask, and backwards of operations."""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.dtypes import bool8, float32, to_dtype
from thunder.core.proxies import like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import backward, normalization
from thunder.ops.define import LTORCH, alias, composite, torch_prim
from thunder.ops.inplace import overwrite
from thunder.ops.normalization import compute_dtype
from thunder.ops.promotion import to_float
from thunder.ops.torch_types import to_torch_dtype


def _op(name: str, *args, **kwargs):
    return LTORCH[name](*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------
# normalizations


def _native_layer_norm_meta(a, normalized_shape, weight, bias, eps):
    normalization._normalized("layer_norm", a, normalized_shape, weight, bias)
    return backward._layer_norm_meta(a, normalized_shape, weight, bias, eps)


@composite(*compat.operators("native_layer_norm"), meta=_native_layer_norm_meta, autocast="cuda:float32")
def native_layer_norm(a, normalized_shape, weight, bias, eps):
    dims = normalization._normalized("layer_norm", a, normalized_shape, weight, bias)
    x, mean, rstd = normalization._whiten(_op("to", a, dtype=compute_dtype(a.dtype)), dims, eps)
    return _op("to", normalization._scale_and_shift(x, weight, bias), dtype=a.dtype), mean, rstd


native_layer_norm.nondifferentiable = (1, 2)


@native_layer_norm.vjp
def _(a, normalized_shape, weight, bias, eps):
    y, mean, rstd = native_layer_norm(a, normalized_shape, weight, bias, eps)
    g, _, _ = yield y, mean, rstd
    mask = [t is not None and t.requires_grad for t in (a, weight, bias)]
    found = backward.native_layer_norm_backward(g, a, list(normalized_shape), mean, rstd, weight, bias, mask)
    return found[0], None, *found[1:]


@native_layer_norm.samples
def _(make):
    yield make(4, 3), [3], make(3), make(3), 1e-5
    yield make(2, 4, 3), [4, 3], None, None, 1e-3


@native_layer_norm.error_samples
def _(make):
    yield make(4, 3), [4], None, None, 1e-5


def _native_group_norm_meta(a, weight, bias, N, C, HxW, group, eps):
    if C % group or any(t is not None and t.shape != (C,) for t in (weight, bias)):
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(a.shape)} and num_groups={group}"
        )
    narrow = like(
        a,
        (N, group),
        dtype=float32
        if a.device.type == "cpu" and any(t is not None and t.dtype is float32 for t in (weight, bias))
        else a.dtype,
    )
    return like(a), narrow, like(narrow)


@composite(*compat.operators("native_group_norm"), meta=_native_group_norm_meta)
def native_group_norm(a, weight, bias, N, C, HxW, group, eps):
    x = _op("reshape", _op("to", a, dtype=compute_dtype(a.dtype)), (N, group, C // group * HxW))
    x, mean, rstd = normalization._whiten(x, (2,), eps)
    x = normalization._scale_and_shift(
        _op("reshape", x, a.shape), *(normalization._per_channel(a, t) for t in (weight, bias))
    )
    return _op("to", x, dtype=a.dtype), _op("reshape", mean, (N, group)), _op("reshape", rstd, (N, group))


@native_group_norm.samples
def _(make):
    yield make(2, 4, 3), make(4), make(4), 2, 4, 3, 2, 1e-5
    yield make(2, 4, 3, 2), None, None, 2, 4, 6, 4, 1e-5


def _native_batch_norm_meta(a, weight, bias, running_mean, running_var, training, momentum, eps):
    normalization._batch_norm_meta(a, running_mean, running_var, weight, bias, training)
    return normalization._batch_norm_kernel_meta(a, weight, bias, running_mean, running_var, training, momentum, eps)


native_batch_norm = torch_prim(torch.native_batch_norm, name="native_batch_norm")(_native_batch_norm_meta)
native_batch_norm.nondifferentiable = (1, 2)
native_batch_norm.explain = None  # PyTorch's kernel does not look whether there are statistics


@native_batch_norm.vjp
def _(a, weight, bias, running_mean, running_var, training, momentum, eps):
    y, mean, rstd = native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps)
    g, _, _ = yield y, mean, rstd
    mask = [t is not None and t.requires_grad for t in (a, weight, bias)]
    return normalization.native_batch_norm_backward(
        g, a, weight, running_mean, running_var, mean, rstd, training, eps, mask
    )


@native_batch_norm.samples
def _(make):
    yield make(4, 3), make(3), make(3), make(3), make(3, low=0.5, high=2.0), False, 0.1, 1e-5
    yield make(4, 3, 2), make(3), make(3), None, None, True, 0.1, 1e-5


@alias(*compat.operators("native_batch_norm"), over=native_batch_norm)
def _native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps):
    """In training mode the running statistics are written to."""
    if not training or running_mean is None:
        return native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps)
    out, mean, rstd, new_mean, new_var = normalization.native_batch_norm_functional(
        a, running_mean, running_var, weight, bias, momentum, eps
    )
    overwrite(running_mean, new_mean, "running_mean")
    overwrite(running_var, new_var, "running_var")
    return out, mean, rstd


@alias(*compat.operators("_native_batch_norm_legit", "default", "no_stats"))
def _native_batch_norm_legit(a, weight, bias, *args):
    """With running statistics and without: `(training, momentum, eps)`."""
    statistics = args[:-3] or (None, None)
    return _native_batch_norm(a, weight, bias, *statistics, *args[-3:])


@alias(*compat.operators("_native_batch_norm_legit_functional"))
def _native_batch_norm_legit_functional(a, weight, bias, running_mean, running_var, training, momentum, eps):
    if training:
        return normalization.native_batch_norm_functional(a, running_mean, running_var, weight, bias, momentum, eps)
    return (
        *native_batch_norm(a, weight, bias, running_mean, running_var, False, momentum, eps),
        running_mean,
        running_var,
    )


def _channels(a, dtype=None):
    return like(a, (a.shape[1],), compute_dtype(a.dtype) if dtype is None else dtype)


# --- the parts of batch norm over several devices. PyTorch has all but `batch_norm_update_stats` for CUDA alone

batch_norm_stats = torch_prim(torch.batch_norm_stats, name="batch_norm_stats")(
    lambda a, eps: (_channels(a), _channels(a))
)
batch_norm_elemt = torch_prim(torch.batch_norm_elemt, name="batch_norm_elemt")(
    lambda a, weight, bias, mean, invstd, eps: like(a)
)
batch_norm_backward_elemt = torch_prim(torch.batch_norm_backward_elemt, name="batch_norm_backward_elemt")(
    lambda grad_out, a, mean, invstd, weight, sum_dy, sum_dy_xmu, count: like(a)
)


@torch_prim(torch.batch_norm_backward_reduce)
def batch_norm_backward_reduce(grad_out, a, mean, invstd, weight, input_g, weight_g, bias_g):
    sums = (_channels(a), _channels(a)) if input_g else (None, None)
    return (
        *sums,
        (like(weight) if weight_g and weight is not None else None),
        (like(weight) if bias_g and weight is not None else None),
    )


def _gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
    return _channels(a, mean.dtype), _channels(a, mean.dtype)


def _gather(name: str) -> None:
    function = getattr(torch, name)

    def run(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        running = [None if t is None else t.clone() for t in (running_mean, running_var)]
        return *function(a, mean, invstd, *running, momentum, eps, counts), *running

    def meta(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        return *_gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts), *(
            None if t is None else like(t) for t in (running_mean, running_var)
        )

    symbol = torch_prim(fn=run, name=name)(meta)

    @alias(function)
    def call(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        """The running statistics are written to."""
        mean_, invstd_, *new = symbol(a, mean, invstd, running_mean, running_var, momentum, eps, counts)
        for target, value in zip((running_mean, running_var), new, strict=True):
            if target is not None:
                overwrite(target, value, name)
        return mean_, invstd_


_gather("batch_norm_gather_stats")
_gather("batch_norm_gather_stats_with_counts")


def _run_update_stats(a, running_mean, running_var, momentum):
    running = [None if t is None else t.clone() for t in (running_mean, running_var)]
    return *torch.batch_norm_update_stats(a, *running, momentum), *running


@torch_prim(fn=_run_update_stats)
def batch_norm_update_stats(a, running_mean, running_var, momentum):
    """Mean and variance of the batch, and what the running ones become."""
    mixed = a.device.type != "cpu" or any(t is not None and t.dtype is float32 for t in (running_mean, running_var))
    kept = _channels(a, None if mixed else a.dtype)
    return kept, like(kept), *(None if t is None else like(t) for t in (running_mean, running_var))


@batch_norm_update_stats.samples
def _(make):
    yield make(4, 3, 2), make(3), make(3, low=0.5, high=2.0), 0.1


@alias(torch.batch_norm_update_stats)
def _batch_norm_update_stats(a, running_mean, running_var, momentum):
    mean, var, *new = batch_norm_update_stats(a, running_mean, running_var, momentum)
    for target, value in zip((running_mean, running_var), new, strict=True):
        if target is not None:
            overwrite(target, value, "batch_norm_update_stats")
    return mean, var


# ----------------------------------------------------------------------------------------------------------------
# softmax


@composite(*compat.operators("_safe_softmax"))
def _safe_softmax(a, dim, dtype=None):
    """softmax, 0 where all of a row is -inf."""
    out = LTORCH["softmax"](a, dim, dtype=dtype)
    hidden = _op("all", _op("eq", a, float("-inf")), dim, True)
    return _op("where", hidden, 0.0, out)


_safe_softmax.autocast_when = lambda kind, args, kwargs: False


@_safe_softmax.vjp
def _(a, dim, dtype=None):
    y = _safe_softmax(a, dim, dtype)
    g = yield y
    return (_op("to", backward.softmax_backward(g, y, dim, y.dtype), dtype=a.dtype),)


@_safe_softmax.samples
def _(make):
    yield make(4, 3), 1
    yield make(4, 3).masked_fill(torch.tensor([[True], [False], [True], [False]]), float("-inf")), -1


def _of_softmax(grad_output, output, dim, input_dtype):
    if grad_output.shape != output.shape:
        raise RuntimeError(f"softmax_backward: {list(grad_output.shape)} and {list(output.shape)} differ")
    return like(grad_output, dtype=to_dtype(input_dtype))


@composite(*compat.operators("_softmax_backward_data"), meta=_of_softmax, name="softmax_backward")
def softmax_backward(grad_output, output, dim, input_dtype):
    slope = grad_output * output
    return _op("to", slope - output * _op("sum", slope, dim, True), dtype=to_torch_dtype(input_dtype))


@composite(*compat.operators("_log_softmax_backward_data"), meta=_of_softmax, name="log_softmax_backward")
def log_softmax_backward(grad_output, output, dim, input_dtype):
    return _op(
        "to", grad_output - _op("exp", output) * _op("sum", grad_output, dim, True), dtype=to_torch_dtype(input_dtype)
    )


for _symbol in (softmax_backward, log_softmax_backward):

    @_symbol.samples
    def _(make):
        given, y = make(4, 3), make(4, 3)
        yield given, y.softmax(1), 1, y.dtype


# ----------------------------------------------------------------------------------------------------------------
# backwards of other operations


def _row(name: str, operator: str, meta, samples) -> Symbol:
    symbol = torch_prim(compat.kernel(operator), *compat.operators(operator), name=name)(meta)
    symbol.samples(samples)
    return symbol


def _dropout_backward_samples(make):
    yield make(4, 3), make(4, 3, dtype=torch.bool), 2.0


def _embedding_backward_samples(make):
    yield make(3, 4), torch.tensor([0, 2, 2]), 5, -1, False, False
    yield make(3, 4), torch.tensor([0, 2, 2]), 5, 2, False, False


def _nll_backward_samples(make):
    yield make(), make(4, 3), torch.tensor([0, 1, 2, 1]), make(3), 1, -100, make()
    yield make(4), make(4, 3), torch.tensor([0, 1, 2, 1]), None, 0, 1, make()


def _pool_backward_samples(make):
    yield make(2, 3, 2, 2), make(2, 3, 5, 4)


def _embedding_backward_meta(g, indices, num_weights, padding_idx, scale_grad_by_freq, sparse):
    if sparse:
        raise NotImplementedError(
            "embedding_backward with sparse=True gives a sparse tensor, of which thunder knows no type"
        )
    return like(g, (num_weights, g.shape[-1]))


native_dropout_backward = _row(
    "native_dropout_backward",
    "native_dropout_backward",
    lambda g, mask, scale: like(g, dtype=to_float(g.dtype)),
    _dropout_backward_samples,
)
embedding_backward = _row(
    "embedding_backward", "embedding_backward", _embedding_backward_meta, _embedding_backward_samples
)
nll_loss_backward = _row(
    "nll_loss_backward", "nll_loss_backward",
    lambda g, a, target, weight, reduction, ignore_index, total_weight: like(a), _nll_backward_samples
)  # fmt: skip
adaptive_avg_pool2d_backward = _row(
    "adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward", lambda g, a: like(a), _pool_backward_samples
)


@native_dropout_backward.vjp
def _(g, mask, scale):
    again = yield native_dropout_backward(g, mask, scale)
    return (native_dropout_backward(again, mask, scale),)


_name = "max_pool2d_with_indices_backward"
max_pool2d_with_indices_backward = torch_prim(compat.kernel(_name), *compat.operators(_name), name=_name)(
    lambda g, a, kernel_size, stride, padding, dilation, ceil_mode, indices: like(a)
)


@max_pool2d_with_indices_backward.samples
def _(make):
    a = make(1, 2, 4, 4)
    if a.is_floating_point():
        y, indices = torch.nn.functional.max_pool2d(a, 2, return_indices=True)
        yield make(*y.shape), a, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


# ----------------------------------------------------------------------------------------------------------------
# dropout with its mask


def _native_dropout_meta(a, p, train):
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return like(a), like(a, dtype=bool8)


native_dropout = torch_prim(
    *compat.operators("native_dropout"), name="native_dropout", tags=(OpTags.RANDOM_OP, OpTags.DONT_DCE)
)(_native_dropout_meta)


@native_dropout.vjp
def _(a, p, train):
    y, mask = native_dropout(a, p, train)
    g, _ = yield y, mask
    scale = 1.0 if train is False else 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return (native_dropout_backward(g, mask, scale),)


@native_dropout.samples
def _(make):
    yield make(4, 3), 0.4, True
    yield make(4, 3), 0.4, False


# ----------------------------------------------------------------------------------------------------------------
# attention, products


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
    if (
        len(query.shape) != 3
        or query.shape[2] != embed_dim
        or qkv_weight.shape != (3 * embed_dim, embed_dim)
        or embed_dim % num_head
    ):
        raise RuntimeError(
            f"expected 3-D `query` of width {embed_dim} and heads and weights that fit, got {list(query.shape)} and "
            f"{list(qkv_weight.shape)}"
        )
    batch, length = query.shape[:2]
    weights = (batch, length, length) if average_attn_weights else (batch, num_head, length, length)
    return like(query), like(query, weights) if need_weights else None


@native_multi_head_attention.samples
def _(make):
    q = make(2, 3, 8)
    for options in ((True, True), (True, False), (False, True)):
        yield q, q, q, 8, 2, make(24, 8), make(24), make(8, 8), make(8), None, *options


@torch_prim(*compat.operators("_grouped_mm"), name="_grouped_mm")
def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    """Products of groups of rows (2-D and 3-D), of columns (3-D and 2-D), of either side's inner dimension (2-D twice),
    or of batches; offs: where groups end."""
    ranks = len(a.shape), len(b.shape)
    if (
        not set(ranks) <= {2, 3}
        or a.dtype is not b.dtype
        or (offs is None) != (ranks == (3, 3))
        or a.shape[-1] != b.shape[-2]
        and ranks != (2, 2)
    ):
        raise RuntimeError(
            "grouped_mm: matrices of 2 or 3 dimensions, with offsets where one has 2, are expected; got "
            f"{list(a.shape)} and {list(b.shape)}"
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


@_grouped_mm.samples
def _(make):
    ends = torch.tensor([4, 16], dtype=torch.int32)
    yield make(2, 8, 16), make(2, 16, 8)
    yield make(16, 8), make(2, 8, 16), ends
    yield make(8, 16), make(16, 8), ends
    yield make(2, 8, 8), make(8, 16), ends


@_grouped_mm.error_samples
def _(make):
    yield make(8, 16), make(2, 16, 8)
