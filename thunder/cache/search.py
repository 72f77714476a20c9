"""Measured kernels (`autotune=True`): the executors of a program compile kernels with several schedules, and its second
call measures them on its own inputs and takes the fastest. Which schedule that is is kept on disk, so that later
processes begin with it."""

from __future__ import annotations

import torch

from thunder.cache.entry import CacheEntry
from thunder.core.regions import FusedFunction
from thunder.options import JitOptions


def search_later(entry: CacheEntry, options: JitOptions) -> None:
    """Lets calls of a program measure its kernels, where the options say so. A program that is compiled under
    torch.use_deterministic_algorithms(True) keeps its kernels."""
    if options.autotune and not torch.are_deterministic_algorithms_enabled():
        for call in (2, 3):  # a backward may be compiled in the first or in the second
            entry.at(call, lambda: _measure(entry))


def _measure(entry: CacheEntry) -> None:
    functions = (b.sym.fn for trace in entry.executed for b in trace.bound_symbols)
    for function in dict.fromkeys(f for f in functions if isinstance(f, FusedFunction)):
        function.measure_next()
