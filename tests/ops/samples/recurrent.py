"""Arguments that tests call the operations of `thunder/ops/families/recurrent.py` with."""

from __future__ import annotations

import torch

from thunder.core.symbol import Symbol
from thunder.ops import LTORCH
from thunder.ops.families.recurrent import _STEPS


def _cell(name: str, gates: int) -> None:
    symbol = LTORCH[f"{name}_cell"]

    @symbol.samples
    def _(make):
        hidden = (make(2, 4), make(2, 4)) if name == "lstm" else make(2, 4)
        yield make(2, 3), hidden, make(4 * gates, 3), make(4 * gates, 4)
        yield make(2, 3), hidden, make(4 * gates, 3), make(4 * gates, 4), make(4 * gates), make(4 * gates)

    @symbol.error_samples
    def _(make):
        hidden = (make(2, 5), make(2, 5)) if name == "lstm" else make(2, 5)
        yield make(2, 3), hidden, make(4 * gates, 3), make(4 * gates, 4)


def _net_samples(name: str, gates: int, padded: Symbol, packed: Symbol) -> None:
    def weights(make, width: int, layers: int, directions: int, biases: bool) -> list:
        tensors = []
        for layer in range(layers):
            for _ in range(directions):
                tensors += [make(4 * gates, width if layer == 0 else 4 * directions), make(4 * gates, 4)]
                tensors += [make(4 * gates), make(4 * gates)] if biases else []
        return tensors

    def state(make, count: int, batch: int = 2):
        return [make(count, batch, 4), make(count, batch, 4)] if name == "lstm" else make(count, batch, 4)

    @padded.samples
    def _(make):
        yield make(3, 2, 5), state(make, 1), weights(make, 5, 1, 1, True), True, 1, 0.0, True, False, False
        yield make(2, 3, 5), state(make, 4), weights(make, 5, 2, 2, False), False, 2, 0.0, False, True, True

    @padded.error_samples
    def _(make):
        yield make(3, 2, 6), state(make, 1), weights(make, 5, 1, 1, True), True, 1, 0.0, True, False, False
        yield make(3, 2, 5), state(make, 1, 3), weights(make, 5, 1, 1, True), True, 1, 0.0, True, False, False

    @packed.samples
    def _(make):
        yield (
            make(5, 5),
            torch.tensor([2, 2, 1]),
            state(make, 2),
            weights(make, 5, 1, 2, True),
            True,
            1,
            0.0,
            True,
            True,
        )


for _name, (_, _gates) in _STEPS.items():
    _cell(_name, _gates)
    _net_samples(_name, _gates, LTORCH[_name], LTORCH[f"{_name}_of_packed_sequences"])
