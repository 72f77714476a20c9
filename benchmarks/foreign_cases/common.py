"""What cases of libraries share: their registry, inputs, and modules around layers and losses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Case(NamedTuple):
    """make() builds the module, inputs(batch) its arguments; the loss is the mean square of all results where they are
    no loss by themselves."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple]
    module: str  # that enters it


CASES: list[Case] = []


def case(library: str, name: str, make: Callable[[Any], nn.Module], inputs: Callable[[int], tuple]) -> None:
    """Enters a case. make is given the library's module."""
    CASES.append(
        Case(f"{library}/{name}", library, lambda: make(importlib.import_module(library)), inputs, make.__module__)
    )


def images(size: int, channels: int = 3) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(batch, channels, size, size),)


def tokens(length: int, count: int = 64) -> Callable[[int], tuple]:
    return lambda batch: (torch.randint(0, count, (batch, length)),)


def vectors(*shape: int) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(batch, *shape),)


class Applied(nn.Module):
    """A layer, and a function of it and the inputs."""

    def __init__(self, layer: nn.Module, function: Callable):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *inputs):
        return self.function(self.layer, *inputs)


def loss_of(loss: nn.Module) -> Callable:
    return lambda layer, x, y: loss(layer(x), y)


class Learned(nn.Module):
    """A loss of what a linear layer makes of the inputs, and of targets."""

    def __init__(self, loss: nn.Module, width: int, outputs: int):
        super().__init__()
        self.linear, self.loss = nn.Linear(width, outputs), loss

    def forward(self, x, *targets):
        return self.loss(self.linear(x), *targets)


def part(module: Any, name: str) -> Any:
    """A submodule."""
    return importlib.import_module(f"{module.__name__}.{name}")


def labelled(width: int, classes: int) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(4 * batch, width), torch.arange(4 * batch) % classes)
