"""Arguments that tests call the operations of `thunder/ops/families/embeddings.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.embeddings import (
    embedding,
    embedding_backward,
    embedding_bag,
    embedding_renorm,
    native_embedding_bag,
    sparse_embedding,
)


@sparse_embedding.samples
def _(make):
    yield (make(2, 3, dtype=torch.int64, low=0, high=5), make(5, 4)), {"sparse": True}


@embedding.samples
def _(make):
    yield make(2, 3, dtype=torch.int64, low=0, high=5), make(5, 4)
    yield (make(3, dtype=torch.int32, low=0, high=5), make(5, 4)), {"padding_idx": 1}


@embedding.error_samples
def _(make):
    yield make(2, 3), make(5, 4)


@embedding_renorm.samples
def _(make):
    yield make(5, 4), torch.tensor([1, 3, 1]), 0.5, 2.0


@embedding_bag.samples
def _(make):
    index = make(2, 3, dtype=torch.int64, low=0, high=5)
    for mode in ("mean", "sum", "max"):
        yield (index, make(5, 4)), {"mode": mode}
        yield (make(6, dtype=torch.int64, low=0, high=5), make(5, 4), torch.tensor([0, 2, 2])), {"mode": mode}
        yield (
            (make(6, dtype=torch.int64, low=0, high=5), make(5, 4), torch.tensor([0, 2, 6])),
            {"mode": mode, "include_last_offset": True, "padding_idx": 1},
        )
    yield (index, make(5, 4)), {"mode": "sum", "per_sample_weights": make(2, 3)}
    yield (index, make(5, 4)), {"scale_grad_by_freq": True}


@embedding_bag.error_samples
def _(make):
    index = make(6, dtype=torch.int64, low=0, high=5)
    yield index, make(5, 4)
    yield make(2, 3, dtype=torch.int64, low=0, high=5), make(5, 4), torch.tensor([0, 2])
    yield (make(2, 3, dtype=torch.int64, low=0, high=5), make(5, 4)), {"mode": "median"}
    yield (make(2, 3, dtype=torch.int64, low=0, high=5), make(5, 4)), {"per_sample_weights": make(2, 3)}


@native_embedding_bag.samples
def _(make):
    yield make(5, 4), make(6, dtype=torch.int64, low=0, high=5), torch.tensor([0, 2])
    yield make(5, 4), make(6, dtype=torch.int64, low=0, high=5), torch.tensor([0, 2]), False, 1


@embedding_backward.samples
def _(make):
    yield make(3, 4), torch.tensor([0, 2, 2]), 5, -1, False, False
    yield make(3, 4), torch.tensor([0, 2, 2]), 5, 2, False, False
