"""Arguments that tests call the operations of `thunder/ops/families/sorting.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.sorting import argsort, bucketize, histc, kthvalue, msort, searchsorted, sort, topk


@topk.samples
def _(make):
    yield make(4, 6), 3
    yield make(4, 6), 2, 0
    yield (make(4, 6), 2), {"largest": False}


@sort.samples
def _(make):
    yield make(4, 6)
    yield (make(4, 6), 0, True), {}
    yield (make(4, 6),), {"dim": 0, "stable": True}


@argsort.samples
def _(make):
    yield make(4, 6)
    yield (make(4, 6), 0, True), {}
    yield (make(4, 6),), {"descending": True, "stable": True}


@msort.samples
def _(make):
    yield make(4, 6)


@kthvalue.samples
def _(make):
    yield make(4, 6), 2
    yield make(4, 6), 2, 0, True


@searchsorted.samples
def _(make):
    yield torch.tensor([1.0, 2.0, 3.0]), make(4)


@histc.samples
def _(make):
    yield make(20), 5, -1, 1


@bucketize.samples
def _(make):
    yield make(4), torch.tensor([-1.0, 0.0, 1.0])
