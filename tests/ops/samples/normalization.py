"""Arguments that tests call the operations of `thunder/ops/families/normalization.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.batch_norm import batch_norm
from thunder.ops.families.normalization import (
    cdist,
    cosine_similarity,
    group_norm,
    instance_norm,
    instance_norm_update,
    layer_norm,
    normalize,
    pairwise_distance,
    pdist,
    rms_norm,
)
from thunder.ops.families.softmax import _safe_softmax, log_softmax, log_softmax_backward, softmax, softmax_backward


def _softmax_samples(make):
    yield make(4, 3), 1
    yield make(4, 3, 2), -2
    yield (make(4, 3), 0), {"dtype": torch.float64}
    yield (make(4, 3, dtype=torch.int64), 0), {"dtype": torch.float32}
    yield make(4, 3, dtype=torch.bfloat16), -1
    yield make(), 0


def _softmax_errors(make):
    yield make(4, 3), 2
    yield make(4, 3, dtype=torch.int64), 1


for _symbol in (softmax, log_softmax):
    _symbol.samples(_softmax_samples)
    _symbol.error_samples(_softmax_errors)


for _symbol in (softmax_backward, log_softmax_backward):

    @_symbol.samples
    def _(make):
        inputs, y = make(4, 3), make(4, 3)
        yield inputs, y.softmax(1), 1, y.dtype


@_safe_softmax.samples
def _(make):
    yield make(4, 3), 1
    yield make(4, 3).masked_fill(torch.tensor([[True], [False], [True], [False]]), float("-inf")), -1


@layer_norm.samples
def _(make):
    yield make(4, 3), (3,)
    yield make(2, 4, 3), (3,), make(3), make(3)
    yield make(2, 4, 3), (4, 3), make(4, 3), None, 1e-3
    yield make(4, 8, dtype=torch.bfloat16), (8,), make(8, dtype=torch.bfloat16), make(8, dtype=torch.bfloat16)


@layer_norm.error_samples
def _(make):
    yield make(4, 3), (4,)
    yield make(4, 3), (3,), make(4)


@rms_norm.samples
def _(make):
    yield make(4, 3), (3,)
    yield make(2, 4, 3), (3,), make(3), 1e-6


@rms_norm.error_samples
def _(make):
    yield make(4, 3), (4,)


@group_norm.samples
def _(make):
    yield make(2, 4, 3), 2
    yield make(2, 4, 3, 3), 4, make(4), make(4)


@group_norm.error_samples
def _(make):
    yield make(2, 4, 3), 3


@batch_norm.samples
def _(make):
    yield make(4, 3), make(3), make(3, low=0.5, high=2.0), make(3), make(3)
    yield make(4, 3, 2, 2), make(3), make(3, low=0.5, high=2.0)
    yield make(4, 3, 5), None, None, make(3), make(3), True


@batch_norm.error_samples
def _(make):
    yield make(4, 3), make(4), make(3)


@instance_norm.samples
def _(make):
    yield (make(2, 3, 4),)
    yield make(2, 3, 4, 4), None, None, make(3), make(3)
    yield make(2, 3, 4), make(3), make(3, low=0.5, high=2.0), None, None, False


@instance_norm.error_samples
def _(make):
    yield (make(2, 3, 1),)


@instance_norm_update.samples
def _(make):
    yield make(2, 3, 4), make(3), make(3, low=0.5, high=2.0), make(3), make(3), 0.1, 1e-5


@normalize.samples
def _(make):
    yield (make(4, 3),)
    yield make(4, 3, 2), 1.0, -1


@cosine_similarity.samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(2, 4, 3), make(2, 4, 3), -1


@pairwise_distance.samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(4, 3), make(3), 1.0, 1e-6, True


@cdist.samples
def _(make):
    yield make(4, 3), make(5, 3)
    yield make(2, 4, 3), make(2, 5, 3), 1.0


@pdist.samples
def _(make):
    yield (make(4, 3),)
    yield make(4, 3), 1.0


@pdist.error_samples
def _(make):
    yield (make(4),)
    yield make(4, 3), -1.0
