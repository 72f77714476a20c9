"""Launches on a GPU, and the flags by which PyTorch chooses kernels there."""

from __future__ import annotations

import contextlib

import torch

from thunder import compat

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
# the second one becomes the third at the first call where PyTorch prefers cuDNN
_USUAL_ORDERS = ([], [1, 2, 0, 3, 4], [3, 1, 2, 0, 4])


def load_kernel(path: str, name: str, shared: int, device: int) -> int:
    """The handle of a function in a file of machine code, in the context of the current device."""
    # from torch 2.13 on the module comes first; then registers and spills
    return compat.static_launcher._load_kernel(path, name, shared, device)[-3]


def attention_backends() -> tuple:
    """The backends of scaled_dot_product_attention: flash, memory-efficient, products, cuDNN; whether it is to be
    deterministic; the order of its choice, None for PyTorch's own."""
    order = compat.attention_order()
    allowed = [getattr(compat.C, f"_get_{name}_sdp_enabled")() for name in _ATTENTION]
    return *allowed, torch.are_deterministic_algorithms_enabled(), None if order in _USUAL_ORDERS else tuple(order)


@contextlib.contextmanager
def attention_among(backends: tuple):
    """In the block, scaled_dot_product_attention may use the result of `attention_backends`."""
    before, order = attention_backends(), compat.attention_order()
    try:
        _allow(backends)
        yield
    finally:
        _allow(before)
        if compat.attention_order() != order:
            compat.set_attention_order(order)


def _allow(backends: tuple) -> None:
    for name, enabled in zip(_ATTENTION, backends, strict=False):
        getattr(compat.C, f"_set_sdp_use_{name}")(enabled)
    if backends[-1] is not None:
        compat.set_attention_order(list(backends[-1]))
