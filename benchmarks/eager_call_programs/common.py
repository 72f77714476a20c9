"""A program that cannot be captured whole: a model before and a model after a part that no trace describes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

State = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


class Program(NamedTuple):
    """make: builds the model in a folder of its own, alone or with a function that tells the state around it.
    library: what it needs beside PyTorch. aside: written after all mends, so that none was made for it."""

    name: str
    make: Callable[[Path], nn.Module | tuple[nn.Module, State]]
    library: str
    aside: bool

    @property
    def is_installed(self) -> bool:
        return not self.library or importlib.util.find_spec(self.library) is not None


def program(library: str = "", aside: bool = False) -> Callable:
    def enter(make: Callable) -> Callable:
        PROGRAMS[make.__name__] = Program(make.__name__, make, library, aside)
        return make

    return enter


class Size:
    """Of the models: small ones show what is equal, wide ones what a call costs."""

    width, rows = 16, 4

    @classmethod
    def inputs(cls, seed: int) -> torch.Tensor:
        return torch.randn(cls.rows, cls.width, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """A model before and a model after `odd`, a method of this class or a function that it is made with. The layer
    before a batch norm has no bias, whose gradient would be zero but for rounding: it compares with no other."""

    def __init__(self, odd: Callable | None = None, norm: bool = False, dropout: float = 0.0):
        super().__init__()
        n = Size.width
        self.first = nn.Sequential(
            nn.Linear(n, n, bias=not norm), nn.BatchNorm1d(n) if norm else nn.Identity(), nn.GELU(), nn.Dropout(dropout)
        )
        self.last = nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.Linear(n, n))
        if odd is not None:
            self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.odd(self.first(x)))
