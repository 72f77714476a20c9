"""Arguments that tests call the operations of `thunder/ops/families/random.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.random import (
    bernoulli,
    binomial,
    multinomial,
    native_dropout,
    native_dropout_backward,
    normal,
    poisson,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    randperm,
)
from thunder.ops.registry import LTORCH


@binomial.samples
def _(make):
    yield torch.tensor([3.0, 5.0, 9.0]), torch.tensor([0.2, 0.5, 0.9])


@rand.samples
@randn.samples
def _(make):
    yield ((2, 3),), {"dtype": torch.float64}


@rand_like.samples
@randn_like.samples
def _(make):
    yield (make(2, 3),)


@randint.samples
def _(make):
    yield 2, 9, (2, 3)


@randperm.samples
def _(make):
    yield (7,)


@normal.samples
def _(make):
    yield make(2, 3), make(3, low=0.1, high=2.0)
    yield make(2, 3), 0.5


@bernoulli.samples
def _(make):
    yield (make(2, 3, low=0.0, high=1.0),)


@multinomial.samples
def _(make):
    yield make(2, 5, low=0.1, high=1.0), 3


@poisson.samples
def _(make):
    yield (make(2, 3, low=0.1, high=5.0),)


for _name, _shape in (
    ("dropout", (4, 3)), ("dropout1d", (2, 3, 4)), ("dropout2d", (2, 3, 4, 4)), ("dropout3d", (2, 3, 4, 4, 4)),
        ("alpha_dropout", (4, 3)), ("feature_alpha_dropout", (2, 3, 4)),
):  # fmt: skip

    @LTORCH[_name].samples
    def _(make, shape=_shape):
        for training in (True, False):
            yield make(*shape), 0.4, training
        yield make(*shape), 1.0, True

    @LTORCH[_name].error_samples
    def _(make, shape=_shape):
        yield make(*shape), 1.5, True


@LTORCH["feature_dropout"].samples
def _(make):
    yield make(2, 3, 4), 0.4, True


@native_dropout.samples
def _(make):
    yield make(4, 3), 0.4, True
    yield make(4, 3), 0.4, False


@native_dropout_backward.samples
def _(make):
    yield make(4, 3), make(4, 3, dtype=torch.bool), 2.0


for _name in ("uniform", "normal", "exponential", "geometric", "cauchy", "log_normal", "random", "bernoulli"):

    @LTORCH[f"{_name}_fill"].samples
    def _(make, name=_name):
        yield (make(2, 3), 0.4) if name == "geometric" else (make(2, 3),)
