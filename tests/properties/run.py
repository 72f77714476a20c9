"""Count what generated programs show: `python -m tests.properties.run --mutations 20000 --programs 10000 --library`.

Prints how many calls were the same, wrong, refused in words, and compiled again needlessly; each program that is wrong
is shrunk and printed as a file that runs by itself. The exit status says whether any was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator

import torch

from tests.properties import library, mutations, programs
from tests.properties.compared import Program, Verdict, kind_of, run, script, wrong
from tests.properties.shrink import shrink


@dataclasses.dataclass
class Counts:
    """What the calls of a part gave. shown: (name, words, program) of each program that is wrong."""

    programs: int = 0
    mutations: int = 0
    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    words: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    checked: int = 0
    needless: int = 0
    shown: list = dataclasses.field(default_factory=list)

    def add(self, name: str, program: Program, verdicts: list[Verdict]) -> None:
        self.programs += 1
        self.mutations += len(program.steps)
        for verdict in verdicts:
            self.calls[verdict.kind] += 1
            self.checked += verdict.checked
            self.needless += verdict.needless
            if verdict.needless:
                self.words[f"needless: {verdict.words[:120]}"] += 1
            elif verdict.kind == "wrong":
                self.shown.append((name, verdict.words, program))
            elif verdict.kind != "same":
                self.words[f"{verdict.kind}: {verdict.words}"] += 1

    def report(self, title: str) -> str:
        kinds = {k: self.calls[k] for k in ("same", "wrong", "refused", "failed", "warned", "unstable")}
        share = 100 * self.needless / max(self.checked, 1)
        return (
            f"{title}: {self.programs} programs, {self.mutations} mutations, {sum(self.calls.values())} calls: "
            + ", ".join(f"{k} {n}" for k, n in kinds.items())
            + f"; needless recompilations {self.needless} of {self.checked} calls that read nothing new ({share:.1f} %)"
        )


def smaller(program: Program, words: str) -> Program:
    """The program without what its being wrong in this way does not need."""
    kind = kind_of(words)
    return shrink(program, lambda p: bool(found := wrong(p)) and kind_of(found) == kind)


def mutation_programs(seeds: Iterable[int]) -> Iterator[tuple[str, Program]]:
    for seed in seeds:
        yield f"mutations {seed}", mutations.generate(seed)


def python_programs(seeds: Iterable[int]) -> Iterator[tuple[str, Program]]:
    for seed in seeds:
        yield f"programs {seed}", programs.generate(seed)


def library_programs(seed: int = 0, wanted: int = 3) -> Iterator[tuple[str, Program]]:
    for name, program in library.generate_all(seed, wanted):
        if program is not None:
            yield f"library {name}", program


def count(made: Iterator[tuple[str, Program]], stop: int | None = None, stream=None) -> Counts:
    """Run programs until there are no more, or as many mutations as `stop`."""
    counts = Counts()
    for name, program in made:
        try:
            counts.add(name, program, run(program))
        except Exception as e:  # noqa: BLE001 - a fault of this harness is counted, and does not end a long run
            counts.words[f"harness: {type(e).__name__}: {str(e)[:100]}"] += 1
        if stream is not None and counts.programs % 500 == 0:
            print(counts.report("so far"), file=stream, flush=True)
        if stop is not None and counts.mutations >= stop:
            break
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=0, help="how many mutations")
    parser.add_argument("--programs", type=int, default=0, help="how many Python programs")
    parser.add_argument("--library", action="store_true", help="every function of the standard library's pure modules")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, default=10, help="how many wrong programs to shrink and print")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdin = io.StringIO()
    seeds = range(given.seed, sys.maxsize)
    parts = []
    if given.mutations:
        parts.append(("mutations", mutation_programs(seeds), given.mutations))
    if given.programs:
        parts.append(("programs", python_programs(seeds[: given.programs]), None))
    if given.library:
        parts.append(("library", library_programs(given.seed), None))
    bad = 0
    for title, made, stop in parts:
        out = sys.stdout
        # library functions write, and make files
        with open(os.devnull, "w") as quiet, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            sys.stderr = quiet
            try:
                counts = count(made, stop, out)
            finally:
                sys.stderr = sys.__stderr__
        print(counts.report(title))
        for words, n in counts.words.most_common():
            print(f"  {n:6} {words}")
        bad += len(counts.shown)
        for name, words, program in counts.shown[: given.show]:
            print(f"\n---- {name}: {words}\n{script(smaller(program, words))}", flush=True)
        if len(counts.shown) > given.show:
            print("also wrong:", ", ".join(name for name, *_ in counts.shown[given.show :]))
    return 1 if bad else 0


if __name__ == "__main__":
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main())
