"""Arguments that tests call the operations of `thunder/ops/families/activations.py` with."""

from __future__ import annotations

from thunder.ops import LTORCH
from thunder.ops.families.activations import activation, gelu, glu, prelu, rrelu, threshold


@gelu.samples
def _(make):
    yield make(4, 3)
    yield (make(4, 3),), {"approximate": "tanh"}


@threshold.samples
def _(make):
    yield make(4, 3), 0.1, 20.0


@prelu.samples
def _(make):
    yield make(4, 3), make(1)
    yield make(4, 3, 2), make(3)
    yield make(), make(1)


@rrelu.samples
def _(make):
    yield make(4, 3)


@glu.samples
def _(make):
    yield make(4, 6)
    yield make(4, 6), 0


for _symbol in LTORCH.values():
    home = getattr(_symbol.decomposition, "__module__", "")
    if _symbol.elementwise and _symbol.sampler is None and home == activation.__module__:

        @_symbol.samples
        def _(make):
            yield make(4, 3)
            yield make()
