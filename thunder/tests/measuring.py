"""Measuring side by side: interleaved rounds, medians with intervals, and what the systems to compare are.

Used by the programs in benchmarks/ and examples/. Times are in seconds. Absolute times hold on one machine only; what
counts is the comparison within one run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

__all__ = [
    "SYSTEMS",
    "cxx_compiler",
    "compile_with",
    "interleaved",
    "repetitions",
    "settle",
    "median",
    "median_interval",
    "paired_ratio",
    "parse_systems",
    "in_processes",
    "turns",
]

SYSTEMS = (
    "eager", "torch.compile", "torch.compile_graphs", "thunder", "thunder_launches", "thunder_cpp", "thunder_inductor",
    "thunder_tiers", "thunder_again",
)  # fmt: skip


def cxx_compiler() -> str | None:
    """The C++ compiler that torch.compile would use for the CPU, or None: without one it cannot run there."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def compile_with(system: str, fn: Callable) -> Callable:
    """`fn` under one of SYSTEMS. Nothing is compiled before the first call. torch.compile_graphs is mode
    "reduce-overhead", thunder_launches is thunder with graphs=False."""
    if system == "eager":
        return fn
    if system == "torch.compile":
        return torch.compile(fn)
    if system == "torch.compile_graphs":
        return torch.compile(fn, mode="reduce-overhead")
    if system in SYSTEMS:
        import thunder

        executors = [system.removeprefix("thunder_")] if system in ("thunder_cpp", "thunder_inductor") else None
        tiers: int | str = 5 if system == "thunder_tiers" else "automatic"
        graphs: bool | str = False if system == "thunder_launches" else "auto"
        return thunder.jit(fn, executors=executors, tiers=tiers, graphs=graphs)
    raise ValueError(f"{system!r} is no system; known: {', '.join(SYSTEMS)}")


def settle(system: str, step: Callable[[], object]) -> None:
    """Runs a step, whose first run has ended, until the kernels and the launch loops run that stay."""
    if system.startswith("thunder"):
        from thunder.cache.entry import WARM
        from thunder.options import AUTOMATIC_CALL, GRAPHS_CALL

        records = torch.cuda.is_available() and system != "thunder_launches"
        for _ in range(max(WARM + AUTOMATIC_CALL, GRAPHS_CALL + 8 if records else 0)):
            step()


def parse_systems(text: str) -> list[str]:
    """A comma-separated choice of SYSTEMS. Raises ValueError, which names them, for anything else."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in SYSTEMS:
            raise ValueError(f"{name!r} is no system; known: {', '.join(SYSTEMS)}")
    return chosen


def repetitions(call: Callable[[], object], seconds: float, limit: int = 1000) -> int:
    """How many calls take about `seconds`, so that one sample is well above the clock's resolution."""
    call()
    start = time.perf_counter()
    call()
    return max(1, min(limit, math.ceil(seconds / max(time.perf_counter() - start, 1e-9))))


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round. Over twice as many rounds as there are names each one follows each other equally often:
    who runs after a busy one finds a warmer chip, slower by per cents. Squares of E. J. Williams (Australian Journal of
    Scientific Research A 2, 1949), forwards and backwards in turn."""
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    for turn in range(rounds):
        order = [names[(index + turn) % n] for index in zigzag]
        yield order[::-1] if turn // n % 2 else order


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, repeat: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call, one sample for each system and round. In a round the systems take `turns`.

    A sample is the mean of `repeat` calls in a row. Warm up before. clock: seconds since whenever; time.process_time
    counts what the process computes and no waiting.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for order in turns(list(calls), rounds):
        for name in order:
            call = calls[name]
            start = clock()
            for _ in range(repeat):
                call()
            samples[name].append((clock() - start) / repeat)
    return samples


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval for the median from order statistics: it holds whatever the distribution (see Conover, Practical
    Nonparametric Statistics, 3.2).

    The ranks are those of the binomial distribution with p = 1/2, by its normal approximation: give it 20 values or
    more.
    """
    ordered, n = sorted(values), len(values)
    half_width = {0.95: 1.959964, 0.99: 2.575829}[confidence] * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - half_width), math.ceil(n / 2 + half_width)
    return ordered[max(low - 1, 0)], ordered[min(high, n - 1)]


def paired_ratio(samples: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios of samples that were taken in the same rounds, and its 95 % interval."""
    ratios = [ours / theirs for ours, theirs in zip(samples, base, strict=True)]
    return median(ratios), *median_interval(ratios)


def in_processes(
    script: str,
    workloads: Sequence[str],
    systems: Sequence[str],
    options: Sequence[str],
    caches: Sequence[str],
    line: Callable[[dict[str, Any]], str],
    limit: float | None = None,
) -> list[dict[str, Any]]:
    """The rows of all workloads, each measured in a process of its own, `script workload --inner --systems ...
    options`, whose last line of output they are; printed by `line`.

    caches: environment variables that name folders of caches. Where there are some, first calls are asked for: each
    system has a process of its own with empty caches, whose rows have "run" "cold", and another one with the caches
    that it left, "second". limit: seconds, after which a process is killed.
    """
    rows = []
    for workload in workloads:
        for together in [[s] for s in systems] if caches else [systems]:
            with tempfile.TemporaryDirectory() as folder:
                env = os.environ | {name: os.path.join(folder, name.lower()) for name in caches}
                command = [sys.executable, script, workload, "--inner", "--systems", ",".join(together), *options]
                for run in ("cold", "second") if caches else ("",):
                    try:
                        done = subprocess.run(
                            [*command, *(["--first-call"] if run else [])],
                            env=env,
                            capture_output=True,
                            text=True,
                            check=True,
                            timeout=limit,
                        )
                        rows_of_process = json.loads(done.stdout.splitlines()[-1])
                    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
                        failed = (said.strip().splitlines() or ["no output"])[-1]
                        rows_of_process = [{"workload": workload, "system": s, "failed": failed} for s in together]
                    for row in rows_of_process:
                        rows.append(row | ({"run": run} if run else {}))
                        print(line(rows[-1]), flush=True)
    return rows
