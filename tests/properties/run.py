"""Count what generated programs show, each part in as many processes as wanted:

    python -m tests.properties.run --mutations 20000 --programs 10000 --numbers 5000 --library --paths 5000 --processes 16

Prints how many calls were the same, wrong, refused in words, and compiled again needlessly, of the parts of this folder
and of the programs that decide by data (`tests/paths/generated.py`). Each program that is wrong is shrunk and printed as
a file that runs by itself. The exit status says whether any was wrong, or ended its process.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import pickle
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tests.paths import generated
from tests.properties import library, mutations, numbers, programs
from tests.properties.compared import Hang, Program, Verdict, kind_of, run, script, wrong
from tests.properties.shrink import shrink


@dataclasses.dataclass
class Counts:
    """What the calls of a part gave. shown: (name, words, file) of programs that are wrong."""

    programs: int = 0
    mutations: int = 0
    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    words: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    checked: int = 0
    needless: int = 0
    shown: list = dataclasses.field(default_factory=list)

    def add(self, verdicts: list[Verdict]) -> None:
        self.programs += 1
        for verdict in verdicts:
            self.calls[verdict.kind] += 1
            self.checked += verdict.checked
            self.needless += verdict.needless
            if verdict.needless:
                self.words[f"needless: {verdict.words[:120]}"] += 1
            elif verdict.kind not in ("same", "wrong"):
                self.words[f"{verdict.kind}: {verdict.words}"] += 1

    def __iadd__(self, other: Counts) -> Counts:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def report(self, title: str) -> str:
        kinds = {k: self.calls[k] for k in ("same", "wrong", "refused", "failed", "warned", "unstable", "died")}
        share = 100 * self.needless / max(self.checked, 1)
        return (
            f"{title}: {self.programs} programs, {self.mutations} mutations, {sum(self.calls.values())} calls: "
            + ", ".join(f"{k} {n}" for k, n in kinds.items())
            + f"; needless recompilations {self.needless} of {self.checked} calls that read nothing new ({share:.1f} %)"
        )


def smaller(program: Program, words: str) -> Program:
    """The program without what its being wrong in this way does not need."""
    kind = kind_of(words)
    return shrink(program, lambda p: bool(wrong_programs := wrong(p)) and kind_of(wrong_programs) == kind)


class Part(NamedTuple):
    """make(number, seed): the programs of one number, with their names. run: their verdicts. file(program, words):
    what is printed of one that is wrong. chunk: how many numbers a process takes."""

    make: Callable[[int, int], list]
    run: Callable[..., list[Verdict]]
    file: Callable[..., str]
    chunk: int


def _shrunk(program: Program, words: str) -> str:
    return script(smaller(program, words))


def _library(number: int, seed: int) -> list:
    name = NAMES[number]
    return [(name, program) for program in library.programs_of(name, seed)]


NAMES = [n for n in library.names() if n not in library.LEFT_OUT]
PARTS = {
    "mutations": Part(lambda n, seed: [(n + seed, mutations.generate(n + seed))], run, _shrunk, 50),
    "programs": Part(lambda n, seed: [(n + seed, programs.generate(n + seed))], run, _shrunk, 100),
    "numbers": Part(lambda n, seed: [(n + seed, numbers.generate(n + seed))], run, _shrunk, 100),
    "library": Part(_library, run, _shrunk, 40),
    "paths": Part(
        lambda n, seed: [(n + seed, generated.generate(n + seed))],
        lambda program: [Verdict(*(word.split("\n")[0] for word in generated.run(program)))],
        lambda program, words: generated.smaller(program).source(),
        100,
    ),
}


def count(
    title: str, first: int, stop: int, seed: int = 0, show: int = 3, said: Callable = lambda name: None
) -> Counts:
    """What the programs of the numbers from `first` to `stop` show. said: is told each name before it runs."""
    part, counts = PARTS[title], Counts()
    # library functions write, and make files
    with open(os.devnull, "w") as quiet, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stderr(quiet):
            for number in range(first, stop):
                said(number)
                try:
                    sample = part.make(number, seed)
                except Hang:  # another program took the processor
                    counts.calls["unstable"] += 1
                    continue
                for name, program in sample:
                    said(name)
                    try:
                        verdicts = part.run(program)
                    except Exception as e:  # noqa: BLE001 - a fault of this harness is counted, and does not end a run
                        verdicts = [Verdict("failed", f"harness: {type(e).__name__}: {str(e)[:100]}")]
                    counts.add(verdicts)
                    counts.mutations += len(getattr(program, "steps", ()))
                    if (words := next((v.words for v in verdicts if v.kind == "wrong"), None)) is not None:
                        text = part.file(program, words) if len(counts.shown) < show else ""
                        counts.shown.append((f"{title} {name}", words, text))
    return counts


# ------------------------------------------------------------------------------------------------------ in processes


def _count_apart(title: str, first: int, stop: int, seed: int, show: int) -> Counts:
    """`count` in a process of its own, so that what a program does to its process ends there."""
    with tempfile.TemporaryDirectory() as folder:
        file, name = pathlib.Path(folder, "counts"), pathlib.Path(folder, "name")
        work = [title, *map(str, (first, stop, seed, show, file, name))]
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.properties.run", "--work", *work]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
        if file.exists():
            return pickle.loads(file.read_bytes())
        last = f"{title} {name.read_text() if name.exists() else first}"
        counts = Counts(calls=collections.Counter(died=1))
        counts.shown.append((last, "the process ended", ended.stderr[-3000:] if "ended" in locals() else "it hangs"))
        return counts


def _work(title: str, first: str, stop: str, seed: str, show: str, file: str, name: str) -> None:
    sys.stdin = io.StringIO()
    random.seed(0)
    told = pathlib.Path(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = count(title, int(first), int(stop), int(seed), int(show), lambda name: told.write_text(str(name)))
    pathlib.Path(file).write_bytes(pickle.dumps(counts))


def chunks(title: str, wanted: int) -> Iterator[tuple[int, int]]:
    size = PARTS[title].chunk
    for first in range(0, wanted, size):
        yield first, min(first + size, wanted)


def total(title: str, wanted: int, seed: int, show: int, pool: concurrent.futures.Executor, processes: int) -> Counts:
    """What `wanted` programs show, or as many as have `wanted` mutations."""
    counts, started, shown = Counts(), time.monotonic(), 0
    ahead = chunks(title, wanted)
    pending: set = set()
    while True:
        if title != "mutations" or counts.mutations < wanted:
            for at in itertools.islice(ahead, processes - len(pending)):
                pending.add(pool.submit(_count_apart, title, *at, seed, show))
        if not pending:
            break
        done, pending = concurrent.futures.wait(pending, return_when="FIRST_COMPLETED")
        for future in done:
            counts += future.result()
        for name, words, text in counts.shown[shown : max(show, shown)]:
            print(f"\n---- {name}: {words}\n{text}", flush=True)
        shown = len(counts.shown)
    print(counts.report(title) + f"; {time.monotonic() - started:.0f} s")
    for words, n in counts.words.most_common():
        print(f"  {n:6} {words}")
    if counts.shown:
        print("wrong:", ", ".join(name for name, *_ in counts.shown), flush=True)
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=0, help="how many mutations")
    parser.add_argument("--programs", type=int, default=0, help="how many Python programs")
    parser.add_argument("--library", action="store_true", help="every function of the standard library's pure modules")
    parser.add_argument("--numbers", type=int, default=0, help="how many programs of numbers that change")
    parser.add_argument("--paths", type=int, default=0, help="how many programs that decide by data")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, default=10, help="how many wrong programs to shrink and print")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--work", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.work:
        _work(*options.work)
        return 0
    wanted = {
        "mutations": options.mutations,
        "programs": options.programs,
        "library": len(NAMES) if options.library else 0,
        "numbers": options.numbers,
        "paths": options.paths,
    }
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        counts = [total(t, n, options.seed, options.show, pool, options.processes) for t, n in wanted.items() if n]
    return int(any(c.shown for c in counts))


if __name__ == "__main__":
    sys.exit(main())
