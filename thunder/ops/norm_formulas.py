"""Higher derivatives of the norms' kernels.

PyTorch's kernels for the backward of layer, group and batch norm have a second derivative at most, and that one takes
saved means and deviations for constants where it is differentiated again. Here the kernels' formulas are
differentiated, in which these are computed from the input, so that derivatives of any order are right.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.proxies import TensorProxy
from thunder.ops.backward import formula, native_layer_norm, native_layer_norm_backward, op
from thunder.ops.normalization import (
    native_batch_norm,
    native_batch_norm_backward,
    native_batch_norm_functional,
    native_group_norm,
    native_group_norm_backward,
)  # fmt: skip

__all__: list[str] = []

# outputs of the forward kernels that are not results: means and deviations, and running ones
native_layer_norm.nondifferentiable = native_group_norm.nondifferentiable = native_batch_norm.nondifferentiable = (1, 2)
native_batch_norm_functional.nondifferentiable = (1, 2, 3, 4)


def _wanted(*parameters) -> list[bool]:
    return [p is not None and p.requires_grad for p in parameters]


@native_layer_norm.vjp
def _(a, normalized_shape, weight, bias, eps):
    y, mean, rstd = native_layer_norm(a, normalized_shape, weight, bias, eps)
    g, *_ = yield y, mean, rstd
    ga, gw, gb = native_layer_norm_backward(g, a, normalized_shape, mean, rstd, weight, bias, _wanted(a, weight, bias))
    return ga, None, gw, gb


@native_group_norm.vjp
def _(a, weight, bias, n, c, size, groups, eps):
    y, mean, rstd = native_group_norm(a, weight, bias, n, c, size, groups, eps)
    g, *_ = yield y, mean, rstd
    return native_group_norm_backward(g, a, mean, rstd, weight, n, c, size, groups, _wanted(a, weight, bias))


@native_batch_norm.vjp
def _(a, weight, bias, running_mean, running_var, training, momentum, eps):
    y, mean, rstd = native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps)
    g, *_ = yield y, mean, rstd
    return native_batch_norm_backward(
        g, a, weight, running_mean, running_var, mean, rstd, training, eps, _wanted(a, weight, bias)
    )


@native_batch_norm_functional.vjp
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    y, mean, rstd, new_mean, new_var = native_batch_norm_functional(
        a, running_mean, running_var, weight, bias, momentum, eps
    )
    g, *_ = yield y, mean, rstd, new_mean, new_var
    ga, gw, gb = native_batch_norm_backward(g, a, weight, None, None, mean, rstd, True, eps, _wanted(a, weight, bias))
    return ga, None, None, gw, gb


# ----------------------------------------------------------------------------------------------------------------
# formulas


def _normalized(x, dims: tuple[int, ...], epsilon: Callable):
    """(x with mean 0 and variance 1 over dims, what it was divided by, inverted). epsilon: from the variance to what is
    added to it."""
    centred = x - op("mean")(x, dims, True)
    variance = op("mean")(centred * centred, dims, True)
    inverse = op("rsqrt")(variance + epsilon(variance))
    return centred * inverse, inverse


def _found(rstd) -> Callable:
    """The epsilon that a saved deviation was computed with."""
    return lambda variance: op("detach")(1 / (rstd * rstd) - variance)


def _of_input(g, normal, inverse, dims: tuple[int, ...]):
    return inverse * (g - op("mean")(g, dims, True) - normal * op("mean")(g * normal, dims, True))


def _in_full(place: int) -> Callable:
    """The formula in the widest type of its arguments, as the kernel computes it; its results in the types of the input
    and of the weight, in this place."""

    def define(function: Callable) -> Callable:
        def compute(g, a, *rest):
            kind = max((x.dtype for x in (a, *rest) if isinstance(x, TensorProxy)), key=lambda d: d.bytes)
            wide = function(
                *(
                    op("to")(x, dtype=kind) if isinstance(x, TensorProxy) and x.dtype is not kind else x
                    for x in (g, a, *rest)
                )
            )
            kinds = [a.dtype, *[a.dtype if rest[place] is None else rest[place].dtype] * 2]
            return tuple(
                x if x is None or x.dtype is k else op("to")(x, dtype=k) for x, k in zip(wide, kinds, strict=True)
            )

        return compute

    return define


@formula(native_layer_norm_backward)
@_in_full(3)
def _layer_norm_backward(g, a, normalized_shape, mean, rstd, weight, bias, mask):
    dims = tuple(range(len(a.shape) - len(normalized_shape), len(a.shape)))
    normal, inverse = _normalized(a, dims, _found(rstd))
    return (
        _of_input(g if weight is None else g * weight, normal, inverse, dims) if mask[0] else None,
        op("sum")(op("reshape")(g * normal, (-1, *normalized_shape)), 0) if mask[1] else None,
        op("sum")(op("reshape")(g, (-1, *normalized_shape)), 0) if mask[2] else None,
    )


@formula(native_group_norm_backward)
@_in_full(2)
def _group_norm_backward(g, a, mean, rstd, weight, n, c, size, groups, mask):
    grouped = (n, groups, c // groups * size)
    normal, inverse = _normalized(op("reshape")(a, grouped), (2,), _found(op("reshape")(rstd, (n, groups, 1))))
    g = op("reshape")(g, (n, c, size))
    weighted = op("reshape")(g if weight is None else g * op("reshape")(weight, (c, 1)), grouped)
    return (
        op("reshape")(_of_input(weighted, normal, inverse, (2,)), a.shape) if mask[0] else None,
        op("sum")(g * op("reshape")(normal, (n, c, size)), (0, 2)) if mask[1] else None,
        op("sum")(g, (0, 2)) if mask[2] else None,
    )


@formula(native_batch_norm_backward)
@_in_full(0)
def _batch_norm_backward(g, a, weight, running_mean, running_var, mean, rstd, training, eps, mask):
    dims = (0, *range(2, len(a.shape)))
    channel = (a.shape[1], *(1,) * (len(a.shape) - 2))
    weighted = g if weight is None else g * op("reshape")(weight, channel)
    if training:
        normal, inverse = _normalized(a, dims, lambda variance: eps)
        of_input = _of_input(weighted, normal, inverse, dims)
    else:
        inverse = op("rsqrt")(op("reshape")(running_var, channel) + eps)
        normal = (a - op("reshape")(running_mean, channel)) * inverse
        of_input = weighted * inverse
    return (
        of_input if mask[0] else None,
        op("sum")(g * normal, dims) if mask[1] else None,
        op("sum")(g, dims) if mask[2] else None,
    )
