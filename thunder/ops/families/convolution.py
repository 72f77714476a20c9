"""Convolutions in one, two and three dimensions, and transposed ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.proxies import TensorProxy, element_count, like, number_value
from thunder.core.symbol import OpTags, Symbol, current_recorder
from thunder.ops import backward, ltorch, prims
from thunder.ops.families.shape import squeeze, unsqueeze
from thunder.ops.promotion import same_device
from thunder.ops.registry import LTORCH, alias, composite, prim
from thunder.ops.rules import derivatives, kernels
from thunder.ops.shape_rules import pair, require

_TAGS = (OpTags.MATMUL_OP,)


def _length(n, kernel, stride, padding, dilation):
    """Places where a window fits into n elements with `padding` more on both sides together."""
    out = (
        (n + padding - dilation * (kernel - 1) - 1) // stride + 1
        if stride != 1
        else n + padding - dilation * (kernel - 1)
    )
    require(out > 0)
    return out


def _fit(a, weight, bias, channels_in, channels_out, groups: int, rank: int) -> None:
    require(len(weight.shape) == rank + 2 and len(a.shape) in (rank + 1, rank + 2))
    have = a.shape[-rank - 1]
    require(have is channels_in or have == channels_in)
    require(a.dtype is weight.dtype and (bias is None or bias.dtype is a.dtype))
    require(bias is None or bias.shape == (channels_out,))
    same_device(a, weight)


def _channels_out(channels_in, weight):
    """PyTorch gives back no channels where none come in."""
    return 0 if type(channels_in) is int and channels_in == 0 else weight.shape[0]


@prim(torch.convolution, tags=_TAGS)
def convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """A convolution of a batch; stride and the rest have one number for each spatial dimension."""
    spatial = []
    for i, (n, k) in enumerate(zip(a.shape[2:], weight.shape[2:], strict=True)):
        if transposed:
            spatial.append((n - 1) * stride[i] - 2 * padding[i] + dilation[i] * (k - 1) + output_padding[i] + 1)
        else:
            spatial.append(_length(n, k, stride[i], 2 * padding[i], dilation[i]))
    return like(
        a, (a.shape[0], weight.shape[1] * groups if transposed else _channels_out(a.shape[1], weight), *spatial)
    )


@alias(torch.convolution)
def convolution_alias(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """`torch.convolution` as the convolution that it is, of that number of dimensions."""
    rank = len(weight.shape) - 2
    spread = [pair(x, rank) for x in (stride, padding, dilation, output_padding)]
    symbol = LTORCH[f"conv_transpose{rank}d" if transposed else f"conv{rank}d"]
    args = (
        a,
        weight,
        bias,
        *((spread[0], spread[1], spread[3], groups, spread[2]) if transposed else (*spread[:3], groups)),
    )
    recorder = current_recorder()
    if a.device.type != "cpu" or recorder is None or recorder.context.autocast is None:
        return symbol(*args)
    context = recorder.context
    # which casts the arguments of conv1d and the others on the CPU, and not of this one
    recorder.context = context.replace(autocast=None)
    try:
        return symbol(*args)
    finally:
        recorder.context = context


def _batched(a, rank: int):
    return (unsqueeze(a, 0), True) if len(a.shape) == rank + 1 else (a, False)


def _conv(rank: int) -> Symbol:
    """Defines `conv{rank}d`."""
    name = f"conv{rank}d"

    def sides(weight, stride, padding, dilation) -> list[tuple]:
        """Padding before and after, for each spatial dimension."""
        if not isinstance(padding, str):
            return [(p, p) for p in pair(padding, rank)]
        if padding == "valid":
            return [(0, 0)] * rank
        require(padding == "same")
        require(not any(s != 1 for s in pair(stride, rank)))
        totals = [d * (k - 1) for d, k in zip(pair(dilation, rank), weight.shape[2:], strict=True)]
        return [(t // 2, t - t // 2) for t in totals]

    def meta(a, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        if len(weight.shape) > 1:
            _fit(a, weight, bias, weight.shape[1] * groups, weight.shape[0], groups, rank)
        padded = sides(weight, stride, padding, dilation)
        steps, gaps = pair(stride, rank), pair(dilation, rank)
        spatial = tuple(
            [
                _length(n, k, steps[i], sum(padded[i]), gaps[i])
                for i, (n, k) in enumerate(zip(a.shape[-rank:], weight.shape[2:], strict=True))
            ]
        )
        return like(a, (*a.shape[: -rank - 1], _channels_out(a.shape[-rank - 1], weight), *spatial))

    def decomposition(a, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        a, single = _batched(a, rank)
        padded = sides(weight, stride, padding, dilation)
        if any(lo != hi for lo, hi in padded):
            a = prims.pad(a, 0, ((0, 0), (0, 0), *((0, hi - lo) for lo, hi in padded)))
        before = tuple(lo for lo, _ in padded)
        out = convolution(a, weight, bias, pair(stride, rank), before, pair(dilation, rank), False, (0,) * rank, groups)
        return squeeze(out, 0) if single else out

    return composite(getattr(torch, name), name=name, meta=meta, autocast="lower", tags=_TAGS)(decomposition)


conv1d, conv2d, conv3d = map(_conv, (1, 2, 3))


@composite(torch.conv_tbc, autocast="lower")
def conv_tbc(a, weight, bias, pad=0):
    """A convolution along the first dimension: time, batch, channels."""
    require(len(a.shape) == len(weight.shape) == 3 and len(bias.shape) == 1)
    out = ltorch.conv1d(ltorch.permute(a, (1, 2, 0)), ltorch.permute(weight, (2, 1, 0)), bias, 1, pad)
    return ltorch.permute(out, (2, 0, 1))


_conv_tbc_backward = backward.kernel(
    "conv_tbc_backward", "default", lambda g, a, weight, bias, pad: (like(a), like(weight), like(bias))
)


@conv_tbc.vjp
def _(a, weight, bias, pad=0):
    g = yield conv_tbc(a, weight, bias, pad)
    return _conv_tbc_backward(g, a, weight, bias, pad)


def _conv_transpose(rank: int) -> Symbol:
    """Defines `conv_transpose{rank}d`."""
    name = f"conv_transpose{rank}d"

    def meta(a, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        if len(weight.shape) > 1:
            _fit(a, weight, bias, weight.shape[0], weight.shape[1] * groups, groups, rank)
        s, p, o, d = (pair(x, rank) for x in (stride, padding, output_padding, dilation))
        spatial = []
        for i, (n, k) in enumerate(zip(a.shape[-rank:], weight.shape[2:], strict=True)):
            require(o[i] < s[i] or o[i] < d[i])
            spatial.append((n - 1) * s[i] - 2 * p[i] + d[i] * (k - 1) + o[i] + 1)
        return like(a, (*a.shape[: -rank - 1], weight.shape[1] * groups, *spatial))

    def decomposition(a, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        a, single = _batched(a, rank)
        out = convolution(
            a,
            weight,
            bias,
            *(pair(x, rank) for x in (stride, padding, dilation)),
            True,
            pair(output_padding, rank),
            groups,
        )
        return squeeze(out, 0) if single else out

    return composite(getattr(torch, name), name=name, meta=meta, autocast="lower", tags=_TAGS)(decomposition)


conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_conv_transpose, (1, 2, 3))


@composite(F.unfold, name="im2col")
def im2col(a, kernel_size, dilation=1, padding=0, stride=1):
    """The decomposition of `unfold`: one column for each window, as views of a padded input."""
    require(len(a.shape) in (3, 4))
    k, d, p, s = (pair(x, 2) for x in (kernel_size, dilation, padding, stride))
    a, single = _batched(a, 2)
    x = ltorch.pad(a, (p[1], p[1], p[0], p[0]))
    for i in (0, 1):  # windows of each spatial dimension, every d-th of their elements
        x = ltorch.unfold(x, 2 + i, d[i] * (k[i] - 1) + 1, s[i])
        x = ltorch.getitem(x, (..., slice(None, None, d[i])))
    x = ltorch.permute(x, (0, 1, 4, 5, 2, 3))
    out = ltorch.reshape(x, (x.shape[0], x.shape[1] * k[0] * k[1], x.shape[4] * x.shape[5]))
    return squeeze(out, 0) if single else out


@composite(F.fold, name="col2im")
def col2im(a, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """The decomposition of `fold`: each column is added to the window that it came from."""
    (h, w), k, d, p, s = (pair(x, 2) for x in (output_size, kernel_size, dilation, padding, stride))
    require(len(a.shape) in (2, 3) and a.shape[-2] % (k[0] * k[1]) == 0)
    a, single = (unsqueeze(a, 0), True) if len(a.shape) == 2 else (a, False)
    n, channels = a.shape[0], a.shape[1] // (k[0] * k[1])
    height, width = h + 2 * p[0], w + 2 * p[1]
    where = ltorch.reshape(ltorch.arange(height * width, device=a.device), (1, 1, height, width))
    for i in (0, 1):
        where = ltorch.getitem(ltorch.unfold(where, 2 + i, d[i] * (k[i] - 1) + 1, s[i]), (..., slice(None, None, d[i])))
    where = ltorch.reshape(ltorch.permute(where, (0, 1, 4, 5, 2, 3)), (1, 1, -1))
    flat = ltorch.reshape(a, (n, channels, -1))
    empty = ltorch.zeros((n, channels, height * width), device=a.device, dtype=a.dtype)
    out = ltorch.reshape(
        ltorch.scatter_add(empty, 2, ltorch.expand(where, flat.shape), flat), (n, channels, height, width)
    )
    out = ltorch.getitem(out, (..., slice(p[0], p[0] + h), slice(p[1], p[1] + w)))
    return squeeze(out, 0) if single else out


# ----------------------------------------------------------------------------------------------------------------
# derivatives


def _convolution_backward_meta(
    g, a, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
):
    return (
        like(a) if mask[0] else None,
        like(weight) if mask[1] else None,
        like(weight, tuple(bias_sizes)) if mask[2] else None,
    )


convolution_backward = backward.kernel("convolution_backward", "default", _convolution_backward_meta, tags=_TAGS)


def backward_with_bias_apart(g, a, weight, bias_sizes, *options):
    """The gradients of `convolution_backward`, that of the bias as a sum of the cotangent."""
    *options, mask = options
    of_a, of_weight, _ = convolution_backward(g, a, weight, None, *options, [*mask[:2], False])
    return of_a, of_weight, ltorch.sum(g, [0, *range(2, len(g.shape))])


def _with_gradients(
    call, a, weight, bias, rank: int, stride, padding, dilation, transposed: bool, output_padding, groups: int
):
    """The result of `call` and the cotangents of a, weight and bias by PyTorch's kernel for all three; a batch is made
    of a single input, as PyTorch does."""
    mask = [a.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    x, single = _batched(a, rank)
    g = yield squeeze(call(x), 0) if single else call(a)
    sizes = None if bias is None else list(bias.shape)
    spread = [list(pair(n, rank)) for n in (stride, padding, dilation, output_padding)]
    ga, gw, gb = convolution_backward(
        unsqueeze(g, 0) if single else g, x, weight, sizes, *spread[:3], transposed, spread[3], groups, mask
    )
    return (squeeze(ga, 0) if single and ga is not None else ga), gw, gb


def _conv_rule(symbol: Symbol, rank: int):
    """The derivative of a convolution: PyTorch's backward kernel. Padding that PyTorch adds on one side alone is left
    to PyTorch."""

    def rule(a, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        said_padding = padding
        if isinstance(padding, str):
            totals = [
                d * (k - 1) if padding == "same" else 0
                for d, k in zip(pair(dilation, rank), weight.shape[2:], strict=True)
            ]
            if any(type(t) is not int or t % 2 for t in totals):  # PyTorch pads one side more and convolves then
                return NotImplemented
            padding = [t // 2 for t in totals]
        return (
            yield from _with_gradients(
                lambda x: symbol(x, weight, bias, stride, said_padding, dilation, groups),
                a,
                weight,
                bias,
                rank,
                stride,
                padding,
                dilation,
                False,
                0,
                groups,
            )
        )

    symbol.vjp(rule)


def _conv_transpose_rule(symbol: Symbol, rank: int):
    """The derivative of a transposed convolution: PyTorch's backward kernel."""

    def rule(a, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        return (
            yield from _with_gradients(
                lambda x: symbol(x, weight, bias, stride, padding, output_padding, groups, dilation), a, weight, bias,
                    rank, stride, padding, dilation, True,
                output_padding, groups,
            )
        )  # fmt: skip

    symbol.vjp(rule)


for _rank, _plain, _transposed in (
    (1, conv1d, conv_transpose1d),
    (2, conv2d, conv_transpose2d),
    (3, conv3d, conv_transpose3d),
):
    _conv_rule(_plain, _rank)
    derivatives.of_complex.set("PyTorch's", _plain, _transposed)  # which composes it of convolutions of real numbers
    _conv_transpose_rule(_transposed, _rank)


# ---------------------------------------------------------------------------------------------------------------- how
# much they compute


def _multiply_adds(x: TensorProxy, weight: TensorProxy) -> int:
    """x: the result, under transposition the input: each of its elements meets the kernels of a group's
    channels."""
    return element_count(x) * element_count(weight) // max(1, number_value(weight.shape[0]))


cost.rules.set(Cost(multiply_adds=lambda b: _multiply_adds(b.output, b.args[1])), conv1d, conv2d, conv3d)
cost.rules.set(
    Cost(multiply_adds=lambda b: _multiply_adds(b.args[0], b.args[1])),
    conv_transpose1d, conv_transpose2d, conv_transpose3d,
)  # fmt: skip
cost.rules.set(
    Cost(multiply_adds=lambda b: _multiply_adds(b.args[0] if b.args[6] else b.output, b.args[1])), convolution
)
cost.rules.set(
    Cost(
        multiply_adds=lambda b: sum(b.args[10][:2]) * _multiply_adds(b.args[1] if b.args[7] else b.args[0], b.args[2])
    ),
    convolution_backward,
)


# ----------------------------------------------------------------------------------------------------------------
# the derivative of the backward


def _convolution_twice(
    c, g, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
):
    """The kernel computes the gradients of <g, convolution(x, weight) + bias>, which is linear in each of them."""
    of_x, of_weight, of_bias = c
    options = stride, padding, dilation, transposed, output_padding, groups

    def convolved(a, w):
        return convolution_alias(a, w, None, *options)

    terms = []
    if of_x is not None:
        terms.append(convolved(of_x, weight))
    if of_weight is not None:
        terms.append(convolved(x, of_weight))
    if of_bias is not None:
        terms.append(ltorch.expand(ltorch.reshape(of_bias, (1, -1, *(1,) * (len(x.shape) - 2))), g.shape))
    of_g = terms[0]
    for term in terms[1:]:
        of_g = of_g + term
    gx = gw = None
    if of_weight is not None:
        gx, _, _ = convolution_backward(g, x, of_weight, None, *options, [True, False, False])
    if of_x is not None:
        _, gw, _ = convolution_backward(g, of_x, weight, None, *options, [False, True, False])
    return of_g, gx, gw


backward.gradients_of(convolution_backward, _convolution_twice, (0, 1, 2))
derivatives.inexact.add(convolution_backward)  # it rounds otherwise than PyTorch's second derivative


# ----------------------------------------------------------------------------------------------------------------
# layout


def _operands_at(image: int, groups: int):
    """The rule for an operation with its image, its weight behind it, and its groups at these positions; in front of
    the image is the cotangent."""

    def rule(operation):
        args = operation.args
        x, weight = args[image : image + 2] if len(args) > image + 1 else (None, None)
        count = args[groups] if len(args) > groups else operation.kwargs.get("groups", 1)
        is_of_images = isinstance(x, TensorProxy) and isinstance(weight, TensorProxy) and len(x.shape) in (4, 5)
        return (x, weight, args[0] if image else operation.output, count) if is_of_images else None

    return rule


kernels.convolution.set(_operands_at(0, 6), conv2d, conv3d, conv_transpose2d, conv_transpose3d)
kernels.convolution.set(_operands_at(0, 8), convolution)
kernels.convolution.set(_operands_at(1, 9), convolution_backward)
