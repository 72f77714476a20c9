"""Arguments that tests call the operations of `thunder/ops/families/losses.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.losses import (
    _REDUCTIONS,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding_loss,
    cross_entropy,
    hinge_embedding_loss,
    kl_div,
    margin_ranking_loss,
    nll_loss,
    triplet_margin_loss,
)
from thunder.ops.registry import LTORCH


@binary_cross_entropy.samples
def _(make):
    yield make(4, 3, low=0.1, high=0.9), make(4, 3, low=0.0, high=1.0)
    yield (make(4, 3, low=0.1, high=0.9), make(4, 3, low=0.0, high=1.0), make(3)), {"reduction": "sum"}


@binary_cross_entropy.error_samples
def _(make):
    yield make(4, 3, low=0.1, high=0.9), make(4, 2, low=0.0, high=1.0)


@binary_cross_entropy_with_logits.samples
def _(make):
    yield make(4, 3), make(4, 3, low=0.0, high=1.0)
    yield (make(4, 3), make(4, 3, low=0.0, high=1.0)), {"pos_weight": make(3, low=0.5, high=2.0), "reduction": "none"}


@kl_div.samples
def _(make):
    for how in ("none", "mean", "sum", "batchmean"):
        yield (make(4, 3), make(4, 3, low=0.1, high=1.0)), {"reduction": how}
    yield (make(4, 3), make(4, 3)), {"reduction": "sum", "log_target": True}


@nll_loss.samples
def _(make):
    target = make(4, dtype=torch.int64, low=0, high=3)
    for how in _REDUCTIONS:
        yield (make(4, 3), target, make(3, low=0.1, high=1.0)), {"reduction": how}
    yield (make(4, 3), torch.tensor([0, -100, 2, 1])), {}
    yield make(3), torch.tensor(1)
    yield make(2, 3, 4), make(2, 4, dtype=torch.int64, low=0, high=3)


@nll_loss.error_samples
def _(make):
    yield make(4, 3), make(3, dtype=torch.int64, low=0, high=3)


@cross_entropy.samples
def _(make):
    target = make(4, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), target
    for how in _REDUCTIONS:
        yield (make(4, 3), target, make(3, low=0.1, high=1.0)), {"reduction": how, "label_smoothing": 0.1}
        yield (make(4, 3), make(4, 3, low=0.0, high=1.0)), {"reduction": how, "weight": make(3, low=0.1, high=1.0)}
    yield (make(4, 3), torch.tensor([0, -1, 2, 1])), {"ignore_index": -1}
    yield make(2, 3, 4), make(2, 4, dtype=torch.int64, low=0, high=3)
    yield (make(4, 3), make(4, 3, low=0.0, high=1.0)), {"label_smoothing": 0.2}
    yield make(3), torch.tensor(1)


@cross_entropy.error_samples
def _(make):
    yield make(4, 3), make(3, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), make(4, dtype=torch.int32, low=0, high=3)
    yield (make(4, 3), make(4, dtype=torch.int64, low=0, high=3)), {"reduction": "median"}


def _signs(make, n: int):
    return make(n, low=-1.0, high=1.0).sign()


@margin_ranking_loss.samples
def _(make):
    yield make(4), make(4), _signs(make, 4), 0.5


@hinge_embedding_loss.samples
def _(make):
    yield make(4), _signs(make, 4)


@cosine_embedding_loss.samples
def _(make):
    yield make(4, 3), make(4, 3), _signs(make, 4), 0.2


@triplet_margin_loss.samples
def _(make):
    yield make(4, 3), make(4, 3), make(4, 3)
    yield (make(4, 3), make(4, 3), make(4, 3)), {"swap": True, "reduction": "none"}


@LTORCH["nll_loss_backward"].samples
def _(make):
    yield make(), make(4, 3), torch.tensor([0, 1, 2, 1]), make(3), 1, -100, make()
    yield make(4), make(4, 3), torch.tensor([0, 1, 2, 1]), None, 0, 1, make()


@LTORCH["nll_loss2d_backward"].samples
def _(make):
    target = torch.tensor([[[0, 1], [2, 1]]])
    yield make(), make(1, 3, 2, 2), target, make(3), 1, -100, make()
    yield make(1, 2, 2), make(1, 3, 2, 2), target, None, 0, 1, make()


def _pointwise(name: str, **bounds: float) -> None:
    @LTORCH[name].samples
    def _(make):
        for how in _REDUCTIONS:
            yield (make(4, 3, **bounds), make(4, 3, **bounds)), {"reduction": how}

    @LTORCH[name].error_samples
    def _(make):
        yield (make(4, 3, **bounds), make(4, 3, **bounds)), {"reduction": "median"}


for _name in ("mse", "l1", "smooth_l1", "huber", "soft_margin"):
    _pointwise(f"{_name}_loss")
_pointwise("poisson_nll_loss", low=0.1, high=2.0)
