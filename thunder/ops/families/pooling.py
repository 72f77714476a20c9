"""Pooling: average and maximum over windows, and to a given size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder.core.dtypes import int64
from thunder.core.proxies import like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import backward, ltorch
from thunder.ops.registry import LTORCH, alias, torch_prim
from thunder.ops.rules import kernels, operands
from thunder.ops.shape_rules import pair, require

_TAGS = (OpTags.REDUCTION_OP,)


def _windows(a, rank: int, kernel_size, stride, padding, dilation, ceil_mode: bool) -> tuple:
    """The shape of a pool's result. Raises PyTorch's errors where windows do not fit."""
    require(len(a.shape) in (rank + 1, rank + 2))
    empty_stride = stride is None or (isinstance(stride, (tuple, list)) and not stride)
    k, p, d = pair(kernel_size, rank), pair(padding, rank), pair(dilation, rank)
    s = k if empty_stride else pair(stride, rank)
    spatial = []
    for i, n in enumerate(a.shape[-rank:]):
        require(p[i] * 2 <= k[i])
        require(s[i] != 0)
        room = n + 2 * p[i] - d[i] * (k[i] - 1) - 1 + (s[i] - 1 if ceil_mode else 0)
        length = room // s[i] + 1
        if ceil_mode and (length - 1) * s[i] >= n + p[i]:
            length = length - 1
        require(length > 0)
        spatial.append(length)
    return (*a.shape[:-rank], *spatial)


def _avg_pool(rank: int, function, **options):
    """Defines `avg_pool{rank}d`."""
    name = f"avg_pool{rank}d"
    if rank == 1:

        def meta(a, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
            return like(a, _windows(a, rank, kernel_size, stride, padding, 1, ceil_mode))
    else:

        def meta(
            a, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
        ):
            return like(a, _windows(a, rank, kernel_size, stride, padding, 1, ceil_mode))

    def without_stride(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return ((*args[:2], args[1], *args[3:]) if len(args) > 2 and args[2] is None else args), kwargs

    return torch_prim(function, name=name, tags=_TAGS, canonicalize=without_stride, **options)(meta)


avg_pool1d = _avg_pool(1, torch.avg_pool1d)
avg_pool2d = _avg_pool(2, F.avg_pool2d)
avg_pool3d = _avg_pool(3, F.avg_pool3d, autocast="cpu:float32")


def _max_pool(rank: int, **options):
    """Defines `max_pool{rank}d`, with indices and without."""
    name = f"max_pool{rank}d"

    def meta(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        return like(a, _windows(a, rank, kernel_size, stride, padding, dilation, ceil_mode))

    def with_indices_meta(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        shape = _windows(a, rank, kernel_size, stride, padding, dilation, ceil_mode)
        return like(a, shape), like(a, shape, int64)

    def own_stride(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kwargs = {k: v for k, v in kwargs.items() if k != "return_indices"}
        return ((*args[:2], args[1], *args[3:6]) if len(args) > 2 and args[2] is None else args[:6]), kwargs

    builtin = getattr(torch, name)
    values = torch_prim(builtin, name=name, tags=_TAGS, canonicalize=own_stride, **options)(meta)
    both = torch_prim(
        getattr(F, f"{name}_with_indices"), name=f"{name}_with_indices", tags=_TAGS, canonicalize=own_stride
    )(with_indices_meta)

    if rank == 1:
        alias(torch.max_pool1d_with_indices)(both)

    return values, both


max_pool1d, max_pool1d_with_indices = _max_pool(1)
max_pool2d, max_pool2d_with_indices = _max_pool(2)
max_pool3d, max_pool3d_with_indices = _max_pool(3, autocast="cpu:float32")


def _adaptive_shape(a, output_size, rank: int) -> tuple:
    require(len(a.shape) in (rank + 1, rank + 2))
    sizes = pair(output_size, rank)
    return (*a.shape[:-rank], *(n if m is None else m for n, m in zip(a.shape[-rank:], sizes, strict=True)))


def _adaptive_avg_pool(rank: int, function, **options):
    name = f"adaptive_avg_pool{rank}d"

    def meta(a, output_size):
        return like(a, _adaptive_shape(a, output_size, rank))

    return torch_prim(function, name=name, tags=_TAGS, **options)(meta)


adaptive_avg_pool1d = _adaptive_avg_pool(1, torch.adaptive_avg_pool1d)
adaptive_avg_pool2d = _adaptive_avg_pool(2, F.adaptive_avg_pool2d)
adaptive_avg_pool3d = _adaptive_avg_pool(3, F.adaptive_avg_pool3d, autocast="cpu:float32")


def _adaptive_max_pool(rank: int, **options) -> None:
    """Defines `adaptive_max_pool{rank}d`, with indices and without."""
    name = f"adaptive_max_pool{rank}d"

    def meta(a, output_size):
        shape = _adaptive_shape(a, output_size, rank)
        return like(a, shape), like(a, shape, int64)

    both = torch_prim(
        getattr(F, f"{name}_with_indices"),
        name=f"{name}_with_indices",
        tags=_TAGS,
        canonicalize=lambda args, kwargs: (args[:2], {}),
        **options,
    )(meta)

    if rank == 1:
        alias(torch.adaptive_max_pool1d)(both)


_adaptive_max_pool(1)
_adaptive_max_pool(2)
_adaptive_max_pool(3, autocast="cpu:float32")


# ----------------------------------------------------------------------------------------------------------------
# derivatives: PyTorch's kernels


def _kernel(name: str, public: str = ""):
    return backward.kernel(name, "default", lambda g, a, *options: like(a), public=public)


_AVERAGE = {rank: _kernel(f"avg_pool{rank}d_backward") for rank in (2, 3)}
_MAXIMUM = {rank: _kernel(name, name) for rank in (2, 3) for name in (f"max_pool{rank}d_with_indices_backward",)}
_ADAPTIVE_AVERAGE = {
    rank: _kernel(f"_adaptive_avg_pool{rank}d_backward", f"adaptive_avg_pool{rank}d_backward") for rank in (2, 3)
}
_ADAPTIVE_MAXIMUM = {rank: _kernel(f"adaptive_max_pool{rank}d_backward") for rank in (2, 3)}
for _rank in (2, 3):
    operands.holds.set(operands.of_sizes(_rank), _ADAPTIVE_AVERAGE[_rank], _ADAPTIVE_MAXIMUM[_rank])
    operands.holds.set(operands.of_windows(_rank), _MAXIMUM[_rank])
    operands.by_values.add(_ADAPTIVE_MAXIMUM[_rank], _MAXIMUM[_rank])


def _steps(stride, kernel_size, rank: int) -> list:
    return list(
        pair(kernel_size if stride is None or (isinstance(stride, (tuple, list)) and not stride) else stride, rank)
    )


def _average_rule(symbol: Symbol, rank: int) -> None:
    """Gives an average pool its derivative: PyTorch's backward kernel."""

    def rule(a, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        options = (kernel_size, _steps(stride, kernel_size, rank), padding, ceil_mode, count_include_pad)
        g = yield symbol(a, *options, *(() if divisor_override is None else (divisor_override,)))
        return (
            _AVERAGE[rank](
                g,
                a,
                list(pair(kernel_size, rank)),
                options[1],
                list(pair(padding, rank)),
                ceil_mode,
                count_include_pad,
                divisor_override,
            ),
        )

    symbol.vjp(rule)


def _maximum_rule(values: Symbol, both: Symbol, rank: int) -> None:
    """Gives a maximum pool its derivative: the gradient is scattered to the indices of the maxima."""

    def gradient(g, a, indices, kernel_size, stride, padding, dilation, ceil_mode):
        k, p, d = (list(pair(x, rank)) for x in (kernel_size, padding, dilation))
        return _MAXIMUM[rank](g, a, k, _steps(stride, kernel_size, rank), p, d, ceil_mode, indices)

    def of_values(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        options = (kernel_size, _steps(stride, kernel_size, rank), padding, dilation, ceil_mode)
        y, indices = both(a, *options)
        g = yield y
        return (gradient(g, a, indices, *options),)

    def of_both(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        options = (kernel_size, _steps(stride, kernel_size, rank), padding, dilation, ceil_mode)
        y, indices = both(a, *options)
        g, _ = yield y, indices
        return (gradient(g, a, indices, *options),)

    values.vjp(of_values)
    both.vjp(of_both)


_average_rule(avg_pool2d, 2)
_average_rule(avg_pool3d, 3)
_maximum_rule(max_pool2d, max_pool2d_with_indices, 2)
_maximum_rule(max_pool3d, max_pool3d_with_indices, 3)


def _row(x):
    """One number for the dimension that a row of an image has besides its length."""
    return x[0] if isinstance(x, (tuple, list)) else x


@avg_pool1d.vjp
def _(a, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """As PyTorch: the rows of an image."""
    k, s, p = [1, _row(kernel_size)], [1, _steps(stride, kernel_size, 1)[0]], [0, _row(padding)]
    x = ltorch.unsqueeze(a, -2)
    g = yield ltorch.squeeze(avg_pool2d(x, k, s, p, ceil_mode, count_include_pad), -2)
    return (ltorch.squeeze(_AVERAGE[2](ltorch.unsqueeze(g, -2), x, k, s, p, ceil_mode, count_include_pad, None), -2),)


def _max_pool_of_row(a, kernel_size, stride, padding, dilation, ceil_mode):
    x = ltorch.unsqueeze(a, -2)
    k, s, p, d = [1, _row(kernel_size)], [1, _steps(stride, kernel_size, 1)[0]], [0, _row(padding)], [1, _row(dilation)]
    y, indices = max_pool2d_with_indices(x, k, s, p, d, ceil_mode)

    def gradient(g):
        return ltorch.squeeze(_MAXIMUM[2](ltorch.unsqueeze(g, -2), x, k, s, p, d, ceil_mode, indices), -2)

    return ltorch.squeeze(y, -2), ltorch.squeeze(indices, -2), gradient


@max_pool1d.vjp
def _(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    y, _, gradient = _max_pool_of_row(a, kernel_size, stride, padding, dilation, ceil_mode)
    g = yield y
    return (gradient(g),)


@max_pool1d_with_indices.vjp
def _(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    y, indices, gradient = _max_pool_of_row(a, kernel_size, stride, padding, dilation, ceil_mode)
    g, _ = yield y, indices
    return (gradient(g),)


def _adaptive_average_rule(symbol: Symbol, rank: int) -> None:
    def rule(a, output_size):
        g = yield symbol(a, output_size)
        if all(type(n) is int and n == 1 for n in g.shape[-rank:]):  # PyTorch takes the mean
            return (ltorch.expand(g, a.shape) / math.prod(a.shape[-rank:]),)
        return (_ADAPTIVE_AVERAGE[rank](g, a),)

    symbol.vjp(rule)


_adaptive_average_rule(adaptive_avg_pool2d, 2)
_adaptive_average_rule(adaptive_avg_pool3d, 3)


@adaptive_avg_pool1d.vjp
def _(a, output_size):
    x = ltorch.unsqueeze(a, -2)
    n = _row(output_size)
    g = yield ltorch.squeeze(adaptive_avg_pool2d(x, (1, n)), -2)
    g = ltorch.unsqueeze(g, -2)
    gradient = ltorch.expand(g, x.shape) / x.shape[-1] if type(n) is int and n == 1 else _ADAPTIVE_AVERAGE[2](g, x)
    return (ltorch.squeeze(gradient, -2),)


def _adaptive_maximum_rule(symbol: Symbol, rank: int) -> None:
    def rule(a, output_size):
        y, indices = symbol(a, output_size)
        g, _ = yield y, indices
        return (_ADAPTIVE_MAXIMUM[rank](g, a, indices),)

    symbol.vjp(rule)


for _rank in (2, 3):
    _adaptive_maximum_rule(LTORCH[f"adaptive_max_pool{_rank}d_with_indices"], _rank)


# those of rows are of images of one row, whose strides decide
kernels.layout.set("own", *(LTORCH[f"{n}_pool1d"] for n in ("avg", "max", "adaptive_avg")))
kernels.layout.set("own", *(LTORCH[f"{n}_pool1d_with_indices"] for n in ("max", "adaptive_max")))
kernels.layout.set(
    "memory format", avg_pool2d, max_pool2d, max_pool2d_with_indices, max_pool3d, max_pool3d_with_indices,
    adaptive_avg_pool2d, LTORCH["adaptive_max_pool2d_with_indices"],
)  # fmt: skip
kernels.layout.set("row-major", avg_pool3d, adaptive_avg_pool3d, LTORCH["adaptive_max_pool3d_with_indices"])
kernels.layout.set(
    "memory format of the second", _AVERAGE[2], *_MAXIMUM.values(), _ADAPTIVE_AVERAGE[2], _ADAPTIVE_MAXIMUM[2]
)
kernels.layout.set("row-major", _AVERAGE[3], _ADAPTIVE_AVERAGE[3], _ADAPTIVE_MAXIMUM[3])
