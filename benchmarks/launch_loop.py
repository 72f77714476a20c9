"""What does a bound symbol cost the host: in eager PyTorch, in the printed program, and in a launch loop?

    python benchmarks/launch_loop.py [--operations 1000] [--samples 40] [--device cpu]

Programs of small operations, each with as many bound symbols as asked for, without fusion. Samples take turns in one
process, in processor time on the CPU and in time on the clock, without waiting for the device, on a GPU. Printed: the
median time of a bound symbol in microseconds. The bar: 1.5 us in a loop. Without the extension the exit status is 2; it
is 1 where a program misses the bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

import thunder
from thunder.runtime.extensions import loaded_extension
from thunder.tests.measuring import interleaved, median
from thunder.transforms.launch_loop import take_loops

BAR = 1.5


def added(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x + y
    return x


def multiplied(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x @ y
    return x


def viewed(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x.transpose(0, 1)[None][0]
    return x


def mixed(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n // 5):
        x = torch.relu(x @ y).softmax(-1).reshape(4, 16).reshape(8, 8)
    return x


def written(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    x = x.clone()
    for _ in range(n):
        x.add_(y)
    return x


PROGRAMS: tuple[Callable, ...] = (added, multiplied, viewed, mixed, written)


def measure(program: Callable, operations: int, samples: int, device: str) -> dict[str, float]:
    """Medians in microseconds for a bound symbol. Raises AssertionError where results differ from eager's."""
    x, y = torch.rand(8, 8, device=device), torch.rand(8, 8, device=device) / 4
    printed, looped = (
        thunder.jit(lambda x, y: program(x, y, operations), executors=[]) for _ in range(2)
    )  # no executor that fuses
    for compiled in (printed, looped):
        assert torch.equal(compiled(x, y), program(x, y, operations))
    trace = looped.programs[0].executed[0]
    bound = sum(b.sym.name != "python_del" for b in trace.bound_symbols)
    take_loops(trace)
    assert torch.equal(looped(x, y), program(x, y, operations))
    calls = {
        "eager": lambda: program(x, y, operations),
        "printed": lambda: printed(x, y),
        "loop": lambda: looped(x, y),
    }
    interleaved(calls, 10, 1)
    times = interleaved(calls, samples, 1, time.process_time if device == "cpu" else time.perf_counter)
    return {"bound symbols": bound} | {name: 1e6 * median(taken) / bound for name, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    if loaded_extension() is None:
        print("no extension: without a C++ compiler there is none, and the first process that wants it builds it")
        return 2
    torch.set_num_threads(1)
    missed = []
    for program in PROGRAMS:
        with torch.no_grad():
            row = measure(program, chosen.operations, chosen.samples, chosen.device)
        ratio = row["loop"] / row["printed"]
        print(
            f"{program.__name__:12} {row['bound symbols']:5} bound symbols, us each: eager {row['eager']:.3f}, printed "
            f"{row['printed']:.3f}, loop {row['loop']:.3f}, loop to printed {ratio:.2f}",
            flush=True,
        )
        if row["loop"] > BAR:
            missed.append(program.__name__)
    print(f"missed: {', '.join(missed)}" if missed else "all hold")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
