"""Arguments that tests call the operations of `thunder/ops/families/margin_losses.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.losses import _REDUCTIONS
from thunder.ops.families.margin_losses import (
    ctc_loss,
    gaussian_nll_loss,
    multi_margin_loss,
    multilabel_margin_loss,
)


@multi_margin_loss.samples
def _(make):
    target = make(4, dtype=torch.int64, low=0, high=3)
    for how in _REDUCTIONS:
        yield (make(4, 3), target), {"reduction": how}
    yield make(4, 3), target, 2, 0.5, make(3, low=0.1, high=1.0)
    yield make(3), torch.tensor(1)


@multi_margin_loss.error_samples
def _(make):
    yield make(4, 3), make(3, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), make(4, dtype=torch.int64, low=0, high=3), 3
    yield (make(4, 3), make(4, dtype=torch.int64, low=0, high=3)), {"reduction": "median"}


@multilabel_margin_loss.samples
def _(make):
    target = torch.tensor([[2, 0, -1, 1], [-1, 1, 2, 3], [3, -1, -1, -1]])
    for how in _REDUCTIONS:
        yield (make(3, 4), target), {"reduction": how}
    yield make(4), target[0]


@multilabel_margin_loss.error_samples
def _(make):
    yield make(4, 3), make(4, 2, dtype=torch.int64, low=0, high=3)


@gaussian_nll_loss.samples
def _(make):
    for how in _REDUCTIONS:
        yield (make(4, 3), make(4, 3), make(4, 3, low=0.1, high=2.0)), {"reduction": how, "full": how == "sum"}
    yield make(4, 3), make(4, 3), make(4, low=0.1, high=2.0)
    yield make(4, 3), make(4, 3), make(4, 1, low=0.1, high=2.0)


@gaussian_nll_loss.error_samples
def _(make):
    yield make(4, 3), make(4, 3), make(3, 4)
    yield (make(4, 3), make(4, 3), make(4, 3, low=0.1, high=2.0)), {"reduction": "median"}


@ctc_loss.samples
def _(make):
    logs, targets = make(7, 2, 4).log_softmax(2), torch.tensor([[1, 2, 3], [3, 1, 2]])
    for how in _REDUCTIONS:
        yield (logs, targets, torch.tensor([7, 6]), torch.tensor([3, 2])), {"reduction": how}
    yield logs, targets, (7, 6), (3, 2), 0, "mean", True
    yield logs[:, 0], targets[0], torch.tensor(7), torch.tensor(3)


@ctc_loss.error_samples
def _(make):
    yield make(7, 2, 4), torch.tensor([[1, 2, 3], [3, 1, 2]]), (7, 6), (3, 2), 4
