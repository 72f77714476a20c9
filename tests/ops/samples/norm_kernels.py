"""Arguments that tests call the kernels of norms with."""

from __future__ import annotations

from thunder.ops.families.batch_norm import batch_norm_update_stats, native_batch_norm
from thunder.ops.families.norm_kernels import native_group_norm, native_layer_norm


@native_layer_norm.samples
def _(make):
    yield make(4, 3), [3], make(3), make(3), 1e-5
    yield make(2, 4, 3), [4, 3], None, None, 1e-3


@native_layer_norm.error_samples
def _(make):
    yield make(4, 3), [4], None, None, 1e-5


@native_group_norm.samples
def _(make):
    yield make(2, 4, 3), make(4), make(4), 2, 4, 3, 2, 1e-5
    yield make(2, 4, 3, 2), None, None, 2, 4, 6, 4, 1e-5


@native_batch_norm.samples
def _(make):
    yield make(4, 3), make(3), make(3), make(3), make(3, low=0.5, high=2.0), False, 0.1, 1e-5
    yield make(4, 3, 2), make(3), make(3), None, None, True, 0.1, 1e-5


@batch_norm_update_stats.samples
def _(make):
    yield make(4, 3, 2), make(3), make(3, low=0.5, high=2.0), 0.1
