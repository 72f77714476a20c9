"""What does a warm call of a compiled program cost beyond what PyTorch itself takes?

    python benchmarks/call_overhead.py [--systems torch.compile,thunder] [--samples 300] [--only WORD ...] [--json FILE]
    python benchmarks/call_overhead.py --decisions [--samples 300] [--only WORD ...]

Programs whose operations take next to no time, on the CPU, under torch.no_grad(): one add on tiny tensors, and modules
with 10, 100 and 400 parameters, once requiring grad and once not. "joined": one operation takes all the parameters, so
there is nothing to fuse and no module call to save, and what a system adds is the cost of its call. "products": a
matrix product with each in turn, as a model would; there compiled programs also save eager's Python between the
operations. The modules read `_parameters` directly, because Module.__getattr__ would be eager's loss and everyone
else's gain.

The systems take turns in one process; a sample is the mean of several calls in a row, paired with eager's of the same
round. Printed: the median of the paired differences in microseconds with its 95 % interval from order statistics, and
thunder's divided by torch.compile's. The bar: thunder's upper end is at most half of torch.compile's lower end. Where
torch.compile's interval reaches zero there is nothing to take half of: the program is shown, without a ratio, and not
judged. The exit status is 1 when a judged program misses the bar, or none was judged although both systems ran.

--decisions: what a decision by data costs, in processor time: a call of a program with one and a call of the same
program without it, compiled and eager. Printed: the ratio of the calls with the decision, and that of what the decision
adds to a compiled call to what it adds to eager's, which is its synchronization. The bar: the latter is at most 1.2 in
the median. Calls whose answers alternate run parts of two programs; they are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from thunder.tests.measuring import (
    compile_with,
    cxx_compiler,
    interleaved,
    median,
    median_interval,
    paired_ratio,
    parse_systems,
    repetitions,
)

RATIO_BAR, DECISION_BAR = 0.5, 1.2
SAMPLE_SECONDS = 1e-3  # one sample is at least about this long: thousands of the clock's steps
WIDTH = 8


class Joined(nn.Module):
    """Its input and all its parameters in one tensor: one operation, however many parameters."""

    def __init__(self, parameters: int, requires_grad: bool):
        super().__init__()
        for i in range(parameters):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.randn(2), requires_grad=requires_grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, *self._parameters.values()])


class Products(nn.Module):
    """Multiplies its input by one small matrix after the other."""

    def __init__(self, parameters: int, requires_grad: bool):
        super().__init__()
        for i in range(parameters):
            # near the identity, so that 400 products neither vanish nor overflow
            matrix = torch.eye(WIDTH) + 1e-3 * torch.randn(WIDTH, WIDTH)
            self.register_parameter(f"weight_{i}", nn.Parameter(matrix, requires_grad=requires_grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self._parameters.values():
            x = torch.mm(x, weight)
        return x


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def cases() -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    """Name -> what makes the program and its arguments."""
    makers: dict[str, Callable[[], tuple[Callable, tuple]]] = {
        "one add": lambda: (add, (torch.randn(2), torch.randn(2)))
    }
    for kind, module, shape in (("joined", Joined, (2,)), ("products", Products, (WIDTH, WIDTH))):
        for parameters in (10, 100, 400):
            for grad in (False, True):
                name = f"{kind}, {parameters} parameters, {'' if grad else 'not '}requiring grad"
                makers[name] = lambda module=module, n=parameters, grad=grad, shape=shape: (
                    module(n, grad),
                    (torch.randn(shape),),
                )
    return makers


def measure(make: Callable[[], tuple[Callable, tuple]], systems: list[str], samples: int) -> dict:
    """Medians and intervals in microseconds: eager's time of a call, and what each system adds to it. Raises ValueError
    where a result differs from eager's."""
    torch.manual_seed(0)
    program, args = make()
    expected = program(*args)
    calls = {"eager": lambda: program(*args)}
    for system in systems:
        torch._dynamo.reset()
        compiled = compile_with(system, program)
        for _ in range(3):
            torch.testing.assert_close(
                compiled(*args), expected, msg=lambda text, system=system: f"{system} and eager differ: {text}"
            )
        calls[system] = lambda compiled=compiled: compiled(*args)
    repeat = repetitions(calls["eager"], SAMPLE_SECONDS)
    interleaved(calls, max(10, samples // 10), repeat)  # warm
    times = interleaved(calls, samples, repeat)
    row: dict = {"repeat": repeat, "samples": samples, "eager": 1e6 * median(times["eager"])}
    for system in systems:
        added = [1e6 * (ours - eager) for ours, eager in zip(times[system], times["eager"], strict=True)]
        row[system] = {"added": median(added), "interval": median_interval(added)}
    if {"torch.compile", "thunder"} <= set(systems) and row["torch.compile"]["interval"][0] > 0:
        row["ratio"] = row["thunder"]["added"] / row["torch.compile"]["added"]
        row["holds"] = row["thunder"]["interval"][1] <= RATIO_BAR * row["torch.compile"]["interval"][0]
    return row


def line(name: str, row: dict, systems: list[str]) -> str:
    parts = [f"{name:44} eager {row['eager']:8.2f} us"]
    for system in systems:
        low, high = row[system]["interval"]
        parts.append(f"{system} adds {row[system]['added']:8.2f} us [{low:.2f}, {high:.2f}]")
    if "ratio" in row:
        parts.append(f"ratio {row['ratio']:6.3f}" + ("" if row["holds"] else f"  misses {RATIO_BAR}"))
    elif len(systems) > 1:
        parts.append("not judged: torch.compile adds nothing")
    return "   ".join(parts)


def plain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + 1


def nan_guard(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if torch.isnan(y).any():
        return y - 1
    return y + 1


def sign_of_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum() < 0:
        return y - 1
    return y + 1


def number_of_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum().item() < 0:
        return y - 1
    return y + 1


def measure_decision(program: Callable, args: list[torch.Tensor], samples: int) -> dict:
    """Medians in microseconds of calls with and without the decision, and their ratios. The arguments take turns."""
    calls = {}
    for name, fn in (("plain", plain), ("decides", program)):
        compiled = compile_with("thunder", fn)
        for x in args * 3:
            torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=0)
        calls[f"eager {name}"] = lambda fn=fn: [fn(x) for x in args]
        calls[f"ours {name}"] = lambda compiled=compiled: [compiled(x) for x in args]
    repeat = repetitions(calls["eager plain"], SAMPLE_SECONDS)
    interleaved(calls, max(10, samples // 10), repeat)  # warm
    times = interleaved(calls, samples, repeat, time.process_time)
    row = {name: 1e6 * median(results) / len(args) for name, results in times.items()}
    row["ratio"], row["low"], row["high"] = paired_ratio(times["ours decides"], times["eager decides"])
    ours, eagers = (
        median([a - b for a, b in zip(times[f"{who} decides"], times[f"{who} plain"], strict=True)])
        for who in ("ours", "eager")
    )
    row["added"] = ours / eagers
    return row


def decisions(samples: int, only: list[str]) -> int:
    missed = []
    for size in (2, 100_000):
        for grad in (False, True):
            for program, signs in (
                (nan_guard, (1, 1)),
                (sign_of_a_sum, (1, 1)),
                (number_of_a_sum, (1, 1)),
                (sign_of_a_sum, (1, -1)),
            ):
                name = f"{program.__name__}, {size} numbers, {'' if grad else 'not '}requiring grad"
                name += ", alternating" if signs[0] != signs[1] else ""
                if not any(word in name for word in only):
                    continue
                args = [(sign * torch.rand(size)).requires_grad_(grad) for sign in signs]
                row = measure_decision(program, args, samples)
                print(
                    f"{name:66} eager {row['eager decides']:7.2f} us, ours {row['ours decides']:7.2f} us, ratio "
                    f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}], added {row['added']:.3f} of eager's",
                    flush=True,
                )
                if signs[0] == signs[1] and row["added"] > DECISION_BAR:
                    missed.append(name)
    print(f"missed: {'; '.join(missed)}" if missed else "all hold")
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=parse_systems, default=["torch.compile", "thunder"], help="eager always runs")
    parser.add_argument("--samples", type=int, default=300, help="interleaved paired samples")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="programs whose name contains one of the words"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--decisions", action="store_true", help="decisions by data, beside eager's synchronization")
    chosen = parser.parse_args()
    if chosen.decisions:
        torch.set_num_threads(1)
        return decisions(chosen.samples, chosen.only)
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
    judged = {name: row for name, row in rows.items() if "holds" in row}
    missed = [name for name, row in judged.items() if not row["holds"]]
    print(
        f"{len(judged) - len(missed)} of {len(judged)} judged programs hold the bar, {len(rows) - len(judged)} not "
        "judged" + (f"; missed: {'; '.join(missed)}" if missed else "")
    )
    return int(bool(missed) or (len(systems) > 1 and not judged))


if __name__ == "__main__":
    sys.exit(main())
