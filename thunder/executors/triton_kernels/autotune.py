"""Blocks of kernels chosen by measuring: for each kernel of a region the fastest of a few, kept on the disk beside the
kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder.executors.triton_kernels.schedule import Kernel
from thunder.executors.triton_kernels.tiles import Tile, candidates
from thunder.runtime import disk_cache

REPEATS = 20


def tuned(kernels: Sequence[Kernel], where: torch.device, variant: Callable[[Sequence[Tile]], Any]) -> list[Tile]:
    """The tiles of the kernels of a region.

    variant: compiles the region with these tiles, in the background; its `launches` are a function for each kernel.
    """
    choices = [candidates(k) for k in kernels]
    first = variant([c[0] for c in choices])
    device = torch.cuda.get_device_properties(where)
    key = disk_cache.key_of(
        "triton tiles",
        importlib.metadata.version("triton"),
        device.name,
        tuple(first.texts),
        tuple(map(tuple, choices)),
    )
    found = disk_cache.load(key)
    if found is None:
        rounds = [first, *(variant([c[min(n, len(c) - 1)] for c in choices]) for n in range(1, max(map(len, choices))))]
        times = [[measured(launch) for launch in made.launches()] for made in rounds]
        best = [min(range(len(c)), key=lambda n, i=i: times[n][i]) for i, c in enumerate(choices)]
        disk_cache.store(key, {"best": best}, b"")
    else:
        best = found[0]["best"]
    return [c[n] for c, n in zip(choices, best, strict=True)]


def measured(launch: Callable[[], None]) -> float:
    """Milliseconds of a launch."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    begin.record()
    for _ in range(REPEATS):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS
