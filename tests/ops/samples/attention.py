"""Arguments that tests call the operations of `thunder/ops/families/attention.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.attention import native_multi_head_attention, scaled_dot_product_attention


@scaled_dot_product_attention.samples
def _(make):
    def heads(h=2, length=4):
        return make(2, h, length, 8)

    yield heads(), heads(), heads()
    yield (heads(), heads(), heads()), {"is_causal": True}
    yield (heads(), heads(length=6), heads(length=6)), {"is_causal": True}
    yield heads(), heads(), heads(), make(4, 4)
    yield heads(), heads(), heads(), torch.ones(4, 4, dtype=torch.bool).tril()
    yield heads(), heads(), heads(), make(2, 1, 4, 4, dtype=torch.bool)
    yield (heads(), heads(), heads()), {"scale": 0.5}
    yield (heads(4), heads(2), heads(2)), {"enable_gqa": True, "is_causal": True}
    yield make(4, 8), make(6, 8), make(6, 5)


@scaled_dot_product_attention.error_samples
def _(make):
    yield make(2, 4, 8), make(2, 4, 6), make(2, 4, 6)
    yield make(8), make(8), make(8)
    yield make(2, 4, 8), make(2, 4, 8, dtype=torch.float64), make(2, 4, 8)


@native_multi_head_attention.samples
def _(make):
    q = make(2, 3, 8)
    for options in ((True, True), (True, False), (False, True)):
        yield q, q, q, 8, 2, make(24, 8), make(24), make(8, 8), make(8), None, *options
