"""Matrix products."""

from __future__ import annotations

import torch.nn.functional as F

from thunder.core.proxies import like
from thunder.core.symbol import OpTags
from thunder.ops.define import composite, prim


@prim(F.linear, name="linear", tags=(OpTags.MATMUL_OP,))
def linear_prim(a, w, bias):
    return like(a, (*a.shape[:-1], w.shape[0]))


def _linear_meta(a, w, bias=None):
    if len(w.shape) != 2 or not a.shape or a.shape[-1] != w.shape[1] or a.dtype is not w.dtype or (bias is not None and bias.shape not in ((), (w.shape[0],))):
        raise RuntimeError(f"linear: input {list(a.shape)} {a.dtype}, weight {list(w.shape)} {w.dtype} do not fit")
    return like(a, (*a.shape[:-1], w.shape[0]))


@composite(F.linear, meta=_linear_meta, autocast="lower")
def linear(a, w, bias=None):
    return linear_prim(a, w, bias)


@linear.samples
def _(make):
    yield make(4, 3), make(5, 3)
    yield make(2, 4, 3), make(5, 3), make(5)
    yield make(3), make(5, 3), make(5)


@linear.error_samples
def _(make):
    yield make(4, 3), make(5, 4)


