"""What does a warm call of a compiled program cost beyond what PyTorch itself takes?

    python benchmarks/call_overhead.py [--systems torch.compile,thunder] [--samples 300] [--only WORD ...] [--json FILE]

Programs whose operations take next to no time, on the CPU: one add on tiny tensors, and modules with 10, 100 and 400 parameters, each multiplied by in turn
(a matrix product is a kernel of its own under every system; sums would be fused into one, and eager's time for the others would count as an advantage).
Under torch.no_grad(), once with parameters that require grad and once without. The systems take turns in one process; a sample is the mean of
several calls in a row, and each sample is paired with eager's of the same round. Printed: the median of the paired differences in microseconds with
its 95 % interval from order statistics, and thunder's divided by torch.compile's. The exit status is 1 where that ratio is above 0.5.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from thunder.tests.measuring import compile_with, cxx_compiler, interleaved, median, median_interval, parse_systems, repetitions

RATIO_BAR = 0.5
SAMPLE_SECONDS = 1e-3  # one sample is at least about this long: thousands of the clock's steps
WIDTH = 8


class Products(nn.Module):
    """Multiplies its input by one small matrix after the other."""

    def __init__(self, parameters: int, requires_grad: bool):
        super().__init__()
        # near the identity, so that 400 products neither vanish nor overflow
        self.steps = nn.ModuleList(Product(requires_grad) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Product(nn.Module):
    def __init__(self, requires_grad: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 1e-3 * torch.randn(WIDTH, WIDTH), requires_grad=requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def cases() -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    """Name -> what makes the program and its arguments."""
    made: dict[str, Callable[[], tuple[Callable, tuple]]] = {"one add": lambda: (add, (torch.randn(2), torch.randn(2)))}
    for parameters in (10, 100, 400):
        for requires_grad in (False, True):
            name = f"{parameters} parameters, {'' if requires_grad else 'not '}requiring grad"
            made[name] = lambda n=parameters, grad=requires_grad: (Products(n, grad), (torch.randn(WIDTH, WIDTH),))
    return made


def measure(make: Callable[[], tuple[Callable, tuple]], systems: list[str], samples: int) -> dict:
    """Medians and intervals in microseconds: eager's time of a call, and what each system adds to it. Raises ValueError where a result differs from eager's."""
    torch.manual_seed(0)
    program, args = make()
    expected = program(*args)
    calls = {"eager": lambda: program(*args)}
    for system in systems:
        torch._dynamo.reset()
        compiled = compile_with(system, program)
        for _ in range(3):
            torch.testing.assert_close(compiled(*args), expected, msg=lambda text, system=system: f"{system} and eager differ: {text}")
        calls[system] = lambda compiled=compiled: compiled(*args)
    repeat = repetitions(calls["eager"], SAMPLE_SECONDS)
    interleaved(calls, max(10, samples // 10), repeat)  # warm
    times = interleaved(calls, samples, repeat)
    row: dict = {"repeat": repeat, "samples": samples, "eager": 1e6 * median(times["eager"])}
    for system in systems:
        added = [1e6 * (ours - eager) for ours, eager in zip(times[system], times["eager"], strict=True)]
        row[system] = {"added": median(added), "interval": median_interval(added)}
    if {"torch.compile", "thunder"} <= set(systems):
        row["ratio"] = row["thunder"]["added"] / row["torch.compile"]["added"]
    return row


def holds(row: dict) -> bool:
    """Whether thunder adds at most half of what torch.compile adds: also where it adds nothing at all."""
    if "ratio" not in row:
        return True
    return row["thunder"]["added"] <= RATIO_BAR * row["torch.compile"]["added"]


def line(name: str, row: dict, systems: list[str]) -> str:
    parts = [f"{name:34} eager {row['eager']:8.2f} us"]
    for system in systems:
        low, high = row[system]["interval"]
        parts.append(f"{system} adds {row[system]['added']:8.2f} us [{low:.2f}, {high:.2f}]")
    if "ratio" in row:
        parts.append(f"ratio {row['ratio']:6.3f}" + ("" if holds(row) else f"  above {RATIO_BAR}"))
    return "   ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=parse_systems, default=["torch.compile", "thunder"], help="eager always runs")
    parser.add_argument("--samples", type=int, default=300, help="interleaved paired samples")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="programs whose name contains one of the words")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    chosen = parser.parse_args()
    systems = [system for system in chosen.systems if system != "eager"]
    if "torch.compile" in systems and cxx_compiler() is None:
        print("no C++ compiler: torch.compile cannot run here")
        systems.remove("torch.compile")
    torch.set_num_threads(1)
    rows = {}
    with torch.no_grad():
        for name, make in cases().items():
            if any(word in name for word in chosen.only):
                rows[name] = measure(make, systems, chosen.samples)
                print(line(name, rows[name], systems), flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n")
    short = [name for name, row in rows.items() if not holds(row)]
    print(f"{len(short)} of {len(rows)} programs fall short of the bar: {'; '.join(short)}" if short else "holds")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
