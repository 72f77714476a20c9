"""Derivatives that are one kernel of PyTorch's: `python tests/kernel_derivatives.py` makes the rows from PyTorch's own
file of derivatives, and a test checks that they are current.

A row: an operation, and the gradient of its first argument as a function of the result's cotangent, the result and the
arguments.
"""

from __future__ import annotations

from thunder.ops import backward
from thunder.ops.registry import LTORCH

ROWS = {
    "celu": lambda g, y, a, alpha=1.0: backward.elu_backward(g, alpha, 1, 1.0 / alpha, False, a),
    "diagonal": lambda g, y, a, offset=0, dim1=0, dim2=1: backward.diagonal_backward(g, a.shape, offset, dim1, dim2),
    "elu": lambda g, y, a, alpha=1.0: backward.elu_backward(g, alpha, 1, 1, False, a),
    "gelu": lambda g, y, a, *, approximate="none": backward.gelu_backward(g, a, approximate=approximate),
    "glu": lambda g, y, a, dim=-1: backward.glu_backward(g, a, dim),
    "hardshrink": lambda g, y, a, lambd=0.5: backward.hardshrink_backward(g, a, lambd),
    "hardsigmoid": lambda g, y, a: backward.hardsigmoid_backward(g, a),
    "hardswish": lambda g, y, a: backward.hardswish_backward(g, a),
    "hardtanh": lambda g, y, a, min_val=-1.0, max_val=1.0: backward.hardtanh_backward(g, a, min_val, max_val),
    "leaky_relu": lambda g, y, a, negative_slope=0.01: backward.leaky_relu_backward(g, a, negative_slope, False),
    "logit": lambda g, y, a, eps=None: backward.logit_backward(g, a, eps),
    "mish": lambda g, y, a: backward.mish_backward(g, a),
    "relu": lambda g, y, a: backward.threshold_backward(g, y, 0),
    "select": lambda g, y, a, dim, index: backward.select_backward(g, a.shape, dim, index),
    "sigmoid": lambda g, y, a: backward.sigmoid_backward(g, y),
    "silu": lambda g, y, a: backward.silu_backward(g, a),
    "softplus": lambda g, y, a, beta=1.0, threshold=20.0: backward.softplus_backward(g, a, beta, threshold),
    "softshrink": lambda g, y, a, lambd=0.5: backward.softshrink_backward(g, a, lambd),
    "tanh": lambda g, y, a: backward.tanh_backward(g, y),
    "threshold": lambda g, y, a, threshold, value: backward.threshold_backward(g, a, threshold),
    "unfold": lambda g, y, a, dimension, size, step: backward.unfold_backward(g, a.shape, dimension, size, step),
}

for _name, _gradient in ROWS.items():
    backward.gradient_of_first(LTORCH[_name], _gradient)
