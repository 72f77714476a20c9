"""Measures kernels with several tiles on a device, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROUNDS = 7  # of which each launches every kernel once


class Stopwatch:
    """Measures functions of which each launches one kernel, on the current stream.

    times: by the number of a launch, the seconds of each of its kernels, the median of `ROUNDS`. The kernels take
    turns, and read nothing that is in the device's cache.
    """

    def __init__(self, device: torch.device):
        self.times: dict[int, list[float]] = {}
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def fastest(self, number: int, runs: Sequence[Callable[[], None]]) -> None:
        """Runs the kernels of a launch, all of which write the same results."""
        for run in runs:  # machine code is loaded by the first launch
            run()
        if len(runs) < 2:
            return
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
        for _ in range(ROUNDS):
            for run, own in zip(runs, spans, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flushed.zero_()  # meanwhile the host launches what is measured
                start.record()
                run()
                end.record()
                own.append((start, end))
        spans[-1][-1][1].synchronize()
        self.times[number] = [sorted(a.elapsed_time(b) for a, b in own)[ROUNDS // 2] * 1e-3 for own in spans]
