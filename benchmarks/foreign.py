"""Models, layers and losses of libraries: a training step, a second batch size and an evaluation, beside eager.

    python benchmarks/foreign.py [NAME ...] [--library LIBRARY,...] [--held] [--draw COUNT --seed SEED]

One line a case: `captured`, `around N eager calls`, `fallback` with the refused line, `silent` where no program ran and
no warning said so, `unequal`, or `raises`; the number of compiled programs and the seconds of all calls. A case whose
library is not installed is skipped, with a line.

Every fourth case of the first ones, and the cases of every second other library, are held aside: --held runs these
alone, for changes that were made by looking at the others. --draw runs COUNT cases of all libraries but those of the
first cases, drawn in turn from one library after the other.

A case is equal where results, gradients of parameters and gradients of inputs deviate from eager's by at most 1e-5 of
their norm, or are as near to those of float64 as eager's are: at most twice as far. A case that eager does not run, or
that gives two results in two runs, is skipped.
Exit status 1 where a case is unequal, silent or raises.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import itertools
import random
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator

import numpy
import torch
from foreign_cases import first, science, sequences, signals, tables, torchvision_operators, vision  # noqa: F401 - enter
from foreign_cases.common import CASES, Case
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder
from thunder.errors import FallbackWarning
from thunder.ops.eager_calls import is_eager_call

BOUND = 1e-5  # norm-relative
FIRST, SECOND = 2, 3  # batch sizes
MOST_PROGRAMS = 3  # training, symbolic sizes, evaluation


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def results(module: Callable, inputs: tuple, parameters: list, train: bool) -> list[torch.Tensor]:
    """All tensors of a call, and in training the gradients of parameters and of floating inputs."""
    seed(1)
    if not train:
        with torch.no_grad():
            return [t for t in tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
    inputs = tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs)
    for p in parameters:
        p.grad = None
    outputs = [t for t in tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
    floats = [torch.view_as_real(t) if t.is_complex() else t for t in outputs if t.requires_grad]
    sum((t.float() if t.dim() == 0 else t.float().square().mean() for t in floats), torch.zeros(())).backward()
    gradients = [t.grad for t in (*parameters, *inputs)]
    return [t.detach() for t in outputs] + [torch.zeros(()) if g is None else g for g in gradients]


def deviation(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest norm-relative difference; infinite where the tensors do not match."""
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(ours, expected, strict=True):
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = torch.nan_to_num(a.to(wide)), torch.nan_to_num(b.to(wide))
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=1e-3)))
    return worst


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype is torch.float32 else x


def _halved(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype is torch.float64 else x


class Expected:
    """A case, and what eager gives for it."""

    def __init__(self, case: Case):
        seed(0)
        module = case.make()
        inputs, second = case.inputs(FIRST), case.inputs(SECOND)
        self.plan = [(inputs, True), (inputs, True), (second, True), (inputs, False)]
        self.module, again, self.precise = (copy.deepcopy(module) for _ in range(3))
        self.results = list(self.steps(module, module))
        if max(map(deviation, self.steps(again, again), self.results)) > BOUND:
            raise ValueError("two runs give two results")

    def deviation(self, outcomes: list[list[torch.Tensor]]) -> float:
        """The largest one of all steps. What deviates more than BOUND is compared with the results of float64."""
        worst = max(map(deviation, outcomes, self.results))
        if worst <= BOUND or worst == float("inf"):
            return worst
        self.plan = [(tuple(_doubled(x) for x in inputs), train) for inputs, train in self.plan]
        precise = [[_halved(t) for t in step] for step in self.steps(self.precise.double(), self.precise)]
        for ours, theirs, exact in zip(outcomes, self.results, precise, strict=True):
            pairs = [(deviation([a], [c]), deviation([b], [c])) for a, b, c in zip(ours, theirs, exact, strict=True)]
            if any(a > 2 * b + BOUND for a, b in pairs):
                return worst
        return 0.0

    def steps(self, function: Callable, module: nn.Module) -> Iterator[list[torch.Tensor]]:
        parameters = list(module.parameters())
        for inputs, train in self.plan:
            module.train(train)
            yield results(function, inputs, parameters, train)


def run(case: Case) -> tuple[str, int, str]:
    """(what happened, the number of programs, words about it)"""
    try:
        importlib.import_module(case.library)
        expected = Expected(case)
    except Exception as error:  # noqa: BLE001 - not installed, of another version, or without what it needs
        return "skipped", 0, f"eager raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    compiled = thunder.jit(expected.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worst = expected.deviation(list(expected.steps(compiled, expected.module)))
    said = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    programs = thunder.cache_misses(compiled)
    eager = {
        b.args[1] for p in compiled.programs for b in p.computation_traces[0].bound_symbols if is_eager_call(b.sym)
    }
    words = " | ".join(" ".join(text.split())[:420] for text in said[:2])
    if worst > BOUND:
        return "unequal", programs, f"{worst:.1e} {words}"
    if any("runs as it is in each call" not in text for text in said):
        return "fallback", programs, words
    if not compiled.programs and not said:
        return "silent", programs, words
    return (f"around {len(eager)} eager calls" if eager or said else "captured"), programs, words


def is_first(case: Case) -> bool:
    return case.module == first.__name__


def is_held(case: Case) -> bool:
    if is_first(case):
        return [one for one in CASES if is_first(one)].index(case) % 4 == 3
    return zlib.crc32(case.library.encode()) % 2 == 1


def drawn(number: int) -> list[Case]:
    """The cases of other libraries than the first, in an order of the seed: one library after the other."""
    generator, by_library = random.Random(number), collections.defaultdict(list)
    for case in CASES:
        if not is_first(case):
            by_library[case.library].append(case)
    libraries = generator.sample(list(by_library), len(by_library))
    rows = [generator.sample(by_library[name], len(by_library[name])) for name in libraries]
    return [case for turn in itertools.zip_longest(*rows) for case in turn if case is not None]


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.draw:
        return drawn(options.seed)
    if options.names:
        return [case for case in CASES if case.name in options.names]
    libraries = options.library.split(",") if options.library else {case.library for case in CASES}
    return [case for case in CASES if case.library in libraries and is_held(case) == options.held]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--library", help="several by commas")
    parser.add_argument("--draw", type=int, default=0, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torchvision_operators.declare()
    counts, libraries, many = collections.Counter[str](), set[str](), 0
    for case in chosen(options):
        if options.draw and counts.total() - counts["skipped"] == options.draw:
            break
        start = time.perf_counter()
        try:
            kind, programs, words = run(case)
        except Exception as error:  # noqa: BLE001 - a line of the table
            kind, programs, words = "raises", 0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        counts[kind.split()[0]] += 1
        many += programs > MOST_PROGRAMS
        libraries |= {case.library} if kind != "skipped" else set()
        seconds = time.perf_counter() - start
        print(f"{kind:24} {case.name:44} {programs} programs {seconds:5.1f} s  {words}", flush=True)
    print(f"{len(libraries)} libraries, {dict(counts)}, more than {MOST_PROGRAMS} programs: {many}")
    return int(bool(counts.keys() & {"unequal", "silent", "raises"}))


if __name__ == "__main__":
    sys.exit(main())
