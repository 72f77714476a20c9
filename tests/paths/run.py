"""Count what programs that decide by data show: `python -m tests.paths.run --corpus --host --programs 5000`.

Prints the paths that each program of the corpus is compiled to, what of the generated programs was the same, refused in
words, or wrong, and each that is wrong, made smaller. The exit status says whether any was wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings

import torch

from tests.paths import generated
from tests.paths.compared import beside_eager
from tests.paths.corpus import HOST, PROGRAMS
from tests.paths.test_corpus import CALLS


def corpus(table: dict) -> int:
    """Prints the paths of each program. Returns how many programs are wrong."""
    wrong = 0
    for name, (make, arguments) in table.items():
        g = torch.Generator().manual_seed(0)
        try:
            compiled = beside_eager(make, [arguments(g) for _ in range(CALLS)])
            print(f"{name}: {len(compiled.programs)} paths in {CALLS} calls")
        except AssertionError as error:
            wrong += 1
            print(f"{name}: WRONG {error}")
    print(f"{len(table)} programs, wrong {wrong}")
    return wrong


def programs(first: int, count: int) -> int:
    """Runs generated programs. Returns how many are wrong."""
    found, words = collections.Counter(), collections.Counter()
    for seed in range(first, first + count):
        program = generated.generate(seed)
        kind, text = generated.run(program)
        found[kind] += 1
        if kind == "refused":
            words[text.split("\n")[0]] += 1
        if kind == "wrong":
            print(f"seed {seed}: {text}\n{generated.smaller(program).source()}", flush=True)
    print(f"{count} programs: " + ", ".join(f"{kind} {n}" for kind, n in found.items()))
    for text, n in words.most_common(20):
        print(f"  {n} {text}")
    return found["wrong"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", action="store_true")
    parser.add_argument("--host", action="store_true", help="programs that run host code as well")
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    wrong = corpus(PROGRAMS) if given.corpus else 0
    wrong += corpus(HOST) if given.host else 0
    wrong += programs(given.first, given.programs) if given.programs else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
