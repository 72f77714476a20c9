"""Arguments that tests call the operations of `thunder/ops/families/view_copies.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.view_copies import (
    as_strided_scatter,
    detach_copy,
    diagonal_scatter,
    resolve_conj,
    resolve_neg,
)


@detach_copy.samples
def _(make):
    yield make(2, 3)


@diagonal_scatter.samples
def _(make):
    yield make(3, 4), make(3)
    yield make(2, 4, 4), make(2, 3), 1, 1, 2


@as_strided_scatter.samples
def _(make):
    yield make(4, 3), make(2, 2), (2, 2), (1, 2), 1


_SAMPLES = {
    "alias": lambda make: (make(2, 3),),
    "as_strided": lambda make: (make(4, 3), (2, 2), (1, 2), 1),
    "diagonal": lambda make: (make(3, 4), 1),
    "expand": lambda make: (make(3, 1), (3, 4)),
    "narrow": lambda make: (make(5, 2), 0, 1, 3),
    "permute": lambda make: (make(2, 3, 4), (2, 0, 1)),
    "select": lambda make: (make(2, 3), 1, 2),
    "slice": lambda make: (make(5, 3), 0, 1, 4, 2),
    "split": lambda make: (make(5, 3), 2),
    "split_with_sizes": lambda make: (make(5, 3), (2, 3)),
    "squeeze": lambda make: (make(2, 1, 3),),
    "t": lambda make: (make(2, 3),),
    "transpose": lambda make: (make(2, 3, 4), 0, 2),
    "unbind": lambda make: (make(2, 3), 1),
    "unfold": lambda make: (make(7, 2), 0, 3, 2),
    "unsqueeze": lambda make: (make(2, 3), 1),
    "view": lambda make: (make(2, 3), (3, 2)),
    "view_as_complex": lambda make: (make(3, 2),),
    "view_as_real": lambda make: (make(3, dtype=torch.complex64),),
}
for _name, _sample in _SAMPLES.items():
    LTORCH[f"{_name}_copy"].samples(lambda make, sample=_sample: iter([sample(make)]))


@resolve_conj.samples
@resolve_neg.samples
def _(make):
    yield make(2, 3)
    yield make(2, 3, dtype=torch.complex64).conj()
