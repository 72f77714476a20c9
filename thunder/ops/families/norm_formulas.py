"""What kernels of norms' backwards compute, as operations that are differentiated: statistics are computed from the
input, so that derivatives of any order are right.

PyTorch's kernels have a second derivative at most, and that one takes saved means and deviations for constants where it
is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.proxies import TensorProxy
from thunder.ops import ltorch
from thunder.ops.backward import formula
from thunder.ops.families.norm_kernels import (
    native_group_norm_backward,
    native_layer_norm_backward,
)


def standardized(x, dims: tuple[int, ...], epsilon: Callable):
    """(x with mean 0 and variance 1 over dims, what it was divided by, inverted). epsilon: from the variance to what is
    added to it."""
    centred = x - ltorch.mean(x, dims, True)
    variance = ltorch.mean(centred * centred, dims, True)
    inverse = ltorch.rsqrt(variance + epsilon(variance))
    return centred * inverse, inverse


def _epsilon_of(rstd) -> Callable:
    """The epsilon that a saved deviation was computed with."""
    return lambda variance: ltorch.detach(1 / (rstd * rstd) - variance)


def of_input(g, normal, inverse, dims: tuple[int, ...]):
    return inverse * (g - ltorch.mean(g, dims, True) - normal * ltorch.mean(g * normal, dims, True))


def in_full(position: int) -> Callable:
    """The formula in the widest type of its arguments, as the kernel computes it; its results in the types of the input
    and of the weight, in this place."""

    def define(function: Callable) -> Callable:
        def compute(g, a, *rest):
            kind = max((x.dtype for x in (a, *rest) if isinstance(x, TensorProxy)), key=lambda d: d.bytes)
            wide = function(
                *(
                    ltorch.to(x, dtype=kind) if isinstance(x, TensorProxy) and x.dtype is not kind else x
                    for x in (g, a, *rest)
                )
            )
            kinds = [a.dtype, *[a.dtype if rest[position] is None else rest[position].dtype] * 2]
            return tuple(
                x if x is None or x.dtype is k else ltorch.to(x, dtype=k) for x, k in zip(wide, kinds, strict=True)
            )

        return compute

    return define


@formula(native_layer_norm_backward)
@in_full(3)
def _layer_norm_backward(g, a, normalized_shape, mean, rstd, weight, bias, mask):
    dims = tuple(range(len(a.shape) - len(normalized_shape), len(a.shape)))
    normal, inverse = standardized(a, dims, _epsilon_of(rstd))
    return (
        of_input(g if weight is None else g * weight, normal, inverse, dims) if mask[0] else None,
        ltorch.sum(ltorch.reshape(g * normal, (-1, *normalized_shape)), 0) if mask[1] else None,
        ltorch.sum(ltorch.reshape(g, (-1, *normalized_shape)), 0) if mask[2] else None,
    )


@formula(native_group_norm_backward)
@in_full(2)
def _group_norm_backward(g, a, mean, rstd, weight, n, c, size, groups, mask):
    grouped = (n, groups, c // groups * size)
    normal, inverse = standardized(ltorch.reshape(a, grouped), (2,), _epsilon_of(ltorch.reshape(rstd, (n, groups, 1))))
    g = ltorch.reshape(g, (n, c, size))
    weighted = ltorch.reshape(g if weight is None else g * ltorch.reshape(weight, (c, 1)), grouped)
    return (
        ltorch.reshape(of_input(weighted, normal, inverse, (2,)), a.shape) if mask[0] else None,
        ltorch.sum(g * ltorch.reshape(normal, (n, c, size)), (0, 2)) if mask[1] else None,
        ltorch.sum(g, (0, 2)) if mask[2] else None,
    )
